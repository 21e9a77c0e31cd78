"""A run folder of any size, of made-up completions, written by the writer that runs use: for benchmarks/view.py."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from trew.runs import RunFolder
from trew.runs.rollouts import Sampler
from trew.types import Group, Prompt, Score, ScoredGroup, single_turn

PROMPTS, COMPLETIONS = 25, 8  # of each step
EVALUATED, EVERY = 200, 50
TEXT = (
    "so the total number of apples is then we add first second because minus times each half twice gives left over "
    "answer let us see check again therefore wait that is wrong"
)
WORDS = TEXT.split()
CONFIG = """\
model = "none"
steps = {steps}
seed = 0
[data]
task = "prompts"
[objective]
preset = "grpo"
[rollout]
prompts = 25
completions = 8
max_tokens = 1024
"""


def make(folder: Path, *, steps: int, seed: int = 0) -> int:
    """Writes a finished run of ``steps`` steps, and returns the number of its completions."""
    rng = np.random.default_rng(seed)
    count = 0
    with RunFolder.open(folder) as run:
        run.write_config(CONFIG.format(steps=steps))
        for step in range(1, steps + 1):
            groups = [_group(rng, f"train-{int(rng.integers(5000))}-{i}", step / steps) for i in range(PROMPTS)]
            advantages = [[score.value - 0.5 for score in group.scores] for group in groups]
            run.write_rollouts(
                step,
                groups,
                advantages=advantages,
                trained_on=groups[: PROMPTS - 2],
                sampler=Sampler("embedded", "float32"),
            )
            run.log({"step": step, **{name: _metric(rng, step / steps) for name in METRICS}})
            count += PROMPTS * COMPLETIONS
            if step % EVERY == 0:
                held = [_group(rng, f"eval-{i}", step / steps, completions=1) for i in range(EVALUATED)]
                run.write_eval(step, held)
                run.log({"step": step, "eval_accuracy": 0.5, "eval_low": 0.4, "eval_high": 0.6, "eval_n": EVALUATED})
                count += EVALUATED
        run.write_summary({"steps": steps})
    _tokenizer(folder / "final")
    return count


METRICS = (
    "reward", "accuracy", "entropy", "kl", "ratio", "ratio_q01", "ratio_q50", "ratio_q99", "clip_share", "ess",
    "weight", "completion_length", "truncated_share", "zero_signal_share", "advantage_share", "grad_norm", "loss",
    "lr", "seconds", "tokens_per_second", "staleness", "canary_gap", "groups_sampled", "policy_version",
    *(f"monitor/m{i}" for i in range(8)),
)  # fmt: skip


def _metric(rng: np.random.Generator, done: float) -> float:
    return float(done + rng.normal(0, 0.1))


def _group(rng: np.random.Generator, uid: str, done: float, *, completions: int = COMPLETIONS) -> ScoredGroup:
    # Of the uid: a prompt is asked the same at every evaluation.
    a, b = (int(n) for n in np.random.default_rng(list(uid.encode())).integers(1, 1000, 2))
    prompt = Prompt(
        uid, messages=({"role": "user", "content": f"There are {a} apples and {b} more. How many are there?"},),
        columns={"answer": str(a + b), "source": "made up"},
    )  # fmt: skip
    pairs = [_completion(rng, a + b, right=bool(rng.random() < 0.2 + 0.6 * done)) for _ in range(completions)]
    return ScoredGroup(Group(prompt, tuple(r for r, _ in pairs)), tuple(s for _, s in pairs))


def _completion(rng: np.random.Generator, gold: int, *, right: bool):
    length = int(min(math.exp(rng.normal(5.2, 0.5)), 1000))
    said = gold if right else int(rng.integers(2000))
    words = " ".join(rng.choice(WORDS, length // 5 + 1).tolist())
    text = f"{words[: length - 8]} #### {said}"
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    n = len(tokens)
    logprobs = -np.abs(rng.normal(0, 1, n)).astype(np.float32)
    rollout = single_turn(
        rng.integers(32, 120, 60), tokens, logprobs=logprobs, policy_logprobs=logprobs + np.float32(0.001),
        entropies=np.abs(rng.normal(0, 1, n)).astype(np.float32), version=0, text=text,
        finish_reason="length" if length == 1000 else "stop",
    )  # fmt: skip
    parts = {"right": float(right), "format": float(rng.random() < 0.9)}
    return rollout, Score(0.9 * parts["right"] + 0.1 * parts["format"], parts=parts, extracted=str(said))


def _tokenizer(folder: Path) -> None:
    """A tokenizer of one token per byte, whose ids are the bytes."""
    from tokenizers import Tokenizer, decoders, models

    folder.mkdir(exist_ok=True)
    symbols = {f"<0x{i:02X}>": i for i in range(256)}
    made = Tokenizer(models.BPE(symbols, [], byte_fallback=True))
    made.decoder = decoders.ByteFallback()
    made.save(str(folder / "tokenizer.json"))
