"""Which pairs a reward model learns from: none that says nothing, and none of a prompt that is held out."""

from __future__ import annotations

import pytest

import tiny
from trew.errors import DataError
from trew.reward_training import write_pairs
from trew.reward_training.data import encode, gather
from trew.reward_training.pairs import divide, make_pair
from trew.reward_training.settings import PairData
from trew.rewards.model.scorer import Encoder

USER = [{"role": "user", "content": "hi"}]


def test_pairs_whose_tokens_are_equal_are_left_out_and_counted():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tiny.CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    pairs = [make_pair(USER, chosen=chosen, rejected="a ") for chosen in ("a", "b")]
    left, notes = encode(pairs, Encoder(tokenizer), limit=None, config=PairData(), what="training")
    assert [pair.chosen != pair.rejected for pair in left] == [True]
    assert [note.partition(":")[0] for note in notes] == ["1 training pairs were left out"]
    with pytest.raises(DataError, match="no held-out pairs are left: 1 held-out pairs were left out: both answers"):
        encode(pairs[:1], Encoder(tokenizer), limit=None, config=PairData(), what="held-out")


def test_prompts_that_differ_in_white_space_are_on_one_side(tmp_path):
    spaced = [make_pair(text, chosen="a", rejected="b") for i in range(20) for text in (f"q {i}", f"q  {i}\n")]
    train, held = divide(spaced, share=0.3, seed=0)
    sides = [{" ".join(str(pair.prompt.text).split()) for pair in side} for side in (train, held)]
    assert all(sides)
    assert not sides[0] & sides[1]
    for name, some in (("train", spaced), ("held", spaced[::10])):
        write_pairs(tmp_path / f"{name}.jsonl", some)
    found = gather(PairData(pairs=str(tmp_path / "train.jsonl"), eval=str(tmp_path / "held.jsonl")), seed=0)
    assert (len(found.train), len(found.held)) == (32, 4)
