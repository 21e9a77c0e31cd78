"""TRL's own rendering reads the rows that ``trew data convert --to trl`` writes."""

from __future__ import annotations

import json

import pytest
from trl.data_utils import is_conversational, maybe_apply_chat_template

import tiny
from trew.cli.data import convert

ASKED = [{"role": "user", "content": "2+2?"}]
ROLLOUT = {
    "prompt": "2+2?", "prompt_ids": [1], "token_ids": [5], "sampled": [True], "completion": "4",
    "finish_reason": "stop", "score": 1.0, "messages": json.dumps(ASKED),
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "row", "names"),
    [
        ("pairs", {"prompt": ASKED, "chosen": "4", "rejected": "5"}, ("chosen", "rejected")),
        ("rollouts", ROLLOUT, ("completion",)),
        ("demonstrations", {"prompt": ASKED, "completion": "4"}, ("completion",)),
    ],
)
def test_answers_to_a_chat_are_rendered_as_a_chat(task, row, names, tmp_path):
    """They were texts beside messages, which TRL cannot join."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(row) + "\n")
    convert(str(source), str(out), task=task)
    written = json.loads(out.read_text())
    written = {name: written[name] for name in ("prompt", *names)}
    assert is_conversational(written)
    for name in names:  # a DPOTrainer joins them so, before it renders
        assert [turn["role"] for turn in written["prompt"] + written[name]] == ["user", "assistant"]
    tokenizer = tiny.tokenizer()
    rendered = maybe_apply_chat_template(written, tokenizer)
    whole = {name: rendered["prompt"] + rendered[name] for name in names}
    said = {"chosen": "4", "rejected": "5", "completion": "4"}
    assert whole == {
        name: tokenizer.apply_chat_template([*ASKED, {"role": "assistant", "content": said[name]}], tokenize=False)
        for name in names
    }
