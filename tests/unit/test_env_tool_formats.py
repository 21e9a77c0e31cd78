"""Formats of calls: recognised by what the template writes, read exactly, refused with a reason."""

from __future__ import annotations

import pytest

import tiny
import tool_help
from tool_help import TEMPLATES, call, renderer, written
from trew.env import Call, Reply
from trew.env.tools import Parsed, recognised, tool_of
from trew.env.tools.formats import READERS, TemplateFormat
from trew.env.tools.plain import PlainFormat
from trew.env.wire import from_reply
from trew.errors import ConfigError
from trew.rewards.user.wire import encode

SEARCH, ADD, NOW = tool_of(tool_help.search), tool_of(tool_help.add), tool_of(tool_help.now)
TOOLS = (SEARCH, ADD, NOW)
KNOWN = sorted(READERS)


def read(format: str, text: str) -> Parsed:
    one = PlainFormat() if format == "plain" else TemplateFormat(format, READERS[format])
    return one.parse(text, TOOLS)


def calls(format: str, text: str) -> list[tuple[str, dict]]:
    parsed = read(format, text)
    assert parsed.malformed is None
    return [(one.name, dict(one.arguments)) for one in parsed.calls]


def malformed(format: str, text: str) -> str:
    parsed = read(format, text)
    assert parsed.malformed is not None, parsed
    assert parsed.calls == ()
    return parsed.malformed


# ---- recognition


@pytest.mark.parametrize("name", KNOWN)
def test_a_format_is_recognised_by_the_call_that_the_template_writes(name):
    found = recognised(renderer(TEMPLATES[name]))
    assert (found.name, found.shown) == (name, True)


@pytest.mark.parametrize("name", KNOWN)
def test_a_template_that_opens_a_thought_hides_calls_in_it(name):
    opened = TEMPLATES[name].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    thought = "{% if m.role == 'assistant' %}<think>\n</think>\n{% endif %}{{ m.content }}"
    answered = opened.replace("{{ m.content }}", thought)
    format = recognised(renderer(answered))
    assert format.name == name
    text = written(renderer(TEMPLATES[name]), [call("now", {})], TOOLS)
    assert format.parse(f"I could say {text}", TOOLS) == Parsed()
    assert format.parse(f"let me see</think>\n{text}", TOOLS).calls == (Call("now", {}, "trewcall1"),)


@pytest.mark.parametrize(("name", "wanted"), [("plain", "auto"), ("tool_call json", "plain")])
def test_a_template_that_opens_a_thought_hides_calls_of_the_plain_protocol_in_it(name, wanted):
    opened = TEMPLATES[name].replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert opened != TEMPLATES[name]
    format = recognised(renderer(opened), wanted=wanted)
    assert format.name == "plain"
    assert format.parse("I could say\nnow:\nor not", TOOLS) == Parsed()
    assert format.parse("let me see</think>\nnow:", TOOLS).calls == (Call("now", {}, "trewcall1"),)


def test_a_template_that_shows_no_tools_means_the_plain_protocol():
    assert recognised(renderer(TEMPLATES["plain"])).name == "plain"
    refuses = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATES["plain"]
    assert recognised(renderer(refuses)).name == "plain"


def test_plain_may_be_asked_for():
    assert recognised(renderer(TEMPLATES["tool_call json"]), wanted="plain").name == "plain"


def test_an_unknown_format_is_refused_with_what_the_template_wrote():
    with pytest.raises(ConfigError) as refused:
        recognised(renderer(TEMPLATES["unknown"]))
    assert "<<trewprobe|{" in str(refused.value)
    assert "environment.tools_format = 'plain'" in str(refused.value)


def test_a_template_that_shows_tools_and_refuses_calls_is_refused():
    turn = "{% for m in messages %}"
    refusal = "{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
    one_way = TEMPLATES["bare json"].replace(turn, turn + refusal)
    with pytest.raises(ConfigError, match=r"no calls.*tools_format = 'plain'"):
        recognised(renderer(one_way))


def response_template(tokenizer):
    """The tokenizer's own parser, for calls <<name|{...}>>."""
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<<(?P<name>\w+)\|",
                "close_pattern": ">>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    return tokenizer


def test_the_tokenizers_own_parser_reads_what_is_unknown_here():
    tokenizer = response_template(tiny.tokenizer())
    format = recognised(renderer(TEMPLATES["unknown"], tokenizer), response=tokenizer.parse_response)
    assert format.name == "response template"
    found = format.parse('Well <<search|{"query": "a"}>><<now|{}>>', TOOLS)
    assert [(one.name, dict(one.arguments)) for one in found.calls] == [("search", {"query": "a"}), ("now", {})]
    assert format.parse("no call", TOOLS) == Parsed()
    broken = format.parse('<<search|{"query": >>', TOOLS)
    assert not broken.calls
    assert broken.malformed is not None
    cut = format.parse('<<search|{"query": "a"}', TOOLS)
    assert not cut.calls or cut.calls[0].arguments == {"query": "a"}


# ---- reading


@pytest.mark.parametrize("name", KNOWN)
def test_calls_that_the_template_wrote_are_read_back(name):
    given = [("search", {"query": 'a "b"\n</tool_call> {', "limit": 2, "exact": True}), ("add", {"a": 0.5, "b": -3})]
    for some in ([given[0]], [given[1]], [("now", {})]):
        text = written(renderer(TEMPLATES[name]), [call(*one) for one in some], TOOLS)
        assert calls(name, text) == some


@pytest.mark.parametrize("name", KNOWN)
def test_parallel_calls_are_read_in_their_order(name):
    given = [("search", {"query": str(i)}) for i in range(3)]
    text = "\n".join(written(renderer(TEMPLATES[name]), [call(*one)], TOOLS) for one in given)
    assert calls(name, text) == given
    assert [one.id for one in read(name, text).calls] == ["trewcall1", "trewcall2", "trewcall3"]


@pytest.mark.parametrize("name", [*KNOWN, "plain"])
@pytest.mark.parametrize("text", ["", "The answer is 5.", '{"answer": 5}', "{}", "[1, 2]", "a < b, name: x", "<tool>"])
def test_a_reply_without_a_call(name, text):
    assert read(name, text) == Parsed()


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("tool_call json", '<tool_call>{"name": "now", "arguments": {}}', "</tool_call> is missing"),
        ("tool_call json", '<tool_call>{"name": "now", "argum', "not JSON"),
        ("tool_call json", "<tool_call>", "not JSON"),
        ("tool_call json", "now()</tool_call>", "</tool_call> without <tool_call>"),
        ("tool_call json", '<tool_call>{"name": "now"}</tool_call>', "arguments must be an object"),
        ("tool_call json", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "arguments must be an object"),
        ("tool_call json", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "name must be text"),
        ("tool_call json", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', "a call is an object"),
        ("tool_call json", '<tool_call>{"name": "now", "arguments": {}, "x": 1}</tool_call>', "not 'x'"),
        ("tool_call json", '<tool_call>{"name": "a", "name": "now", "arguments": {}}</tool_call>', "there twice"),
        ("tool_call json", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a number"),
        ("tool_call json", '<tool_call>{"name": "add", "arguments": {"a": -Infinity}}</tool_call>', "Infinity"),
        ("tool_call json", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "too large a number"),
        ("tool_call json", '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000, "400 digits"),
        ("tool_call json", '<tool_call>{"name": "now", "arguments": {}} {}</tool_call>', "</tool_call> is missing"),
        ("tool_call json", "<tool_call>" + '{"name": "now", "arguments": ' * 100000, "nested too deeply"),
        ("tool_call json", "<tool_call>" + "[" * 100000, "nested too deeply"),
        ("bare json", '{"name": "now", "parameters": {}', "not JSON"),
        ("bare json", '{"name": "now"', "not JSON"),
        ("bare json", '{"name": "now", "parameters": {}} and so', "text behind a call"),
        ("bare json", '{"name": "now", "parameters": [1]}', "parameters must be an object"),
        ("bare json", '{"name": "now", "parameters": {}}; {"name": "now"}', "parameters must be an object"),
        ("tool_call parameters", "<tool_call>\n<function=now>\n</function>", "</tool_call> is missing"),
        ("tool_call parameters", "<tool_call>\n<function=now>\n</tool_call>", "</function> is missing"),
        ("tool_call parameters", "<tool_call>\nnow\n</tool_call>", "not followed by <function=NAME>"),
        ("tool_call parameters", "<function=now>\n</function>", "outside <tool_call>"),
        ("tool_call parameters", "<tool_call><function=search>\n<parameter=query>\na", "<parameter=query> is not"),
        (
            "tool_call parameters",
            "<tool_call><function=f>" + "<parameter=a>1</parameter>" * 2 + "</function></tool_call>",
            "'a' is there twice",
        ),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_is_told_and_not_guessed(name, text, why):
    assert why in malformed(name, text)


@pytest.mark.parametrize("name", KNOWN)
def test_one_broken_call_stops_all_of_them(name):
    good = written(renderer(TEMPLATES[name]), [call("now", {})], TOOLS)
    assert malformed(name, f"{good}\n{good[:-4]}")


def test_types_of_parameters_come_from_the_schema():
    text = "<tool_call><function=search><parameter=query>\n12\n</parameter><parameter=limit>\n12\n</parameter>"
    text += "<parameter=exact>True</parameter></function></tool_call>"
    assert calls("tool_call parameters", text) == [("search", {"query": "12", "limit": 12, "exact": True})]


def test_a_value_may_contain_end_tags():
    value = "<parameter=x>1</parameter>\n</tool_call>"
    text = f"<tool_call><function=search><parameter=query>\n{value}\n</parameter></function></tool_call>"
    assert calls("tool_call parameters", text) == [("search", {"query": value})]


# ---- the plain protocol


def test_plain_calls_are_lines():
    text = 'Let me see.\nsearch: {"query": "a", "limit": 1}\nnow:\nadd : 5\nAnswer: 7'
    assert calls("plain", text) == [("search", {"query": "a", "limit": 1}), ("now", {})]


def test_plain_takes_text_for_a_single_argument():
    def shout(text: str) -> str:
        """Shouts.

        Args:
            text: what
        """
        return text.upper()

    def double(number: int) -> int:
        """Doubles.

        Args:
            number: which
        """
        return 2 * number

    tools = (tool_of(shout), tool_of(double))
    parsed = PlainFormat().parse('shout: {"a": 1}: x \ndouble: 21\ndouble: many\nshout:', tools)
    found = [dict(one.arguments) for one in parsed.calls]
    assert found == [{"text": '{"a": 1}: x'}, {"number": 21}, {"number": "many"}, {}]


def test_plain_says_what_is_wrong_with_several_arguments():
    assert malformed("plain", "add: 1, 2").startswith("add: not JSON")
    assert 'add: {"a": ..., "b": ...}' in malformed("plain", "add: [1, 2]")


def test_plain_ignores_calls_in_thoughts():
    assert read("plain", "<think>\nnow:\n") == Parsed()
    assert calls("plain", "<think>\nnow:\n</think>\nnow:") == [("now", {})]


def test_plain_teaches_tools_in_the_opening():
    user, system = {"role": "user", "content": "What?"}, {"role": "system", "content": "Be brief."}
    [taught] = PlainFormat().opening([user], TOOLS)
    assert taught["role"] == "user"
    assert taught["content"].endswith("\n\nWhat?")
    for part in ('add: {"a": ..., "b": ...}', "Adds two numbers.", "a: one", "now:"):
        assert part in taught["content"]
    first, second = PlainFormat().opening([system, user], TOOLS)
    assert first["content"].startswith("Be brief.\n\n")
    assert "Adds two numbers." in first["content"]
    assert second == user
    assert PlainFormat().opening([user], ()) == (user,)


def test_plain_shows_results_in_one_message():
    def result(name, content):
        return {"role": "tool", "name": name, "content": content}

    user = {"role": "user", "content": "and?"}
    show = PlainFormat().observation
    assert show([result("now", "12:00")]) == ({"role": "user", "content": "12:00"},)
    assert show([result("now", "12:00"), result("add", "3"), user]) == (
        {"role": "user", "content": "now: 12:00\nadd: 3"},
        user,
    )


@pytest.mark.parametrize("depth", [101, 600, 900, 100_000])
def test_arguments_of_any_depth_are_an_answer_to_the_policy_and_no_error_of_the_run(depth):
    """Some 500 levels were read, and too many for what passes them on: the run ended with a RecursionError."""
    deep = "[" * depth + "]" * depth
    for format, text in (
        ("tool_call json", f'<tool_call>{{"name": "add", "arguments": {{"a": {deep}}}}}</tool_call>'),
        ("plain", f'add: {{"a": {deep}}}'),
    ):
        parsed = read(format, text)
        assert "nested too deeply" in (parsed.malformed or "")
        encode(from_reply(Reply(text, parsed.calls, parsed.malformed)))
    fine = "[" * 90 + "]" * 90
    [(_, given)] = calls("plain", f'add: {{"a": {fine}, "b": 1}}')
    encode(given)
