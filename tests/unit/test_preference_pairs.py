"""Preference pairs as data: which rows are read, which tokens are compared, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

import tiny
from test_demonstrations import learned, renderer, whole
from trew.config import Config, DataConfig, SftConfig
from trew.data import load_prompts
from trew.data.load import make_task
from trew.errors import DataError
from trew.rollout import Renderer
from trew.rollout.given import encode
from trew.types import Prompt

ASKED = [{"role": "user", "content": "2 + 2?"}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def settings(**sft: Any) -> Config:
    return Config(model="m", data=DataConfig(task="pairs"), sft=SftConfig(**sft))


def read(tmp_path, *rows: dict[str, Any], **args: Any) -> list[Prompt]:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(DataConfig(task="pairs", train=str(file), args=args))


FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": ASKED, "chosen": "4", "rejected": "five"},
    "messages": {"prompt": ASKED, "chosen": said("4"), "rejected": said("five")},
    "conversations": {"chosen": ASKED + said("4"), "rejected": ASKED + said("five")},
    "conversations and the question": {
        "prompt": "2 + 2?",
        "chosen": ASKED + said("4"),
        "rejected": ASKED + said("five"),
    },  # as in UltraFeedback
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_chat_is_the_same_pair(tmp_path, form):
    render = renderer()
    (prompt,) = read(tmp_path, FORMS[form])
    ([row], notes) = encode([prompt], render, settings(), limit=None, what="training")
    assert notes == []
    assert [score.value for score in row.scores] == [1.0, 0.0]
    chosen, rejected = row.group.rollouts
    assert learned(render, chosen) == ["4<|im_end|>"]
    assert learned(render, rejected) == ["five<|im_end|>"]
    assert render.decode_whole(chosen.prompt_ids) == render.apply(ASKED)
    assert chosen.prompt_ids.tolist() == rejected.prompt_ids.tolist()


def test_texts_as_they_stand_or_as_a_chat(tmp_path):
    render, row = Renderer(tiny.tokenizer(chat=False)), {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    ([pair], _) = encode(read(tmp_path, row), render, settings(), limit=None, what="training")
    assert [whole(render, r) for r in pair.group.rollouts] == ["2+2=4<|endoftext|>", "2+2=5<|endoftext|>"]
    (prompt,) = read(tmp_path, row, chat=True, system="be brief")
    assert [m["content"] for m in prompt.messages or ()] == ["be brief", "2+2="]
    task = make_task(DataConfig(task="pairs", train="x"))
    said = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "4"), ("rejected", "5"))}
    assert task.prepared(prompt) == {"prompt": list(map(dict, prompt.messages or ())), **said}


ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"prompt": "q", "chosen": "a", "rejected": " \n"}, "column 'rejected' is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "has no 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "has no 'prompt'"),
        ({"prompt": ASKED, "chosen": "a", "rejected": [*ASKED, *ASKED]}, "must be a message of the assistant"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [1]}, "has 'tools'"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": '[{"type": "function"}]'}, "has 'tools'"),
        ({"prompt": ASKED, "chosen": [ANSWER | {"tool_calls": [{}]}], "rejected": "b"}, "has 'tool_calls'"),
        ({"prompt": ASKED, "chosen": [ANSWER | {"reasoning_content": "because"}], "rejected": "b"}, "has 'reasoning_c"),
    ],
)
def test_rows_that_are_no_pair_are_refused(tmp_path, row, why):
    with pytest.raises(DataError, match=why) as refused:
        read(tmp_path, row)
    assert "line 1" in str(refused.value)


@pytest.mark.parametrize("nothing", [None, [], "[]", "{}", "null", ""])
def test_rows_without_tools_and_keys_without_values_are_read(tmp_path, nothing):
    chosen = [ANSWER | {"tool_calls": None, "reasoning_content": None}]
    (prompt,) = read(tmp_path, {"prompt": ASKED, "chosen": chosen, "rejected": "b", "tools": nothing})
    assert prompt.columns["pair"] == {"chosen": "a", "rejected": "b"}


def test_a_file_without_answers_says_which_columns_it_has(tmp_path):
    with pytest.raises(DataError, match=r"preference pairs have the columns .* the columns are 'prompt', 'completion'"):
        read(tmp_path, {"prompt": "q", "completion": "a"})


def test_a_system_message_needs_a_chat(tmp_path):
    with pytest.raises(DataError, match=r"set data\.args\.chat = true"):
        read(tmp_path, {"prompt": "q", "chosen": "a", "rejected": "b"}, system="s")


def test_answers_that_the_template_makes_equal_are_refused(tmp_path):
    strips = renderer(tiny.CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}"))
    prompts = read(tmp_path, {"prompt": ASKED, "chosen": "4", "rejected": "4 "})
    with pytest.raises(DataError, match="chosen and rejected have the same tokens"):
        encode(prompts, strips, settings(), limit=None, what="training")


def test_a_pair_with_one_answer_too_long_goes_as_a_whole(tmp_path):
    prompts = read(tmp_path, FORMS["texts"], {"prompt": ASKED, "chosen": "4", "rejected": "x" * 300})
    rows, (note,) = encode(prompts, renderer(), settings(max_tokens=120, overlong="drop"), limit=None, what="training")
    assert len(rows) == 1
    assert note.startswith("1 of 2 training rows are longer than 120 tokens")
    with pytest.raises(DataError, match="1 of 2 training rows are longer than 120 tokens") as told:
        encode(prompts, renderer(), settings(max_tokens=120), limit=None, what="training")
    assert str(told.value).endswith("or set sft.overlong = 'drop'")  # 'truncate' is refused for pairs
