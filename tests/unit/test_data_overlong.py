"""Overlong prompts: each policy, and that truncation cuts the question's start and nothing else."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

import tiny
from trew.config import parse
from trew.data import apply_overlong, truncate_left
from trew.errors import DataError
from trew.rollout.chat import Lengths, Renderer
from trew.training import planning
from trew.types import Prompt


def words(prompt: Prompt) -> int:
    """A stand-in for tokens: words, and five for the frame of every message."""
    if prompt.text is not None:
        return len(prompt.text.split())
    return sum(5 + len(message["content"].split()) for message in prompt.messages or ())


def text(n: int) -> Prompt:
    return Prompt(f"t{n}", text=" ".join(f"w{i}" for i in range(n)), columns={"gold": n})


PROMPTS = [text(3), text(12), text(8), text(20)]


def test_lengths_are_counted_once_unless_they_are_known():
    asked: list[str] = []
    renderer = SimpleNamespace(encode=lambda prompt: asked.append(prompt.uid) or prompt.text.split())
    lengths = Lengths(renderer)  # type: ignore[arg-type]
    lengths.add(PROMPTS[1], 12)
    assert [lengths(prompt) for _ in range(2) for prompt in PROMPTS] == [3, 12, 8, 20] * 2
    assert asked == ["t3", "t8", "t20"]
    assert [lengths(text(n)) for n in range(1, 50)] == [*range(1, 50)], "a new prompt is another one"


def test_a_plan_renders_each_prompt_once_and_measures_it(tmp_path, monkeypatch):
    tiny.model("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    rendered: Counter[str] = Counter()
    render = Renderer.render
    monkeypatch.setattr(Renderer, "render", lambda self, prompt: rendered.update([prompt.uid]) or render(self, prompt))
    data = {"task": "arithmetic", "args": {"largest": 9}}
    plan = planning.plan(parse({"model": str(tmp_path), "data": data, "rollout": {"max_tokens": 8}}))
    prompts = [*plan.train, *plan.eval]
    # The first one again: whether prompts end inside a thought.
    assert rendered - Counter([prompts[0].uid]) == Counter(prompt.uid for prompt in prompts)
    assert plan.longest == max(len(plan.renderer.encode(prompt)) for prompt in prompts)


def test_short_prompts_pass_any_policy_unchanged() -> None:
    for policy in ("error", "drop", "truncate"):
        assert apply_overlong(PROMPTS, count=words, limit=20, policy=policy) == (PROMPTS, [])


def test_error_names_the_longest_and_the_way_out() -> None:
    with pytest.raises(DataError) as caught:
        apply_overlong(PROMPTS, count=words, limit=10, policy="error")
    message = str(caught.value)
    assert "2 of 4 training prompts" in message
    assert "'t20' (20), 't12' (12)" in message
    assert "data.max_prompt_tokens to at least 20" in message


def test_error_names_ten_at_most() -> None:
    with pytest.raises(DataError, match=r"'t9' \(9\), \.\.\. and 5 more"):
        apply_overlong([text(n) for n in range(4, 19)], count=words, limit=3, policy="error")


def test_drop_counts() -> None:
    kept, notes = apply_overlong(PROMPTS, count=words, limit=10, policy="drop", what="evaluation")
    assert kept == [PROMPTS[0], PROMPTS[2]]
    assert len(notes) == 1
    assert "2 of 4 evaluation prompts" in notes[0]
    assert "2 are left" in notes[0]


def test_dropping_everything_is_an_error_with_counts() -> None:
    with pytest.raises(DataError, match=r"4 of 4 .*the longest has 20.*leaves none"):
        apply_overlong(PROMPTS, count=words, limit=2, policy="drop")


def test_truncate_keeps_the_end_and_the_columns() -> None:
    cut, notes = apply_overlong(PROMPTS, count=words, limit=10, policy="truncate")
    assert [words(p) for p in cut] == [3, 10, 8, 10]
    assert cut[0] is PROMPTS[0]
    assert cut[3].text is not None
    assert cut[3].text.split() == [f"w{i}" for i in range(10, 20)]
    assert cut[3].columns == {"gold": 20}
    assert "2 of 4 training prompts" in notes[0]


def test_truncate_cuts_only_the_longest_user_message() -> None:
    turns = [
        {"role": "system", "content": "s " * 30},
        {"role": "user", "content": "short one"},
        {"role": "assistant", "content": "a " * 40},
        {"role": "user", "content": " ".join(f"w{i}" for i in range(25))},
    ]
    cut = truncate_left(Prompt("x", messages=tuple(turns)), 100, count=words)
    assert cut.messages is not None
    assert list(cut.messages[:3]) == turns[:3]
    assert cut.messages[3]["content"].split() == [f"w{i}" for i in range(17, 25)]
    assert words(cut) == 100


def test_what_cannot_be_cut_is_an_error() -> None:
    long = "s " * 50
    system = Prompt("sys", messages=({"role": "system", "content": long}, {"role": "user", "content": "hello you"}))
    no_user = Prompt("tool", messages=({"role": "tool", "content": long},))
    for prompt in (system, no_user):
        with pytest.raises(DataError, match=f"'{prompt.uid}'.*cannot be cut"):
            truncate_left(prompt, 20, count=words)


def test_a_truncation_of_ones_own() -> None:
    cut, _ = apply_overlong(
        PROMPTS, count=words, limit=10, policy="truncate", truncate=lambda p, n: Prompt(p.uid, text=f"at most {n}")
    )
    assert [p.text for p in cut if p.text and p.text.startswith("at most")] == ["at most 10"] * 2
