"""A run's headline before the first step, and its summary and exported model after the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..learner import Learner
from ..models import backends, loading, lora
from ..models.lora import Adapters, parameter_count
from ..models.sharded import full
from ..runs.files import PRIVATE
from ..utils.user_files import short_name
from .policy_program import PolicyProgram
from .policy_state import PolicyState
from .sft_program import SftState
from .versions import arithmetic, versions


def export(program: PolicyProgram) -> None:
    """Writes the trained model as an ordinary model folder; with adapters, the merged model and the adapters."""
    tokenizer = program.plan.renderer.tokenizer
    if program.backend is not None:
        program.backend.release()  # merging needs a second model's memory, which generation's buffers may hold
    program.team.export()
    # Sharded: this rank writes alone, from weights that all ranks gather.
    if program.team.parts > 1:
        model, tensors = gather_for_export(program.policy, program.adapters)
        adapters = program.adapters
        extra_files = None if adapters is None else lambda work: adapters.save(work / "adapter", tensors)
        loading.export(model, tokenizer, program.folder.final, extra_files=extra_files, mode=PRIVATE)
    elif program.adapters is None:
        loading.export(program.model, tokenizer, program.folder.final, mode=PRIVATE)
    else:
        program.adapters.export(tokenizer, program.folder.final, mode=PRIVATE)


def gather_for_export(policy: Learner, adapters: Adapters | None) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Gathers sharded weights into a whole model on the CPU, with adapters merged into it, and the adapters' tensors.

    Meanwhile the other ranks call :func:`help_to_gather`.
    """
    if adapters is not None:
        return lora.merged(adapters), {name: full(t).cpu() for name, t in adapters.tensors().items()}
    tensors = {name: t.cpu() for name, t in policy.tensors()}
    return loading.fill(loading.skeleton(policy.model.config), tensors, like=policy.model), {}


def help_to_gather(policy: Learner, adapters: Adapters | None) -> None:
    """Takes part in :func:`gather_for_export` of rank 0, and keeps nothing."""
    # Gathering is collective: all ranks make the same calls in the same order as rank 0.
    for _ in policy.tensors():
        pass
    for tensor in adapters.tensors().values() if adapters is not None else ():
        full(tensor)


def headline(program: PolicyProgram) -> str:
    """One line on objective, model, device, task and size of the run."""
    c = program.config
    size = f"{short(parameter_count(program.model))} parameters"
    if program.adapters is not None:
        size += f", {short(sum(p.numel() for p in program.model.parameters() if p.requires_grad))} of adapters trained"
    device = program.plan.device if program.plan.device != "cpu" else f"{torch.get_num_threads()} CPU threads"
    step = (
        f"{c.sft.batch} {'pairs' if c.prefers else 'rows'}"
        if c.demonstrates
        else f"{c.rollout.prompts} x {c.rollout.completions}"
    )
    return (
        f"{short_name(c.objective.preset)}: {c.model} ({size}, {c.learner.dtype}) on {device}; {c.task}, {c.steps} "
        f"steps of {step}{_without_kernels(program)}"
    )


def _without_kernels(program: PolicyProgram) -> str:
    """Says why a run takes the plain path although a backend was requested; empty if it does not."""
    backend = backends.of(program.config, program.plan.device)
    missing = "" if backend is None or program.config.kernels == "plain" else backend.missing()
    return f"; on the plain path of PyTorch, which is slower, because {missing}" if missing else ""


def show_result(program: PolicyProgram) -> None:
    """Shows the evaluations before and after training."""
    before, after = program.state.before or {}, program.state.last_eval or {}
    if program.config.demonstrates:
        program.display.losses(before, after)
    else:
        program.display.before_after(before, after)


def short(count: int) -> str:
    """
    >>> short(134515008), short(1234), short(7), short(999_950)
    ('135 M', '1.23 k', '7', '1 M')
    """
    # From what rounds up to a unit on, which .3g would write as 1e+03 of the unit below.
    units = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{count / u:.3g} {name}" for u, name in units if count >= max(1e3, 0.9995 * u)), str(count))


def _measured(s: PolicyState, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What evaluations measured, by accuracy or by loss."""
    if isinstance(s, SftState):
        return {
            "n_eval": after["rows"], "loss_before": before["loss"], "loss_after": after["loss"],
            "best": {"step": s.best_step, "loss": s.best_loss},
        }  # fmt: skip
    return {
        "n_eval": after["n"], "accuracy_before": before["accuracy"], "accuracy_after": after["accuracy"],
        "best": {"step": s.best_step, "accuracy": s.best_accuracy},
    }  # fmt: skip


def summarize(program: PolicyProgram) -> dict[str, Any]:
    """The content of summary.json."""
    c, s = program.config, program.state
    assert s.before is not None
    assert s.last_eval is not None
    return {
        "task": c.task, "model": c.model, "objective": short_name(c.objective.preset), "seed": c.seed, "steps": s.step,
        "position": program.rollouts.position, "seconds": s.seconds,
        "tokens_per_second": s.tokens / max(s.seconds, 1e-9), "peak_memory_bytes": program.memory.peaks.most,
        **_measured(s, s.before, s.last_eval),
        "before": s.before, "after": s.last_eval,
        "warnings": [asdict(finding) for finding in program.health.found],
        "notes": list(program.plan.notes), "versions": versions(),
        "device": program.plan.device,
        "arithmetic": {**arithmetic(program.device, program.backend), **program.team.exchange},
    }  # fmt: skip
