"""A policy, and engines on servers that get its weights: on a stand-in, or on real servers that are given.

With ``TREW_VLLM_ENDPOINT`` (an address) and ``TREW_VLLM_MODEL`` (the folder of the model that is served), the tests
that need no faults run against that server: ``make test-vllm`` does so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import learner_help
import tiny
from fake_vllm import FakeVllm, serving
from trew.config import parse
from trew.rollout import Renderer
from trew.rollout.endings import facts_of
from trew.rollout.generate import generate
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.engine import VllmEngine
from trew.rollout.vllm.handshake import ENGINES
from trew.types import Group, Prompt, Sampling
from trew.weights import choose
from trew.weights.publisher import Publisher

REAL = os.environ.get("TREW_VLLM_ENDPOINT", "")


class House:
    """A policy with its servers. ``fakes`` is empty where the servers are real."""

    def __init__(
        self, model: Path, run: Path, endpoints: list[Endpoint], fakes: list[FakeVllm], *, sync: str = "files"
    ) -> None:
        self.net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.renderer = Renderer(AutoTokenizer.from_pretrained(model))
        self.policy = learner_help.learner(self.net)
        self.endpoints, self.fakes, self.run = endpoints, fakes, run
        self.facts = facts_of(self.net)
        self.told: list[str] = []
        self.weights = self.publisher(sync)

    def publisher(self, sync: str, *, backend: str = "") -> Publisher:
        """What a run with this cluster.sync publishes with."""
        config = parse({
            "model": "m", "learner": {"dtype": "float32"},
            "cluster": {"rollout": "vllm", "sync": sync, "endpoints": [str(each) for each in self.endpoints]},
        })  # fmt: skip
        return choose.publisher(
            config, device="cpu", model=self.net.config, facts=self.facts, run=self.run, endpoints=self.endpoints,
            backend=backend or ENGINES[sync], tell=self.told.append,
        )  # fmt: skip

    def engine(self, *, publish: bool = True, **options: Any) -> VllmEngine:
        made = VllmEngine(self.endpoints, self.renderer, facts=self.facts, tell=self.told.append, **options)
        if publish:
            self.publish(made, 0)
        return made

    def publish(self, engine: VllmEngine, version: int) -> None:
        """Brings the servers to the policy's weights, as this version."""
        self.policy.version = version
        self.weights.publish(self.policy, engine)

    def change(self, seed: int = 1, scale: float = 0.05) -> None:
        """Changes the policy's weights, as an update does."""
        draws = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(scale * p.abs().mean() * torch.randn(p.shape, generator=draws))
        self.policy.version += 1


@contextlib.contextmanager
def house(
    folder: Path, *, servers: int = 1, kind: str = "smollm", tcp: bool = False, sync: str = "files"
) -> Iterator[House]:
    """A house with stand-in servers, which get weights by the route ``sync``."""
    with contextlib.ExitStack() as stack:
        model = tiny.save(folder / "model", kind)
        fakes = [FakeVllm(model, token="secret", backend=ENGINES[sync]) for _ in range(servers)]
        sockets = [None if tcp else folder / f"{i}.sock" for i in range(servers)]
        endpoints = [stack.enter_context(serving(f, s)) for f, s in zip(fakes, sockets, strict=True)]
        made = House(model, folder, endpoints, fakes, sync=sync)
        stack.callback(made.weights.close)
        yield made


@contextlib.contextmanager
def any_house(folder: Path, *, sync: str = "files") -> Iterator[House]:
    """A house with the server that the environment names, or else a stand-in."""
    if not REAL:
        with house(folder, sync=sync) as made:
            yield made
        return
    endpoint = Endpoint.parse(REAL, os.environ.get("TREW_SERVER_TOKEN", ""))
    made = House(Path(os.environ["TREW_VLLM_MODEL"]), folder, [endpoint], [], sync=sync)
    with contextlib.closing(made.weights):
        yield made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A house of two servers for a module."""
    with house(tmp_path_factory.mktemp("house"), servers=2) as made:
        yield made


@pytest.fixture
def two(pair: House) -> Iterator[House]:
    """A policy and two servers, as they were at first."""
    with as_at_first(pair):
        yield pair


PROMPTS = [Prompt(f"p{i}", text=f"What is {i} + {i}?") for i in range(6)]
SAMPLING = Sampling(max_tokens=10, seed=5)


@contextlib.contextmanager
def as_at_first(made: House) -> Iterator[None]:
    """Puts policy and stand-ins back afterwards, for the next test."""
    kept = {name: p.detach().clone() for name, p in made.net.state_dict().items()}
    yield
    made.net.load_state_dict(kept)
    made.weights.newest = None
    made.told.clear()
    for fake in made.fakes:
        fake.faults.hangs = False
        fake.faults, fake.dead, fake.paused = type(fake.faults)(), False, False
        fake.asleep = set()
        fake.calls.clear()


def tokens(groups: list[Group]) -> list[list[list[int]]]:
    return [[r.token_ids.tolist() for r in group.rollouts] for group in groups]


def made(engine: VllmEngine, **options: Any) -> list[list[list[int]]]:
    """Tokens of some completions."""
    return tokens(generate(engine, PROMPTS, n=3, sampling=SAMPLING, **options))


def only(house: House, number: int, **options: Any) -> VllmEngine:
    """An engine that has this server alone."""
    every, house.endpoints = house.endpoints, [house.endpoints[number]]
    try:
        return house.engine(**options)
    finally:
        house.endpoints = every
