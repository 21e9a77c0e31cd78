"""Programs that are right and must score 1, whatever way they are written in; the sandbox runs each of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from trew.config import RewardConfig
from trew.errors import SandboxError
from trew.rewards import RewardSet, grade
from trew.rewards.builtin import code, code_block
from trew.rewards.builtin.kinds import gold_problem
from trew.rewards.reward_checks import try_reward
from trew.rewards.sandbox import boundary
from trew.types import Prompt


@pytest.fixture(scope="module", autouse=True)
def sandbox():
    try:
        return boundary()
    except SandboxError as error:
        pytest.skip(str(error))


def printed(program, output, **args):
    """The verdict on a program that reads nothing and is to print ``output``."""
    return grade("code_stdin", f"```python\n{program}\n```", tests=[{"input": "", "output": output}], **args)


def asserted(program, *asserts, setup=""):
    """The verdict on a program whose function f is to satisfy the asserts."""
    return grade("code_func", f"```python\n{program}\n```", entry_point="f", asserts=list(asserts), setup=setup)


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys\nsys.exit()"])
def test_a_program_may_end_itself_by_exit_and_quit(end):
    assert printed(f"print(5)\n{end}\nprint(6)", "5").score == 1
    assert printed("print(5)\nexit(3)", "5").score == 0


def test_a_program_may_recurse_as_deep_as_in_a_plain_interpreter():
    deep = "def f(n):\n    return n and 1 + f(n - 1)"
    # The module is one of the 1000 frames that Python allows, f(997) 998 of them.
    assert printed(f"{deep}\nprint(f(997))", "997").score == 1
    assert asserted(deep, "assert f(997) == 997").score == 1
    assert asserted(deep, "assert abs(f(997) - 997) < 1").score == 1
    assert "RecursionError" in printed(f"{deep}\nprint(f(1100))", "1100").detail


def test_a_long_output_may_consist_of_characters_of_several_bytes():
    assert printed("print('\u5b57' * 1_500_000)", "\u5b57" * 1_500_000).score == 1


def test_a_reference_is_checked_under_the_settings_of_the_run():
    row = {"tests": [{"input": "", "output": "5"}], "solution": "held = bytearray(600 << 20)\nprint(5)"}
    assert "MemoryError" in gold_problem("code_stdin", row, {})
    assert gold_problem("code_stdin", row, {"memory_mb": 800, "thinking": True}) == ""
    row = {"entry_point": "f", "asserts": ["assert f() == 5"], "code": "held = bytearray(200 << 20)\ndef f(): return 5"}
    assert gold_problem("code_func", row, {}) == ""
    assert "MemoryError" in gold_problem("code_func", row, {"memory_mb": 64})


def expecting(kind, call, more="pass"):
    return f"try:\n    {call}\n    assert False\nexcept {kind} as error:\n    {more}"


@pytest.mark.parametrize(
    ("body", "kind", "more"),
    [
        ("import json; json.loads('{')", "ValueError", "assert 'line 1' in str(error)"),
        ("b'\\xff'.decode()", "UnicodeDecodeError", "assert error.start == 0"),
        ("{}['key']", "KeyError", "assert error.args == ('key',)"),
        ("raise Own('odd', 3)", "ValueError", "assert error.args == ('odd', 3)"),
        ("raise Own(object())", "ValueError", "assert 'object' in str(error)"),
        ("open('/missing')", "OSError", "assert error.errno == 2"),
        ("raise ExceptionGroup('both', [ValueError()])", "Exception", "pass"),
        ("raise Quiet()", "Exception", "assert str(error) == 'quiet'"),
    ],
)
def test_asserts_may_expect_an_exception_by_a_type_that_it_derives_from(body, kind, more):
    own = "class Own(ValueError): pass\nclass Quiet(Exception):\n    def __str__(self): return 'quiet'\n"
    program = f"{own}def f(x):\n    if x: {body}\n    return x"
    assert asserted(program, "assert f(0) == 0", expecting(kind, "f(1)", more)).score == 1
    assert asserted(program, "assert f(0) == 0", expecting("ZeroDivisionError", "f(1)")).score == 0


def test_the_message_on_an_exception_names_its_own_type():
    own = "class Own(ValueError): pass\ndef f(x): raise Own('odd')"
    assert asserted(own, "assert f(1) == 1").detail == "f(1) == 1: raised Own: odd"


@pytest.mark.parametrize(
    ("value", "test"),
    [
        ("x.keys()", "f({'a': 1}) == {'a'}"),
        ("x.items()", "f({'a': 1}) == {('a', 1)}"),
        ("x.values()", "f({'a': 1}) != {1}"),
        ("x.keys()", "not f({})"),
        ("x.values()", "f({'a': 0})"),
        ("x.keys()", "len(f({'a': 1, 'b': 2})) == 2"),
        ("x.values()", "list(f({'a': 1, 'b': 1})) == [1, 1]"),
        ("x.items()", "dict(f({'a': [1]})) == {'a': [1]}"),
        ("reversed(x)", "list(f([1, 2])) == [2, 1]"),
        ("iter(range(x))", "sum(f(3)) == 3"),
        ("__import__('itertools').chain(x, x)", "list(f([1])) == [1, 1]"),
    ],
)
def test_views_of_tables_and_iterators_are_returned_as_what_they_are(value, test):
    assert asserted(f"def f(x): return {value}", f"assert {test}").score == 1


def test_a_view_with_other_members_is_wrong():
    assert asserted("def f(x): return {'b': 1}.keys()", "assert f(0) == {'a'}").score == 0
    assert asserted("def f(x): return {'a': 2}.items()", "assert f(0) == {('a', 1)}").score == 0


def test_a_setup_may_import_all_names_of_a_module():
    setup = "from math import *\nfrom copy import *\nfrom typing import *\nBIG = inf\ndef g(x: List): return ceil(x)"
    tests = ("assert f(1.5) == ceil(1.2)", "assert f(copy(0.5)) == 1")
    assert asserted("def f(x): return ceil(x)", *tests, setup=setup).score == 1
    assert asserted("def f(x): return 3", *tests, setup=setup).score == 0
    verdict = asserted("def f(x): return 3", *tests, setup="from somewhere import *\nceil(1)")
    assert (verdict.status, verdict.detail) == ("bad_gold", "the setup uses ceil, which it does not define")


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("def test_f():\n    assert f(1) == 2", "test_f has asserts and nothing calls it"),
        ("class T:\n    def test_a(self):\n        assert f(1) == 2", "test_a has asserts and nothing calls it"),
        ("def check(candidate):\n    def inner():\n        assert candidate(1) == 2", "inner has asserts and nothing"),
        ("assert (f(1) == 2, 'wrong')", "a tuple is always true"),
        ("def test_f():\n    assert f(1) == 2\nif __name__ == '__main__':\n    test_f()", "without a call"),
        ("for x, y in []:\n    assert f(x) == y", "without a call"),
    ],
)
def test_asserts_that_never_run_are_no_gold(test, why):
    verdict = asserted("def f(x): return 0", test)
    assert (verdict.score, verdict.status) == (None, "bad_gold")
    assert why in verdict.detail


def test_functions_with_asserts_may_be_called_or_be_check():
    for test in (
        "def near(a, b):\n    assert abs(a - b) < 0.1\nnear(f(1), 2)",
        "def check(candidate):\n    assert candidate(1) == 2",
        "def test_f():\n    assert f(1) == 2\ntest_f()",
    ):
        assert asserted("def f(x): return x + 1", test).score == 1
        assert asserted("def f(x): return x", test).score == 0


def test_a_sentence_about_backticks_opens_no_block():
    block = "```python\nprint(1)\n```"
    assert code_block.extract(f"I put it in ``` fences, as asked:\n{block}") == "print(1)\n"
    assert code_block.extract(f"It begins with ```python as usual:\n{block}") == "print(1)\n"
    # These open one, which the next fence closes.
    assert code_block.extract(f"It prints ```\n{block}\n```") is None
    assert code_block.extract(f"``` some text\n{block}\n```") is None


def test_lines_may_have_their_ends_or_not():
    program = "```python\nprint(input())\nprint(input())\n```"
    for lines in (["a", "b"], ["a\n", "b\n"], ["a\n", "b"]):
        assert grade("code_stdin", program, tests=[{"input": lines, "output": lines}]).score == 1


@pytest.mark.parametrize("missing", ["import multiprocessing\nmultiprocessing.Lock()", "open('/dev/stdin')"])
def test_the_page_on_the_sandbox_names_what_no_boundary_has(missing):
    page = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")
    assert missing.partition("('")[2].strip("')") in page
    assert "queues and locks" in page
    assert printed(f"{missing}\nprint(5)", "5").score == 0


@pytest.mark.parametrize("reference", ["def f(x): return x + 2", None])
def test_a_trial_says_where_no_right_program_is_known(reference):
    columns = {"entry_point": "f", "asserts": ["assert f(1) == 3"], "code": reference}
    with contextlib.closing(RewardSet.from_config([RewardConfig(name="code_func")])) as rewards:
        found = {check.what: check for check in try_reward(rewards, [Prompt("a", text="?", columns=columns)])}
    assert all(check.holds for check in found.values())
    assert ("no row has a reference program" in found["right answers score 1"].numbers) == (reference is None)


@pytest.mark.parametrize(
    "asserts",
    [
        ["assert Solution().double(1) == 2"],
        ["s = Solution()\nassert s.double(1) == 2"],
        ["def check(candidate):\n    assert candidate().double(1) == 2"],
        ["assert Solution()(1) == 2"],
        ["double = Solution()\nassert double(1) == 2"],
        ["assert Solution('2020-01-02').year == 2020"],
    ],
)
def test_asserts_about_returned_objects_are_no_gold(asserts):
    """No program could pass them, as an object stays in its sandbox: each scored 0, with nothing to tell why."""
    found = code.func_tests({"entry_point": "Solution", "asserts": asserts})
    assert isinstance(found, str)
    assert "only plain values come back" in found


@pytest.mark.parametrize(
    "asserts",
    [
        ["assert f('A').lower() == 'a'"],
        ["x = f(1)\nassert x.real == 1 and x.bit_length() == 1"],
        ["x = f(1)\nassert sorted(x.items()) == [(1, 2)]"],
        ["import datetime\nx = f(1)\nassert x == 2\nx = datetime.date(2020, 1, x)\nassert x.year == 2020"],
        ["assert f(f(1)) == 1"],
        ["assert next(f(1)) == 1 and f(2)[0] == 3"],
    ],
)
def test_asserts_about_plain_values_are_gold(asserts):
    assert not isinstance(code.func_tests({"entry_point": "f", "asserts": asserts}), str)


@pytest.mark.parametrize(
    "test",
    [
        "a = [2, 1]\nk = f(a)\nassert a == [1, 2]",
        "a = [1, 1, 2]\nk = f(a)\nassert k == 2\nassert a[:k] == [1, 2]",
        "a = {}\nassert f(x=a) is None\nassert {1: 2} == a",
        "def check(candidate):\n    a = [2, 1]\n    assert candidate(a) == [1, 2]\n    assert a == [2, 1], 'changed'",
    ],
)
def test_asserts_about_what_an_argument_has_become_are_no_gold(test):
    """The function changes a copy: such an assert failed for every program, or held for one that changes it."""
    found = code.func_tests({"entry_point": "f", "asserts": [test]})
    assert isinstance(found, str)
    assert "looks for a change in its arguments" in found


@pytest.mark.parametrize(
    "test",
    [
        "a = [2, 1]\nassert f(a) == sorted(a)",
        "a = [2, 1]\nb = f(a)\nassert b == [1, 2]\nassert sorted(a) == b and len(a) == 2",
        "for i in range(3):\n    b = f(i)\n    assert i == 2 or b",
        "a = [2, 1]\na = f(a)\nassert a == [1, 2]",
    ],
)
def test_asserts_may_use_an_argument_again(test):
    assert not isinstance(code.func_tests({"entry_point": "f", "asserts": [test]}), str)


def test_a_value_that_no_set_can_hold_is_not_outside_of_it():
    assert asserted("def f(x): return [x]", "assert f(1) not in {2, 3}").score == 0
    assert asserted("def f(x): return x", "assert f(1) not in {2, 3}", "assert f(2) in {2: 0}").score == 1
