"""Prompts that decoders keep: each until its last row has begun or never will."""

from __future__ import annotations

from trew.rollout.torch_engine.prompts import OpenPrompts


def test_a_prompt_is_kept_until_none_of_its_rows_is_missing():
    prompts: OpenPrompts[str] = OpenPrompts()
    first, second = prompts.open([1, 2], 4), prompts.open([3], 1)
    prompts.held = (first, "cache")
    prompts.withdraw(first, 3)
    assert prompts.missing == {first: 1, second: 1}
    assert prompts.prompt_ids == {first: [1, 2], second: [3]}
    prompts.withdraw(second, 1)
    assert prompts.missing == {first: 1}
    assert prompts.prompt_ids == {first: [1, 2]}
    assert prompts.held == (first, "cache"), "another prompt's end changes nothing"
    prompts.withdraw(first, 1)
    assert (prompts.missing, prompts.prompt_ids, prompts.held) == ({}, {}, None)
    last = prompts.open([4], 2)
    prompts.withdraw(last, 2)
    assert (prompts.missing, prompts.prompt_ids, prompts.held) == ({}, {}, None)


def test_what_is_forgotten_keeps_its_number():
    """A number from before must not mean another prompt."""
    prompts: OpenPrompts[str] = OpenPrompts()
    first = prompts.open([1], 1)
    prompts.held = (first, "cache")
    prompts.forget()
    assert (prompts.missing, prompts.prompt_ids, prompts.held) == ({}, {}, None)
    assert prompts.open([1], 1) != first
