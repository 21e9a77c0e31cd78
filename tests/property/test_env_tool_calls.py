"""What a template writes is read back; what nobody wrote is never executed by half; time is linear in the reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tool_help
from tool_help import TEMPLATES, call, renderer, written
from trew.env import Tool
from trew.env.tools import tool_of
from trew.env.tools.arguments import problems
from trew.env.tools.formats import READERS, TemplateFormat
from trew.env.tools.plain import PlainFormat
from trew.utils.bounds import bounded

FORMATS = {name: TemplateFormat(name, reader) for name, reader in READERS.items()}
RENDER = {name: renderer(TEMPLATES[name]) for name in FORMATS}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(-1e9, 1e9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ANY = Tool("any", "", {"type": "object", "properties": {}, "additionalProperties": {}})
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=search>", "</function>", "<parameter=query>", "</parameter>", "<think>",
    "</think>", '{"name": "search", "arguments": {"query": "a"}}', '{"name": "search", "parameters": {"query": "a"}}',
    '{"name":', '"arguments":', "{", "}", "[", "]", '"', "\\", ",", ":", ";", "\n", " ", "search:", "now:", "NaN",
    "1e999", "\x00", "\ud800", "é", "9" * 30, "<|im_end|>", "<|python_tag|>",
]  # fmt: skip
junk = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30).map("".join)
TOOLS = (tool_of(tool_help.search), tool_of(tool_help.now))


@pytest.mark.parametrize("name", ["tool_call json", "bare json"])
@given(NAMES, st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_json_calls_are_read_back(name, function, arguments):
    text = written(RENDER[name], [call(function, arguments)], [ANY])
    parsed = FORMATS[name].parse(text, [ANY])
    assert [(one.name, dict(one.arguments)) for one in parsed.calls] == [(function, arguments)]


@given(st.dictionaries(NAMES, JSON.filter(lambda value: not isinstance(value, float)), min_size=1, max_size=4))
def test_parameters_are_read_back(arguments):
    kinds = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object", type(None): "null"}
    schema = {key: {"type": kinds[type(value)]} for key, value in arguments.items()}
    tool = Tool("f", "", {"type": "object", "properties": schema})
    text = written(RENDER["tool_call parameters"], [call("f", arguments)], [tool])
    parsed = FORMATS["tool_call parameters"].parse(text, [tool])
    assert [dict(one.arguments) for one in parsed.calls] == [arguments]
    assert problems(parsed.calls[0].arguments, tool.parameters) == []


@pytest.mark.parametrize("name", [*FORMATS, "plain"])
@given(junk)
def test_no_reply_makes_a_parser_raise(name, text):
    format = FORMATS[name] if name in FORMATS else PlainFormat()
    parsed = format.parse(text, TOOLS)
    assert parsed.malformed is None or not parsed.calls
    for one in parsed.calls:
        problems(one.arguments, TOOLS[0].parameters)


@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
def test_a_call_that_was_cut_off_is_never_read(name, data):
    arguments = data.draw(st.dictionaries(NAMES, st.text(max_size=5), max_size=2))
    text = written(RENDER[name], [call("search", arguments)], [ANY])
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    assert FORMATS[name].parse(cut, [ANY]).calls == ()


@pytest.mark.parametrize("name", [*FORMATS, "plain"])
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>", "<tool_call> ", "</tool_call>", "</parameter> ", "<parameter=a>", "<function=f>", "{",
        '{"name": ', " ", "\n", "; ", "search:", "search: \n", "<think>", '{"name": "f", "parameters": {}} ',
        "<tool_call><function=f><parameter=a>x</parameter> ",
    ],
)  # fmt: skip
def test_time_is_linear(name, piece):
    """Quadratic time would take a minute here, linear time takes milliseconds."""
    format = FORMATS[name] if name in FORMATS else PlainFormat()
    start = {"tool_call json": "<tool_call>", "tool_call parameters": "<tool_call><function=f><parameter=a>"}
    with bounded(seconds=10.0):
        format.parse(start.get(name, "") + piece * 100_000, TOOLS)
