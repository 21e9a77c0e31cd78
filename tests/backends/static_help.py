"""What the tests of the decoder for GPUs share: models, engines, and recordings on a CPU.

A recording here (:class:`Traced`) replays operations on the very tensors that they were seen with, as a CUDA graph
does: what Python decided when it was made is in it for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tiny
from trew.backends.cuda_graphs.backend import CudaGraphsBackend
from trew.backends.cuda_graphs.graphs import Graphs
from trew.backends.cuda_graphs.static_model import COLUMNS, StaticModel
from trew.models.anatomy import Transformer, describe
from trew.rollout import Renderer
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.types import Group, Prompt, Sampling

KINDS = (*(kind for kind in tiny.KINDS if not kind.startswith("gpt")), "mistral", "smollm3")
LONG = "a prompt that is a good deal longer than all others, and much longer than the window of any layer here"
PROMPTS = [Prompt(uid=f"p{i}", text=text) for i, text in enumerate(("hi", LONG, "how are you?", "x"))]
SAMPLING = Sampling(max_tokens=40, seed=3)


class Traced:
    """A recorder for CPUs."""

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def warm(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Traced._Trace:
        self.made += 1
        return self._Trace(self, make_fx(lambda: function())())

    class _Trace:
        def __init__(self, of: Traced, graph: Callable[[], None]) -> None:
            self.of, self.graph = of, graph

        def replay(self) -> None:
            self.of.replayed += 1
            self.graph()


def parts_of(m: Any) -> Transformer:
    parts = describe(m, adapters=True)
    assert isinstance(parts, Transformer), parts
    return parts


def static_of(m: Any, *, slots: int = 5, columns: int = COLUMNS, **options: Any) -> StaticModel:
    found = StaticModel(
        parts_of(m), slots=slots, columns=columns, **{"dtype": torch.float32, "graphs": Graphs(None), **options}
    )
    assert found.begin(parts_of(m))
    return found


def engine(m: Any, *, eos: bool = False, graphs: Any = None, native: bool = True, **options: Any) -> TorchEngine:
    backend = CudaGraphsBackend(graphs) if native else None
    return TorchEngine(m, Renderer(tiny.tokenizer(eos=eos)), backend=backend, **options)


def held(e: TorchEngine) -> StaticModel | None:
    """What the backend keeps between calls."""
    assert isinstance(e.backend, CudaGraphsBackend)
    return e.backend.held


def generated(e: TorchEngine, *, n: int = 3, sampling: Sampling = SAMPLING) -> list[Group]:
    return generate(e, PROMPTS, n=n, sampling=sampling)


def same(one: list[Group], other: list[Group], *, atol: float = 3e-5) -> None:
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert x.token_ids.tolist() == y.token_ids.tolist()
            np.testing.assert_allclose(x.policy_logprobs, y.policy_logprobs, atol=atol)
            np.testing.assert_allclose(x.entropies, y.entropies, atol=atol)
