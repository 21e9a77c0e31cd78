"""Formats of calls, by every chat template inside TRL: recognised, read back, or refused with the text shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl
from trl.chat_template_utils import add_response_schema

import tiny
import tool_help
from tool_help import call, renderer
from trew.env.tools import recognised, tool_of
from trew.errors import ConfigError
from trew.models.loading import load_tokenizer
from trew.rollout import Renderer
from trew.types import Prompt

FOLDER = Path(trl.__file__).with_name("chat_templates")
SEARCH, NOW = tool_of(tool_help.search), tool_of(tool_help.now)
JSON, PARAMETERS, BARE = "tool_call json", "tool_call parameters", "bare json"
FORMATS = {
    **dict.fromkeys(["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"], JSON),
    **dict.fromkeys(["qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"], PARAMETERS),
    **dict.fromkeys([f"nemotron_3_{name}" for name in ("nano", "super", "ultra")], PARAMETERS),
    **dict.fromkeys(["llama3_1", "llama3_2"], BARE),
    **dict.fromkeys(
        ["cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "llama3", "phi3", "phi3_5"], "plain"
    ),
}
OWN = ["glm4moe", "gptoss", "gemma4", "lfm2_v2", "lfm2_2_5"]
"""Templates whose calls only the parser of the tokenizer reads."""


def tokenizer(name: str):
    made = tiny.tokenizer(bos=True)
    made.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return made


def test_qwen3_does_not_think_where_a_copy_of_its_template_says_so(tmp_path):
    model, file = str(tiny.save(tmp_path / "model")), tmp_path / "no-thinking.jinja"
    own = (FOLDER / "qwen3.jinja").read_text()
    file.write_text("{% set enable_thinking = false %}\n" + own)
    made, messages = load_tokenizer(model, chat_template=str(file)), [{"role": "user", "content": "q"}]
    prompt = Prompt("p", messages=tuple(messages))
    rendered = Renderer(made).render(prompt)
    options = {"tokenize": False, "add_generation_prompt": True, "chat_template": own}
    assert rendered == made.apply_chat_template(messages, **options, enable_thinking=False)
    assert rendered.endswith("<think>\n\n</think>\n\n")
    assert "<think>" not in made.apply_chat_template(messages, **options)
    assert not Renderer(made).check([prompt])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_format_of_a_template(name):
    made = tokenizer(name)
    assert recognised(renderer(made.chat_template, made)).name == FORMATS[name]


@pytest.mark.parametrize("name", sorted(name for name, format in FORMATS.items() if format != "plain"))
def test_what_a_template_writes_is_read_back(name):
    made = tokenizer(name)
    render = renderer(made.chat_template, made)
    format = recognised(render)
    given = {"query": 'a "b" c', "limit": 2, "exact": False}
    asked = {"role": "user", "content": "q"}
    for function, arguments in [("search", given), ("search", {"query": "é\n{}"}), ("now", {})]:
        reply = {"role": "assistant", "content": "", "tool_calls": [call(function, arguments)]}
        tools = [SEARCH.schema, NOW.schema]
        text = render([asked, reply], tools=tools, generation_prompt=False)
        text = text[text.rindex("q<") if "q<" in text else 0 :]
        behind = text.rpartition("</think>")[2] if "</think>" in text else text
        for end in ("<|im_end|>", "<|eot_id|>"):
            behind = behind.rpartition(end)[0] or behind
        said = behind.rpartition("<|end_header_id|>")[2].rpartition("<|im_start|>assistant")[2]
        parsed = format.parse(f"</think>{said}" if getattr(format, "thinking", False) else said, (SEARCH, NOW))
        assert parsed.malformed is None
        assert [(one.name, dict(one.arguments)) for one in parsed.calls] == [(function, arguments)]


@pytest.mark.parametrize("name", OWN)
def test_others_are_read_by_the_tokenizer_or_refused(name):
    made = tokenizer(name)
    render = renderer(made.chat_template, made)
    with pytest.raises(ConfigError, match=r"trewprobe.*tools_format = 'plain'"):
        recognised(render)
    add_response_schema(made)
    assert recognised(render, response=made.parse_response).name == "response template"
