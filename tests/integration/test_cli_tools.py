"""Tools in whole runs through the command line, by a model that is made to call one."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import tiny
from recipe_help import recipe, training_rows
from trew.cli import main as cli
from trew.runs.metric_help import help_of

END = "<|im_end|>"
NEXT = {"\n": {"n": 2.0, "7": 2.0, "p": 1.0}, "n": {"o": 9.0}, "o": {"w": 9.0}, "w": {":": 9.0}, ":": {END: 9.0},
        "7": {END: 9.0}, "p": {"y": 9.0}, "y": {":": 9.0}}  # fmt: skip
"""What follows each token, as logits: ``now:``, ``py:``, or the answer ``7``."""

TOOLS = '''
import pathlib

def now() -> str:
    """The time."""
    with open(pathlib.Path(__file__).with_name("called"), "a") as file:
        file.write("x")
    return "12:00 o'clock"

def py() -> str:
    """Fails."""
    raise RuntimeError("py is broken")
'''

REWARD = """
def seven(completions):
    return [float(messages[-1]["content"] == "7") for messages in completions]
"""


def bigrams(folder) -> None:
    """A model that says what ``NEXT`` says: no layer changes what the token's own embedding holds."""
    model = tiny.model("llama", hidden_size=264, num_hidden_layers=1, intermediate_size=16)
    tokenizer = tiny.tokenizer()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.0 if weight.dim() > 1 else 1.0)
        model.get_input_embeddings().weight[:, : tiny.VOCAB] = torch.eye(tiny.VOCAB)
        head, number = model.get_output_embeddings().weight, tokenizer.convert_tokens_to_ids
        for before, behind in NEXT.items():
            for token, logit in behind.items():
                # A norm makes √264 of the 1 in an embedding; 20 more than for all other tokens.
                head[number(_token(token)), number(_token(before))] = (logit + 20.0) / 264**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _token(text: str) -> str:
    return "Ċ" if text == "\n" else text  # the byte's symbol in a byte-level vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tools")
    bigrams(place / "lm")
    (place / "tools.py").write_text(TOOLS)
    (place / "reward.py").write_text(REWARD)
    return place


def train(folder, name: str, *arguments: str, **sections) -> int | str | None:
    settings = {"tools": ["tools.py:now", "tools.py:py"], "turns": 4, "workers": 1, **sections.pop("environment", {})}
    text = recipe(
        folder / "lm", reward="reward.py:seven", steps=1, environment=settings, learner={"lr": 1e-3}, eval={"size": 2},
        rollout={"prompts": 4, "completions": 4, "max_tokens": 8}, **sections,
    )  # fmt: skip
    (folder / f"{name}.toml").write_text(text)
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(folder / f"{name}.toml"), "--out", str(folder / name), *arguments])
    return end.value.code


def rollouts(run) -> list[dict[str, Any]]:
    return [row for file in sorted((run / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_a_run_calls_tools_and_learns_behind_what_they_say(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert train(folder, "run") == 0, capsys.readouterr()
    table = rollouts(folder / "run")
    conversations = [json.loads(row["conversation"]) for row in table]
    assert "now:\n  The time." in conversations[0][0]["content"], "the plain protocol is taught in the opening"
    heard = {"now:": "12:00 o'clock", "py:": "error: py: RuntimeError: py is broken"}
    calls = failed = 0
    for row, conversation in zip(table, conversations, strict=True):
        said = [message["content"] for message in conversation[1:]]
        replies, answers = said[::2], said[1::2]
        assert answers == [heard[reply] for reply in replies[: len(answers)]]
        assert row["ending"] == ("done" if replies[-1] == "7" else "turns")
        assert row["score"] == float(replies[-1] == "7")
        # What was trained on: the replies with their end tokens, and not one token of the tools.
        sampled = [token for token, own in zip(row["token_ids"], row["sampled"], strict=True) if own]
        assert tiny.tokenizer().decode(sampled) == "".join(f"{reply}{END}" for reply in replies)
        calls, failed = calls + len(replies) - (replies[-1] == "7"), failed + sum(r == "py:" for r in replies)
    rows = training_rows(folder / "run")
    assert sum(row["tool_calls"] for row in rows) * 16 == pytest.approx(calls)
    assert sum(row["tool_errors"] for row in rows) * 16 == pytest.approx(failed)
    assert 0 < failed < calls
    assert {row["ending"] for row in table} == {"done", "turns"}
    assert len({row["score"] for row in table}) == 2
    assert rows[0]["grad_norm"] > 0
    assert [name for name in rows[0] if name != "step" and not help_of(name)] == [], "docs/runs.md lists every metric"


def test_tools_that_cannot_be_used_end_a_run_before_it_begins(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert train(folder, "wrong", environment={"tools": ["pyton", "tools.py:nothing"]}) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "no built-in tool 'pyton' (did you mean 'python'?)" in said
    assert "has no function 'nothing'" in said
    assert not (folder / "wrong").exists()
