"""examples/one_file.py against the library: two codes that share nothing must give the same numbers."""

from __future__ import annotations

import ast
import copy
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tiny
import trew
from trew.config import LearnerConfig
from trew.learner import Learner
from trew.types import TrainingSample

SCRIPT = Path(__file__).parents[2] / "examples" / "one_file.py"
EPS = 0.2


class Case(NamedTuple):
    """Completions that the script sampled from ``model``, with everything that both sides need."""

    model: Any
    samples: list[tuple[Tensor, Tensor]]
    rewards: Tensor  # (prompts, completions)
    olds: list[Tensor]
    refs: list[Tensor]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def case(script) -> Case:
    """Three groups of four, the last without signal; old log-probs far enough off that some tokens are clipped."""
    model, reference = tiny.model("llama", seed=1), tiny.model("llama", seed=2)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (5, 9, 2):
        prompt = torch.randint(0, 256, (length,), generator=generator)
        ends = torch.arange(0, tiny.VOCAB, 5)
        samples += [
            (prompt, c)
            for c in script.sample(model, prompt, n=4, max_tokens=7, ends=ends, generator=generator)
        ]  # fmt: skip
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.7, 0.25], [0.7, 0.7, 0.7, 0.7]])
    with torch.no_grad():
        exact = [script.logprobs(model, *pair) for pair in samples]
        refs = [script.logprobs(reference, *pair) for pair in samples]
    olds = [x + 0.3 * torch.randn(len(x), generator=generator) for x in exact]
    return Case(model, samples, rewards, olds, refs)


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def token_batch(case: Case, *, logprobs: Tensor) -> trew.TokenBatch:
    return trew.TokenBatch.from_padded(
        logprobs=logprobs,
        mask=padded([torch.ones(len(c), dtype=torch.bool) for _, c in case.samples]),
        rewards=case.rewards.flatten(),
        group_ids=torch.arange(3).repeat_interleave(4),
        old_logprobs=padded(case.olds),
        ref_logprobs=padded(case.refs),
    )


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_script_imports_nothing_of_the_library_and_fits_on_a_page():
    text = SCRIPT.read_text()
    for node in ast.walk(ast.parse(text)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.split(".")[0] == "trew" for name in names)
    assert text.count("\n") < 150


def test_completions_end_with_the_first_end_token_or_at_the_limit(case):
    ends = set(range(0, tiny.VOCAB, 5))
    lengths = set()
    for _, completion in case.samples:
        ids = completion.tolist()
        assert 1 <= len(ids) <= 7
        assert not ends & set(ids[:-1])
        assert len(ids) == 7 or ids[-1] in ends
        lengths.add(len(ids))
    assert len(lengths) > 2


def test_advantages_are_the_librarys(script, case):
    batch = token_batch(case, logprobs=padded(case.olds))
    theirs = trew.preset("grpo", beta=0.0).loss(batch).advantages[:, 0].view(3, 4)
    torch.testing.assert_close(script.advantages(case.rewards), theirs, rtol=0, atol=1e-6)
    assert script.advantages(case.rewards)[2].tolist() == [0.0] * 4
    assert script.advantages(case.rewards)[0].tolist() == [1.5, -0.5, -0.5, -0.5]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_and_gradient_of_the_textbook_surrogate_are_those_of_the_coefficients(script, case, beta):
    model = case.model
    scaled = script.advantages(case.rewards).flatten()
    refs = case.refs if beta else [None] * len(case.refs)
    losses = [
        script.sequence_loss(script.logprobs(model, *pair), old=old, ref=ref, advantage=a, eps=EPS, beta=beta)
        for pair, a, old, ref in zip(case.samples, scaled, case.olds, refs, strict=True)
    ]
    mine = torch.stack(losses).mean()
    mine.backward()
    expected = gradients(model)
    model.zero_grad()

    logprobs = padded([script.logprobs(model, *pair) for pair in case.samples])
    out = trew.preset("grpo", eps_low=EPS, eps_high=EPS, beta=beta).loss(token_batch(case, logprobs=logprobs))
    out.loss.backward()
    assert out.metrics["clip_share"][0] > 0  # otherwise the clip would not have been compared
    torch.testing.assert_close(out.loss.detach(), mine.detach(), rtol=0, atol=1e-6)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-2
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_weights_after_one_adamw_step_are_those_of_the_learner(script, case, beta):
    """The learner's way is another one altogether: prompts shared, rows packed, micro-batches, coefficients."""
    config = LearnerConfig(lr=1e-3, adam_eps=1e-4, microbatch_tokens=30)
    mine, theirs = copy.deepcopy(case.model), copy.deepcopy(case.model)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=config.lr, eps=config.adam_eps, weight_decay=0.0)
    scaled = script.advantages(case.rewards).flatten()
    refs = case.refs if beta else [None] * len(case.refs)
    loss = script.update(
        mine, optimizer, case.samples, scaled, olds=case.olds, refs=refs, eps=EPS, beta=beta
    )  # fmt: skip

    objective = trew.preset("grpo", eps_low=EPS, eps_high=EPS, beta=beta)
    learner = Learner(theirs, config=config, objective=objective, optimizer_steps=1)
    samples = [TrainingSample(p.numpy(), c.numpy(), i // 4) for i, (p, c) in enumerate(case.samples)]
    batch = objective.prepare(token_batch(case, logprobs=padded(case.olds)))
    out = learner.step(samples, batch)

    assert out.loss == pytest.approx(loss, abs=1e-6)
    assert out.metrics["clip_share"][0] > 0
    before = dict(case.model.named_parameters())
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
        assert not torch.equal(a, before[name]), name


def test_the_script_runs_and_prints_a_reward_per_step(tmp_path, monkeypatch, capsys):
    folder = tiny.save(tmp_path / "model")
    sizes = ("--steps", "3", "--prompts", "2", "--completions", "3", "--max-tokens", "4", "--beta", "0.01")
    monkeypatch.setattr(sys, "argv", ["one_file.py", "--model", str(folder), *sizes])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = re.findall(r"^step (\d+)  reward ([01]\.\d{3})  loss [+-]\d+\.\d{4}", capsys.readouterr().out, re.M)
    assert [int(step) for step, _ in lines] == [1, 2, 3]
    assert all(0 <= float(value) <= 1 for _, value in lines)


def test_the_reward_reads_the_last_number(script):
    assert script.reward("7 * 8 = 56.", 56) == 1.0
    assert script.reward("56 or 57", 56) == 0.0
    assert script.reward("no idea", 56) == 0.0
