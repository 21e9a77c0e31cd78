"""What the tests of the compiled CPU kernels share: the helpers of ``learner_help`` with the backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import learner_help as help
from trew.backends.cpu.backend import CpuBackend
from trew.learner import Learner
from trew.learner.choose import runner_for
from trew.learner.runner import ModelRunner, RunnerSettings


def _options(kernels: bool, linear: bool) -> dict[str, Any]:
    """Without kernels: the plain path, which everything is compared with."""
    return {"fused": kernels, "backend": CpuBackend(products=linear) if kernels else None}


def learner(net: Any, *given: Any, kernels: bool = True, linear: bool = True, **settings: Any) -> Learner:
    return help.learner(net, *given, **{**_options(kernels, linear), **settings})


def gradients(net: Any, *given: Any, kernels: bool = True, linear: bool = True, **settings: Any) -> Tensor:
    return help.gradients(net, *given, **{**_options(kernels, linear), **settings})


def runner(net: Any, *, kernels: bool = True, linear: bool = True, **settings: Any) -> ModelRunner:
    options = _options(kernels, linear)
    return runner_for(net, RunnerSettings(fused=options["fused"], **settings), options["backend"])
