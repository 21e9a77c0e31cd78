"""What several turns cost beside one, and whether environments are waited for.

    python benchmarks/episodes.py            medians, written to benchmarks/results/episodes.json
    python benchmarks/episodes.py --model lm --episodes 8 --pairs 1     a quick look

It also measures what the learner saves where it computes no log-prob of observations (``learner_ratio``: the time of a
gradient with them left out, by the time with all log-probs).

An episode of 5 turns is compared with one completion of as many sampled tokens: what is more is the observations, their
prefills, and the processes of the environment. Both are drawn to their full length, whatever the tokens are.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from demo import machine
from trew.config import parse
from trew.env.hosts import Hosts
from trew.env.load import Spec
from trew.learner import Learner
from trew.models import backends, loading
from trew.objective import TokenBatch, preset
from trew.rollout import Renderer
from trew.rollout.bridge import Bridges
from trew.rollout.endings import facts_of
from trew.rollout.episodes import Episodes, Limits
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.types import Prompt, Sampling, TrainingSample, Turn

RESULT = Path(__file__).parent / "results" / "episodes.json"
TURNS = 5


class FullLength(TorchEngine):
    """Ends every reply at its longest, as if the policy had ended it there."""

    def _turn(self, done: Any) -> Turn:
        return dataclasses.replace(super()._turn(done), finish_reason="stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32], help="of each reply; a row for each")
    parser.add_argument("--pairs", type=int, default=3, help="measured in turns; the medians are kept")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "torch": torch.__version__,
        "transformers": transformers.__version__, **vars(args),
    }  # fmt: skip
    found["rows"] = [
        {"tokens": tokens, **Measured(args.model, episodes=args.episodes, tokens=tokens).all(args.pairs)}
        for tokens in found.pop("tokens")
    ]
    net = loading.load_model(args.model, device="cpu")
    found["observation_share"], found["learner_ratio"] = learned(net, args.pairs)
    print(json.dumps(found, indent=2))
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


class Measured:
    """A model, and what is measured with it."""

    def __init__(self, model: str, *, episodes: int, tokens: int) -> None:
        self.episodes, self.tokens = episodes, tokens
        renderer = Renderer(loading.load_tokenizer(model))
        renderer.stop_ids = frozenset()  # no token ends a reply: all have their full length
        net = loading.load_model(model, device="cpu")
        net.generation_config.eos_token_id = None
        self.renderer, self.facts, self.net = renderer, facts_of(net), net
        backend = backends.of(parse({"model": model}), "cpu")
        self.engine = FullLength(net, renderer, batch=episodes, backend=backend)
        message = {"role": "user", "content": "Guess my number from 1 to 9. Say only a number."}
        self.prompts = [Prompt(f"p{i}", messages=(message,)) for i in range(episodes // 8 or 1)]

    def all(self, pairs: int) -> dict[str, Any]:
        one, five = [], []
        for pair in range(pairs + 1):
            both = self.completion(), self.played(0.0)[0]
            if pair:  # the first one warms up
                one.append(both[0])
                five.append(both[1])
        slow, waited = self.played(0.05)
        return {
            "observed_tokens": self.observed,  # of all episodes, after the prompt
            "completion_s": statistics.median(one), "episode_s": statistics.median(five),
            "ratio": statistics.median(b / a for a, b in zip(one, five, strict=True)),
            "slow_environment_s": slow, "waited_share": waited / slow,
        }  # fmt: skip

    def completion(self) -> float:
        """Seconds of one completion per prompt and sample, with the tokens of all turns."""
        start = time.perf_counter()
        how = Sampling(max_tokens=TURNS * self.tokens)
        generate(self.engine, self.prompts, n=self._samples, sampling=how)
        return time.perf_counter() - start

    def played(self, seconds: float) -> tuple[float, float]:
        """Seconds of as many episodes, and those of them in which nothing was generated; each answer takes
        ``seconds``."""
        with _hosts(seconds) as hosts:
            # Started before: a run starts them once.
            hosts.load()
            episodes = Episodes(
                self.engine, hosts, Bridges(self.renderer), limits=Limits(TURNS, self.facts.positions or 1 << 20, 64),
                ends=frozenset(),
            )  # fmt: skip
            start = time.perf_counter()
            groups = generate(episodes, self.prompts, n=self._samples, sampling=Sampling(max_tokens=self.tokens))
            took = time.perf_counter() - start
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert all(len(rollout.turns) == TURNS and rollout.status == "finished" for rollout in rollouts)
        self.observed = sum(len(turn.context_ids) for rollout in rollouts for turn in rollout.turns[1:])
        return took, episodes.waited_s

    @property
    def _samples(self) -> int:
        return self.episodes // len(self.prompts)


def learned(net: Any, pairs: int) -> tuple[float, float]:
    """The share of observations in episodes like those of ``guess``, and the time of their gradient without log-probs
    of observations, as a share of the time with all log-probs."""
    config, rng = parse({"model": "m"}).learner, np.random.default_rng(0)
    objective = preset("dr-grpo")
    sampled = np.tile(np.repeat([True, False], [2, 9]), 3)
    samples = [
        TrainingSample(np.arange(80), rng.integers(0, 4000, len(sampled)), group=0, sampled=sampled) for _ in range(12)
    ]
    stream = len(samples) * len(sampled)
    batch = TokenBatch(
        logprobs=torch.zeros(stream), mask=torch.from_numpy(np.tile(sampled, len(samples))),
        sequence_ids=torch.arange(len(samples)).repeat_interleave(len(sampled)),
        group_ids=torch.zeros(len(samples), dtype=torch.int64), rewards=torch.arange(len(samples)) % 2.0,
        max_length=len(sampled),
    )  # fmt: skip
    batch = objective.prepare(batch)
    learner = Learner(
        net, config=config, objective=objective, optimizer_steps=1, backend=backends.of(parse({"model": "m"}), "cpu")
    )

    def taken(these: list[TrainingSample]) -> float:
        start = time.perf_counter()
        learner.accumulate(these, batch)
        return time.perf_counter() - start

    every = [dataclasses.replace(sample, sampled=None) for sample in samples]
    ratios = [taken(samples) / taken(every) for _ in range(pairs + 1)]
    return float(1 - sampled.mean()), statistics.median(ratios[1:])  # the first one warms up


@contextlib.contextmanager
def _hosts(seconds: float) -> Iterator[Hosts]:
    hosts = Hosts(Spec(f"{Path(__file__).with_name('answering.py')}:answers", {"seconds": seconds, "turns": TURNS}))
    try:
        yield hosts
    finally:
        hosts.close()


if __name__ == "__main__":
    main()
