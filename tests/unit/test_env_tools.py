"""Tools: schemas of functions, arguments, results and errors, the built-in ones, and the loop that runs them."""

from __future__ import annotations

import enum
import textwrap
import threading
import time
from typing import Literal

import pytest

import tool_help
from trew.env import Call, Reply, Say, Tool
from trew.env.load import Spec
from trew.env.load import load as load_environment
from trew.env.tools import ToolError, ToolLoop, load, tool_of
from trew.env.tools.arguments import from_text, problems, unknown_keywords
from trew.env.tools.builtin import BUILTIN, calculator, python
from trew.env.tools.calling import run
from trew.errors import ConfigError, SandboxError

SEARCH, ADD, NOW = tool_of(tool_help.search), tool_of(tool_help.add), tool_of(tool_help.now)


# ---- schemas


def test_a_function_becomes_a_tool():
    assert (SEARCH.name, SEARCH.description) == ("search", "Finds pages.")
    assert SEARCH.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "the words to look for"},
            "limit": {"type": "integer", "description": "how many pages"},
            "exact": {"type": "boolean", "description": "whether all words must be there"},
        },
        "required": ["query"],
    }
    assert NOW.parameters == {"type": "object", "properties": {}}


def documented(function, *names):
    function.__doc__ = "Does it.\n\nArgs:\n" + "".join(f"    {name}: what\n" for name in names)
    return function


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:
    return a


def no_line(a: int) -> int:
    """Does it."""
    return a


def any_class(a: threading.Thread) -> int:
    return 1


def unknown_hint(a: Nowhere) -> int:  # type: ignore[name-defined]
    return 1


def many(*a: int) -> int:
    return 1


def by_place(a: int, /) -> int:
    return a


async def later(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_docstring, "no docstring"),
        (documented(no_hint, "a"), "missing a type hint"),
        (no_line, "no description for the argument 'a'"),
        (documented(any_class, "a"), "Couldn't convert the type hint"),
        (documented(unknown_hint, "a"), "Nowhere"),
        (documented(many, "a"), "'a' cannot be given by name"),
        (documented(by_place, "a"), "'a' cannot be given by name"),
        (documented(later, "a"), "async"),
        (lambda: 1, "name must be of letters"),
        (5, "must be a function, got an object of int"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function, why):
    with pytest.raises(ConfigError, match=r"^tool ") as refused:
        tool_of(function)
    assert why in str(refused.value)


# ---- arguments


class Colour(enum.Enum):
    RED = "red"


def test_arguments_are_checked_against_the_schema():
    def paint(
        colour: Literal["red", "blue"],
        sizes: list[int],
        at: tuple[int, float] = (0, 0.0),
        more: dict[str, int] | None = None,
        either: int | list[str] = 0,
        same: Colour = Colour.RED,
    ) -> str:
        return ""

    schema = tool_of(documented(paint, "colour", "sizes", "at", "more", "either", "same")).parameters
    fine = {"colour": "red", "sizes": [1, 2.0], "at": [1, 2], "more": None, "either": ["a"], "same": "red"}
    assert problems(fine, schema) == []
    assert unknown_keywords(schema) == []

    def wrong(**changed):
        [one] = problems({**fine, **changed}, schema)
        return one

    assert wrong(colour="green") == '\'colour\' must be one of "red", "blue", got "green"'
    assert wrong(sizes="12") == "'sizes' must be a list, got \"12\""
    assert wrong(sizes=[1, "2"]) == "'sizes'[1] must be an integer, got \"2\""
    assert wrong(sizes=[True]) == "'sizes'[0] must be an integer, got true"
    assert wrong(at=[1]) == "'at' must have 2 members, got 1"
    assert wrong(at=[1.5, 1]) == "'at'[0] must be an integer, got 1.5"
    assert wrong(more={"a": "b"}) == "'more'['a'] must be an integer, got \"b\""
    assert wrong(either="a").startswith("'either' must be an integer or a list, got")
    assert wrong(same="blue").startswith("'same' must be one of")
    assert wrong(sizes=None) == "'sizes' must be a list, got null"
    assert wrong(color="red") == (
        "there is no argument 'color' (did you mean 'colour'?) (arguments: colour, sizes, at, more, either, same)"
    )
    assert len(wrong(sizes="x" * 10**7)) < 200


def test_several_problems_are_one_message():
    [result] = run([Call("search", {"limit": "many", "q": 1})], {"search": SEARCH}, seconds=5.0)
    assert result.failed
    assert result.text == (
        "error: search: 'limit' must be an integer, got \"many\"; there is no argument 'q' "
        "(arguments: query, limit, exact); the argument 'query' is missing"
    )


def test_text_becomes_what_the_schema_calls_for():
    assert from_text(" 5 ", {"type": "integer"}) == 5
    assert from_text("5", {"anyOf": [{"type": "string"}, {"type": "array"}]}) == "5"
    assert from_text("[1, 2]", {"type": "array"}) == [1, 2]
    assert from_text("false", {"type": "boolean"}) is False
    assert from_text("None", {"type": "integer", "nullable": True}) is None
    assert from_text("five", {"type": "integer"}) == "five"
    assert from_text("NaN", {"type": "number"}) == "NaN"


def test_a_schema_that_asks_for_more_is_refused():
    asked = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}}
    with pytest.raises(ConfigError, match="tool t: its schema uses 'minimum', which is not checked"):
        ToolLoop([Tool("t", "", asked, lambda n: n)], seconds=5.0)


# ---- calls


def called(function, *, seconds: float = 5.0, **arguments):
    [result] = run([Call("f", arguments)], {"f": Tool("f", "", NOW.parameters, function)}, seconds=seconds)
    return result.text, result.failed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (5, "5"),
        (0.1, "0.1"),
        (None, "null"),
        (True, "true"),
        (["é", {"a": 1}], '["é", {"a": 1}]'),
        (b"\xffa", "\ufffda"),
        ({1}, "{1}"),
        (float("nan"), "NaN"),
    ],
)
def test_what_a_tool_returns_becomes_text(value, text):
    assert called(lambda: value) == (text, False)


class Unprintable:
    def __str__(self):
        raise RuntimeError("not me")


def fails(error):
    raise error


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: 1 / 0, "error: f: ZeroDivisionError: division by zero"),
        (lambda: fails(ValueError("two\nlines")), "error: f: ValueError: two lines"),
        (lambda: fails(SystemExit(3)), "error: f: SystemExit: 3"),
        (lambda: fails(ToolError("no such page")), "error: f: no such page"),
        (lambda: fails(MemoryError()), "error: f: MemoryError"),
        (lambda: Unprintable(), "error: f: RuntimeError: not me"),
    ],
)
def test_a_tools_own_exception_is_an_observation(function, text):
    assert called(function) == (text, True)


def test_a_long_message_is_cut():
    text, failed = called(lambda: fails(ValueError("x" * 10**7)))
    assert failed
    assert len(text) < 600


def test_a_sandbox_that_fails_is_no_fault_of_the_policy():
    with pytest.raises(SandboxError):
        called(lambda: fails(SandboxError("gone")))


def test_an_interrupt_is_no_observation():
    with pytest.raises(KeyboardInterrupt):
        called(lambda: fails(KeyboardInterrupt()))


def hangs():
    threading.Event().wait()


def hangs_and_handles_errors():
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


@pytest.mark.parametrize("function", [hangs, hangs_and_handles_errors])
def test_a_tool_that_hangs_is_an_observation(function):
    assert called(function, seconds=0.05) == ("error: f: took longer than 0.05 s", True)


def test_the_calls_of_a_reply_share_their_time():
    tools = {"f": Tool("f", "", NOW.parameters, hangs), "now": NOW}
    results = run([Call("now", {}), Call("f", {}), Call("now", {})], tools, seconds=0.05)
    assert [one.text for one in results] == [
        "12:00",
        "error: f: took longer than 0.05 s",
        "error: now: not run, because the calls before it took 0.05 s",
    ]


def test_a_tool_that_does_not_exist_is_named_with_those_that_do():
    [result] = run([Call("serch", {})], {"search": SEARCH, "now": NOW}, seconds=5.0)
    assert result.text == "error: there is no tool 'serch' (did you mean 'search'?); tools: search, now"
    [result] = run([Call("x" * 10**6, {})], {"search": SEARCH}, seconds=5.0)
    assert len(result.text) < 200


def test_a_whole_number_written_with_a_point_is_an_integer():
    [result] = run([Call("search", {"query": "a", "limit": 2.0})], {"search": SEARCH}, seconds=5.0)
    assert (result.text, result.failed) == ('["a 0", "a 1"]', False)


def test_whole_numbers_inside_lists_and_objects_are_integers_too():
    def shown(at: list[int], by: dict[str, int], to: int | None, of: int | str, mean: float) -> str:
        return repr((at, by, to, of, mean))

    documented(shown, "at", "by", "to", "of", "mean")
    given = {"at": [2.0, 3], "by": {"x": 4.0}, "to": 5.0, "of": 6.0, "mean": 7.0}
    [result] = run([Call("shown", given)], {"shown": tool_of(shown)}, seconds=5.0)
    assert (result.text, result.failed) == ("([2, 3], {'x': 4}, 5, 6, 7.0)", False)


# ---- built in


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("12 * 34", "408"),
        ("1/3", "1/3"),
        ("7 / 2", "3.5"),
        ("-1/8", "-0.125"),
        ("0.1 + 0.2", "0.3"),
        (".5 × 4 − 1", "1"),
        ("2 * (3 + 4.25)", "14.5"),
        ("99999999999999999999 * 99999999999999999999", "9999999999999999999800000000000000000001"),
    ],
)
def test_the_calculator_is_exact(formula, value):
    assert calculator(formula) == value


@pytest.mark.parametrize(
    "formula", ["", "1/0", "2**9", "__import__('os')", "1..2", "1.2.3", "9" * 10**6, "(" * 10**5, "x"]
)
def test_the_calculator_refuses_what_is_no_formula(formula):
    with pytest.raises(ToolError):
        calculator(formula)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "(nothing was printed)"),
        ("import sys; sys.stdout.buffer.write(b'\\xff'); print('a')", "\ufffda"),
    ],
)
def test_python_returns_what_is_printed(code, text):
    assert python(code) == text


def test_python_keeps_nothing():
    # Without bubblewrap there is no file to write, and none to keep.
    python("import builtins; builtins.kept = 1\ntry: open('file', 'w').write('x')\nexcept PermissionError: pass")
    code = "import builtins, os; print(hasattr(builtins, 'kept'), os.path.exists('file'))"
    assert python(code) == "False False"


def test_python_prints_at_most_four_kibibytes():
    text = python("print('a' * 10000)")
    assert text == "a" * 4096 + "\n... [5905 more bytes]"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print(1)\nprint(1 / 0)", "ZeroDivisionError: division by zero; before that it printed:\n1"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(3)", "the program ended with status 3"),
        ("print('\ud800')", "rror"),
        ("while True: print('x' * 1000)", "wrote more than"),
    ],
)
def test_a_program_that_fails_is_an_observation(code, why):
    with pytest.raises(ToolError) as failed:
        python(code)
    assert why in str(failed.value)


def test_python_names_the_line_that_failed():
    with pytest.raises(ToolError, match="line 2: ZeroDivisionError"):
        python("print(1)\nprint(1 / 0)")


# ---- loading


def write(folder, text: str) -> str:
    file = folder / "tools.py"
    file.write_text(textwrap.dedent(text))
    return str(file)


def test_tools_are_loaded_by_name(tmp_path):
    file = write(
        tmp_path,
        """
        def shout(text: str) -> str:
            '''Shouts.

            Args:
                text: what
            '''
            return text.upper()
        """,
    )
    tools, sources = load(["calculator", f"{file}:shout"])
    assert [tool.name for tool in tools] == ["calculator", "shout"]
    assert [*sources] == ["tools.py"]
    assert all(tool_of(function).description for function in BUILTIN.values())


def test_every_problem_is_reported(tmp_path):
    file = write(
        tmp_path,
        """
        def bare(a): return a

        def calculator(a: int) -> int:
            '''Computes.

            Args:
                a: what
            '''
        """,
    )
    with pytest.raises(ConfigError) as refused:
        load(["calculater", f"{file}:nothing", f"{file}:bare", "calculator", f"{file}:calculator", "nowhere.py:f"])
    first, second, third, fourth, fifth = refused.value.problems
    assert "there is no built-in tool 'calculater' (did you mean 'calculator'?); built in: calculator, python" in first
    assert "has no function 'nothing'" in second
    assert third.startswith("environment.tools: tool bare: it has no docstring")
    assert "two tools have the name 'calculator'" in fourth
    assert "no such file" in fifth


# ---- the loop


class Counts:
    """Counts its replies, and ends with the third."""

    tools: tuple[Tool, ...] = ()

    def __init__(self) -> None:
        self.heard: list[Reply] = []

    def reset(self, row, seed):
        return Say.of(Say(({"role": "user", "content": f"{row['word']} {seed}"},), tools=self.tools))

    def step(self, reply):
        self.heard.append(reply)
        return Say(({"role": "user", "content": "on"},), done=len(self.heard) == 3, reward=0.5)

    def close(self):
        self.heard = []


def test_the_loop_goes_on_until_a_reply_without_a_call():
    loop = ToolLoop([SEARCH, NOW], seconds=5.0)
    opening = loop.reset({"prompt": "What?", "answer": 5}, 1)
    assert opening.messages == ({"role": "user", "content": "What?"},)
    assert opening.tools == (SEARCH, NOW)
    said = loop.step(Reply("", calls=(Call("now", {}, "a"), Call("search", {"query": "x", "limit": 1}, "b"))))
    assert said.messages == (
        {"role": "tool", "name": "now", "tool_call_id": "a", "content": "12:00"},
        {"role": "tool", "name": "search", "tool_call_id": "b", "content": '["x 0"]'},
    )
    assert (said.done, said.reward, dict(said.metrics)) == (False, None, {"tool_calls": 2, "tool_errors": 0})
    said = loop.step(Reply("", calls=(Call("search", {}),)))
    assert "the argument 'query' is missing" in said.messages[0]["content"]
    assert dict(said.metrics) == {"tool_calls": 1, "tool_errors": 1}
    said = loop.step(Reply("", malformed="not JSON"))
    assert said.messages[0]["content"] == "error: the call cannot be read: not JSON"
    assert dict(said.metrics) == {"malformed": 1}
    assert loop.step(Reply("5")) == Say(done=True)
    loop.close()


def test_messages_of_a_row_are_the_opening():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert ToolLoop([NOW], seconds=5.0).reset({"prompt": messages}, 1).messages == tuple(messages)


def test_an_environment_sees_replies_without_calls_alone():
    inner = Counts()
    loop = ToolLoop([NOW], inner, seconds=5.0)
    assert loop.reset({"word": "w"}, 7).messages[0]["content"] == "w 7"
    assert loop.step(Reply("", calls=(Call("now", {}),))).messages[0]["content"] == "12:00"
    assert inner.heard == []
    assert [loop.step(Reply("a")).done for _ in range(3)] == [False, False, True]
    loop.close()
    assert inner.heard == []


def test_an_environments_own_tools():
    inner = Counts()
    inner.tools = (SEARCH, Tool("give_up", "", {"type": "object", "properties": {}}))
    loop = ToolLoop([NOW], inner, seconds=5.0)
    assert [tool.name for tool in loop.reset({"word": "w"}, 7).tools] == ["now", "search", "give_up"]
    assert loop.step(Reply("", calls=(Call("search", {"query": "x", "limit": 0}),))).messages[0]["content"] == "[]"
    reply = Reply("", calls=(Call("now", {}), Call("give_up", {})))
    assert loop.step(reply).reward == 0.5
    assert inner.heard == [reply]
    inner.tools = (NOW,)
    with pytest.raises(ConfigError, match="two tools have the name 'now'"):
        loop.reset({"word": "w"}, 7)


def test_tools_of_a_recipe():
    made = load_environment(Spec(tools=("calculator",)), timeout_s=10.0).make()
    made.reset({"prompt": "1 + 1?"}, 0)
    call = Call("calculator", {"formula": "1 + 1"})
    assert made.step(Reply("", calls=(call,))).messages[0]["content"] == "2"
    assert isinstance(made, ToolLoop)
    assert made.seconds == 8.0


def test_a_recipe_without_environment_and_tools_is_refused():
    with pytest.raises(ConfigError, match=r"environment\.name"):
        load_environment(Spec())
