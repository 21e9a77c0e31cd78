"""What ``trew sft`` measures on held-out rows: numbers by hand, intervals by a plain bootstrap, and what is logged."""

from __future__ import annotations

import contextlib
import io
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sft_help
import tiny
import trew
from trew.config import parse
from trew.errors import ConfigError, NumericsError
from trew.eval import wilson
from trew.training import planning, sft_program
from trew.training.sft_program import SftProgram, SftState, held_out_loss, held_out_pairs
from trew.types import TrainingSample
from trew.utils.console import Display

LOGPROBS = np.array([-1.0, -9.0, -2.0, -0.5, -0.25, -0.25, -3.0], dtype=np.float32)
"""Of three rows of 3, 3 and 1 tokens; the -9 is of a token that nobody answers with."""


def rows(*sampled: list[bool]) -> list[TrainingSample]:
    return [
        TrainingSample(np.array([1]), np.arange(len(own)), number, np.array(own)) for number, own in enumerate(sampled)
    ]


ROWS = rows([True, False, True], [True, True, True], [True])


# Nine rows and nine pairs: of three, an interval is from the least to the largest value, however it is drawn.
NINE = rows(*([True] * n for n in range(1, 10)))
OF_NINE = -np.random.default_rng(1).random(45).astype(np.float32)
PAIRS_OF_NINE = [TrainingSample(np.array([1]), np.arange(2), pair // 2) for pair in range(18)]


def bootstrapped(sums: list[float], counts: list[int], *, seed: int) -> list[float]:
    """The percentile interval of 95 % of sum / count over rows drawn with replacement."""
    draws = np.random.default_rng(seed).integers(0, len(sums), (1000, len(sums)))
    means = sorted(sum(sums[i] for i in draw) / sum(counts[i] for i in draw) for draw in draws)
    return [float(np.quantile(means, q)) for q in (0.025, 0.975)]


def test_a_held_out_loss_is_the_mean_over_answered_tokens():
    """(1 + 2) + (0.5 + 0.25 + 0.25) + 3 = 7 over 2 + 3 + 1 tokens."""
    found = held_out_loss(LOGPROBS, ROWS, seed=0)
    assert found["loss"]["mean"] == pytest.approx(7 / 6)
    assert found["perplexity"] == pytest.approx(math.exp(7 / 6))
    assert found["tokens"] == 6


@pytest.mark.parametrize("seed", [0, 5])
def test_the_interval_draws_rows_with_all_of_their_tokens(seed):
    found = held_out_loss(OF_NINE, NINE, seed=seed)["loss"]
    assert [found["low"], found["high"]] == pytest.approx(interval_of_nine(seed))


def interval_of_nine(seed: int) -> list[float]:
    sums = [-float(part.sum()) for part in np.split(OF_NINE, np.cumsum(range(1, 9)))]
    return bootstrapped(sums, list(range(1, 10)), seed=seed)


def test_a_perplexity_beyond_all_numbers_is_the_largest():
    assert held_out_loss(np.array([-20.0]), rows([True]), seed=0)["perplexity"] == pytest.approx(math.exp(20))
    assert held_out_loss(np.array([-1e6]), rows([True]), seed=0)["perplexity"] == math.exp(700)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_held_out_loss_that_is_not_finite_is_an_error(value):
    with pytest.raises(NumericsError, match="the held-out loss is not finite"):
        held_out_loss(np.array([-1.0, value]), rows([True, True]), seed=0)


PAIRS = [TrainingSample(np.array([1]), np.arange(n), g) for g, n in enumerate((2, 2, 1, 3, 1, 1)) for g in [g // 2]]
"""Three pairs, the chosen answer first."""
LOG_RATIOS = torch.tensor([0.5, 0.5, 0.2, 0.0, -1.0, 0.5, 0.25, 0.25, 0.7, 0.7])


def plan(seed: int = 0) -> Any:
    return SimpleNamespace(
        objective=trew.preset("dpo", dpo_beta=2.0), config=SimpleNamespace(seed=seed, prefers=True), demonstrations=None
    )


def test_held_out_pairs_by_hand():
    """Margins 2 (1 - 0.2) = 1.6, 2 (-1 - 1) = -4 and 0: equally likely answers are not ranked right."""
    found = held_out_pairs(plan(), LOG_RATIOS, PAIRS)
    margins = [1.6, -4.0, 0.0]
    losses = [math.log1p(math.exp(-m)) for m in margins]
    assert found["margin"] == pytest.approx(sum(margins) / 3)
    assert found["loss"]["mean"] == pytest.approx(sum(losses) / 3)
    assert found["accuracy"]["mean"] == pytest.approx(1 / 3)
    assert found["tokens"] == 10


@pytest.mark.parametrize("seed", [0, 5])
def test_the_intervals_of_pairs_draw_pairs(seed):
    ratios = torch.randn(36, generator=torch.Generator().manual_seed(2))
    found = held_out_pairs(plan(seed), ratios, PAIRS_OF_NINE)
    margins = [2 * float(four[:2].sum() - four[2:].sum()) for four in ratios.double().split(4)]
    losses = [math.log1p(math.exp(-m)) for m in margins]
    assert [found["loss"]["low"], found["loss"]["high"]] == pytest.approx(bootstrapped(losses, [1] * 9, seed=seed))
    assert found["accuracy"] == wilson(sum(m > 0 for m in margins), 9)._asdict()


def test_pairs_that_are_all_right_leave_room_for_others_that_are_not():
    right = held_out_pairs(plan(), torch.tensor([1.0, 1.0, 0.0, 0.0] * 9), PAIRS_OF_NINE)["accuracy"]
    assert (right["mean"], right["high"]) == (1.0, 1.0)
    assert right["low"] == pytest.approx(0.70, abs=0.01)


def test_a_single_row_or_pair_has_no_interval_of_its_loss():
    one = held_out_loss(np.array([-1.0, -3.0]), rows([True, True]), seed=0)["loss"]
    assert one == {"mean": 2.0, "low": None, "high": None}
    assert held_out_pairs(plan(), LOG_RATIOS[:4], PAIRS[:2])["loss"]["low"] is None
    shown = io.StringIO()
    display = Display()
    display.console.file = shown
    found = {"loss": one, "rows": 1, "perplexity": 7.4}
    display.losses(found, found)
    assert "2.000" in shown.getvalue()


def test_held_out_pairs_take_memory_by_their_number_and_not_its_square():
    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.seen = max(self.seen, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Largest() as largest:
        held_out_pairs(plan(), torch.zeros(36), PAIRS_OF_NINE)
    assert largest.seen <= 36  # two tokens for each of 18 answers


def test_held_out_pairs_that_are_not_finite_are_an_error():
    with pytest.raises(NumericsError, match="the held-out loss is not finite"):
        held_out_pairs(plan(), LOG_RATIOS.clone().fill_(math.nan), PAIRS)


# ---- an evaluation


class Program(SftProgram):
    """One whose policy gives log-probs that a test chose, and which writes into lists."""

    def __init__(self, *, prefers: bool = False) -> None:
        samples = PAIRS if prefers else NINE
        groups = [SimpleNamespace(group=SimpleNamespace(rollouts=[self._rollout(s) for s in samples if s.group == g]))
                  for g in range(samples[-1].group + 1)]  # fmt: skip
        self.plan = plan(5)
        self.plan.config.prefers, self.plan.demonstrations = prefers, SimpleNamespace(held=groups)
        self.state, self.logged, self.tracked, self.shown, self.anywhere = SftState(), [], [], [], 0
        self.logprobs = LOG_RATIOS if prefers else torch.from_numpy(OF_NINE)
        self.policy: Any = SimpleNamespace(logprobs=self._logprobs)
        self.team: Any = SimpleNamespace(orders=None, measure=lambda rollouts: None)
        self.interrupts: Any = SimpleNamespace(anywhere=self._anywhere)
        self.folder: Any = SimpleNamespace(log=self.logged.append)
        self.trackers: Any = SimpleNamespace(log=lambda step, row: self.tracked.append((step, row)))
        bar = contextlib.nullcontext(SimpleNamespace(advance=None))
        self.display: Any = SimpleNamespace(bar=lambda name, count: bar, row=self.shown.append)

    @staticmethod
    def _rollout(sample: TrainingSample) -> Any:
        return SimpleNamespace(prompt_ids=sample.prompt_ids, token_ids=sample.token_ids, sampled=sample.sampled)

    def _anywhere(self, text: str) -> Any:
        self.anywhere += 1
        return contextlib.nullcontext()

    def _logprobs(self, samples: Any, *, reference: bool = False, progress: Any = None) -> torch.Tensor:
        return torch.full_like(self.logprobs, -0.5) if reference else self.logprobs

    def after(self, step: int, shift: float = 0.0) -> dict[str, Any]:
        self.state.step, self.logprobs = step, self.logprobs - shift
        return self.evaluate()


def test_an_evaluation_is_logged_tracked_and_shown():
    program = Program()
    found = program.after(2)
    assert (found["rows"], found["tokens"]) == (9, 45)
    low, high = interval_of_nine(5)
    mean = -float(OF_NINE.sum()) / 45
    assert program.logged == [
        {"step": 2, "eval_loss": pytest.approx(mean), "eval_loss_low": pytest.approx(low),
         "eval_loss_high": pytest.approx(high), "eval_n": 9, "eval_perplexity": pytest.approx(math.exp(mean))}
    ]  # fmt: skip
    assert program.tracked == [(2, program.logged[0])]
    assert program.shown == program.logged


def test_an_evaluation_of_pairs_compares_with_the_reference():
    """As the reference gives each token -0.5, the log-ratios are half a nat above those of ``LOG_RATIOS``."""
    program = Program(prefers=True)
    found = program.after(2)
    want = held_out_pairs(plan(5), LOG_RATIOS + 0.5, PAIRS)
    assert {key: found[key] for key in want} == want
    (row,) = program.logged
    assert row["eval_preference_accuracy"] == want["accuracy"]["mean"]
    assert row["eval_preference_margin"] == want["margin"]
    assert (row["eval_n"], "eval_perplexity" in row) == (3, False)


def test_the_best_step_is_the_earliest_of_equals_after_training_began():
    program = Program()
    program.after(0)
    assert (program.state.best_step, program.state.best_loss) == (-1, None)
    program.after(2, 1.0)  # worse than before training, whose weights no checkpoint has
    assert program.state.best_step == 2
    program.after(4)
    assert program.state.best_step == 2
    program.after(6, -0.5)
    assert (program.state.best_step, program.state.best_loss) == (6, pytest.approx(0.5 - float(OF_NINE.sum()) / 45))
    program.after(8, 0.25)
    assert program.state.best_step == 6


def test_an_interrupt_ends_an_evaluation_at_once_only_where_there_are_no_other_ranks():
    program = Program()
    program.after(2)
    assert program.anywhere == 1
    entered: list[str] = []

    @contextlib.contextmanager
    def entering(text: str) -> Any:
        entered.append(text)
        yield

    program.interrupts = SimpleNamespace(anywhere=entering)
    program.after(4)
    program.team.orders = object()
    program.after(6)
    assert len(entered) == 1
    assert sft_program.SHAPES is program.remembers


def test_a_tokenizer_without_an_end_token_is_refused_with_what_helps(tmp_path):
    """The advice was rollout.stop, which demonstrations refuse."""
    folder = tiny.save(tmp_path / "model", chat=False, eos=False)
    (tmp_path / "d.jsonl").write_text("".join(f'{{"prompt": "{c}", "completion": "b"}}\n' for c in "abcdefgh"))
    data = {"task": "demonstrations", "train": str(tmp_path / "d.jsonl")}
    config = parse(sft_help.recipe(tmp_path, "run", data=data, batch=2, held=2))
    with pytest.raises(ConfigError, match=r"eos_token in tokenizer_config\.json"):
        planning.plan(config)
    named = folder / "tokenizer_config.json"
    named.write_text(json.dumps(json.loads(named.read_text()) | {"eos_token": "<|endoftext|>"}))
    assert planning.plan(config).demonstrations.train[0].group.rollouts[0].token_ids[-1] == 256
