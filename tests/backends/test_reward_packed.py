"""Pairs by the learner's packs: the same numbers as by the model's own forward on padded rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tiers
import tiny
from scorer_help import save_scorer
from test_reward_training import test_the_gradient_of_a_step_does_not_depend_on_how_it_is_split  # noqa: F401
from trew.backends.cpu import build
from trew.backends.cpu.backend import CpuBackend
from trew.models import loading
from trew.reward_training.data import Encoded
from trew.reward_training.packed import PackedPairs, best
from trew.reward_training.plain import PlainPairs
from trew.rewards.model.scorer import Encoder, Scorer

compiled = pytest.mark.skipif(isinstance(build.library(), str), reason="there is no compiler")
PAD = 259


@pytest.fixture
def backend():
    return CpuBackend()


def some_pairs(count: int = 9, *, seed: int = 0) -> list[Encoded]:
    """Pairs of a few prompts: with much, little and nothing in common, with padding tokens at and before their end."""
    rng = np.random.default_rng(seed)

    def text(most: int) -> list[int]:
        return rng.integers(0, 256, rng.integers(1, most)).tolist()

    out = []
    for i in range(count):
        prompt = np.random.default_rng(i // 2).integers(0, 256, 5 + i).tolist()[:9]
        out.append(Encoded(str(i // 2), [*prompt, *text(20)], [*prompt, *text(20)]))
    whole = out[0].chosen
    return [
        *out,
        Encoded("0", whole, [*whole, 7]),
        Encoded("x", [1, 2, 3], [4]),
        Encoded("x", [PAD], [1, PAD, 2, PAD, PAD]),
        Encoded("y", [5, 6, PAD], [5, 6]),
    ]


def wide_scorer(folder: Path, kind: str = "llama") -> Path:
    """A reward model whose widths the kernels take."""
    return save_scorer(folder, kind=kind, **tiny.wide(kind))


def scorer_of(folder, **options) -> Scorer:
    return Scorer(loading.load_scorer(str(folder)), Encoder.load(str(folder)), **options)


def both(folder, *, again: bool = False, **options) -> tuple[PlainPairs, PackedPairs]:
    packed = PackedPairs.of(scorer_of(folder, **options), CpuBackend(), again=again)
    assert not isinstance(packed, str), packed
    return PlainPairs(scorer_of(folder, **options), again), packed


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(t.abs().max()) for t in expected.values())
    for name, t in expected.items():
        assert torch.allclose(found[name], t, rtol=0, atol=1e-5 * largest), name


@compiled
@pytest.mark.parametrize(
    ("kind", "budget", "again"),
    tiers.thinned(["llama", "qwen2", "qwen3", "gemma", "gemma2"], [1, 60, 10**6], [False, True], keep=3),
)
def test_loss_scores_and_gradients_are_those_of_the_plain_way(tmp_path, kind, budget, again):
    folder = wide_scorer(tmp_path, kind)
    plain, packed = both(folder, budget=budget, again=again)
    pairs = some_pairs()
    expected, found = (way.accumulate(pairs, centre=0.01) for way in (plain, packed))
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    for side, other in zip(found[1], expected[1], strict=True):
        assert side == pytest.approx(other, abs=1e-5)
    assert_alike(gradients(packed.scorer.model), gradients(plain.scorer.model))
    assert packed.scores(pairs) == tuple(pytest.approx(side, abs=1e-5) for side in plain.scores(pairs))


@compiled
def test_weights_stay_together_over_several_steps(tmp_path):
    folder = wide_scorer(tmp_path)
    losses = []
    models = []
    for way in both(folder, budget=100):
        optimizer = torch.optim.AdamW(way.scorer.model.parameters(), lr=1e-3, eps=1e-4)
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            loss, _ = way.accumulate(some_pairs(seed=step), centre=0.0)
            losses.append(loss)
            optimizer.step()
        models.append(dict(way.scorer.model.state_dict()))
    assert losses[4:] == pytest.approx(losses[:4], abs=1e-5)
    assert losses[0] != losses[4 - 1]
    for name, t in models[0].items():
        assert torch.allclose(models[1][name], t, rtol=0, atol=1e-5), name


@compiled
def test_bfloat16_is_near_float32(tmp_path):
    plain, _ = both(wide_scorer(tmp_path))
    _, packed = both(tmp_path, autocast=torch.bfloat16)
    pairs = some_pairs()
    expected, found = (way.accumulate(pairs, centre=0.0)[0] for way in (plain, packed))
    assert found == pytest.approx(expected, abs=0.02)


@compiled
def test_the_same_pairs_give_the_same_bits(tmp_path):
    found = []
    for _ in range(2):
        _, packed = both(wide_scorer(tmp_path), budget=100)
        packed.accumulate(some_pairs(), centre=0.0)
        found.append(gradients(packed.scorer.model))
    assert all(torch.equal(found[0][name], t) for name, t in found[1].items())


@compiled
def test_equal_texts_and_prompts_are_fed_once(tmp_path):
    _, packed = both(wide_scorer(tmp_path))
    prompt = list(range(40))
    pairs = [Encoded("p", [*prompt, 1, 2], [*prompt, 3]), Encoded("p", [*prompt, 1, 2], [*prompt, 4, 4])]
    fed: list[int] = []
    body = packed.body.layers
    run = body.forward
    body.forward = lambda pack, **k: (fed.append(pack.input_ids.size), run(pack, **k))[1]  # type: ignore[method-assign]
    packed.accumulate(pairs, centre=0.0)
    packed.scores(pairs)
    assert fed == [45, 45]


@compiled
def test_a_new_head_of_zeros_does_not_hide_wrong_kernels(tmp_path, monkeypatch):
    scorer = scorer_of(wide_scorer(tmp_path))
    torch.nn.init.zeros_(scorer.model.score.weight)
    assert isinstance(best(scorer, some_pairs(), backend=CpuBackend())[0], PackedPairs)
    real = PackedPairs._states
    monkeypatch.setattr(PackedPairs, "_states", lambda self, texts: real(self, texts) * 1.01)
    with pytest.warns(UserWarning, match="because the kernels' hidden states differ by"):
        runner, note = best(scorer, some_pairs(), backend=CpuBackend())
    assert isinstance(runner, PlainPairs)
    assert note == ""


def test_what_the_kernels_do_not_know_goes_the_plain_way(tmp_path):
    scorer = scorer_of(save_scorer(tmp_path, kind="llama"))
    runner, note = best(scorer, some_pairs(), backend=None)
    assert isinstance(runner, PlainPairs)
    assert note == ""
    other = scorer_of(save_scorer(tmp_path / "other", kind="gpt2"))
    runner, note = best(other, some_pairs(), backend=CpuBackend())
    assert isinstance(runner, PlainPairs)
    assert "pairs go through the model's own forward, because GPT2ForSequenceClassification is not one of" in note
