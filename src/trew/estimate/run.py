"""Estimates a run: which code does the work, how large the work is, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config import Config, DataConfig, RolloutConfig, SftConfig
from ..learner.reference import in_bfloat16, teacher_in_bfloat16
from ..models import backends, loading
from ..models.files import stored_types
from ..models.lora import import_libraries
from ..models.planning import Planning
from ..objective import Objective
from ..rollout.torch_engine.plain import PREFILL_TOKENS
from ..utils.memory import free_bytes, used_bytes
from . import passes, times
from .memory import Load, Memory, memory
from .sizes import Sizes, copy_of, in_passes, sizes_of, sizes_of_teacher

LIBRARIES = 64 << 20
"""Bytes that a run's process holds beyond this one's: rollouts, reports, library buffers."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine before the run starts: bytes that the process holds, and the total it can have."""

    device: str
    process: int
    free: int | None

    @classmethod
    def of(cls, device: str, *, adapters: bool = False) -> Machine:
        if adapters:
            import_libraries()
        # ``free`` excludes what this process holds, which on a CPU is part of the estimate: it is added back. A GPU's
        # memory holds nothing of the process yet.
        own, free = 0 if device.startswith("cuda") else used_bytes(), free_bytes(device)
        return cls(device, own + LIBRARIES if own else 0, None if free is None else free + own)


@dataclass(frozen=True)
class Estimate:
    """What a run needs for prompts of up to ``prompt`` tokens, ``held_out`` of which it evaluates on. ``seconds`` are
    rough, per phase of one step."""

    config: Config
    machine: Machine
    objective: Objective
    prompt: int
    held_out: int
    sizes: Sizes
    load: Load
    memory: Memory
    rates: times.Rates
    seconds: dict[str, float]

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits; None if the available memory is unknown."""
        return None if self.machine.free is None else self.memory.peak <= self.machine.free


def estimate(
    config: Config, *, machine: Machine, objective: Objective, prompt: int, held_out: int,
    rates: times.Rates | None = None,
) -> Estimate:  # fmt: skip
    """Estimates the worst case: all prompts of ``prompt`` tokens, all completions as long as
    they may be; of demonstrations, all rows of ``prompt`` tokens.

    ``held_out``: the number of prompts of an evaluation, which may decode more at once than a step; 0 if there is none.
    ``rates`` reuses another estimate's measurement on the same machine; without it, rates are measured.
    """
    # Demonstrations are learned like a run's completions; only the parts of training apply.
    if config.demonstrates:
        like, one = of_rows(config, prompt)
        found = estimate(like, machine=machine, objective=objective, prompt=one, held_out=0, rates=rates)
        parts = {phase: part for phase, part in found.memory.parts.items() if phase == "training"}
        seconds = {phase: found.seconds[phase] for phase in ("log-probs", "training") if phase in found.seconds}
        return replace(found, config=config, prompt=prompt, memory=replace(found.memory, parts=parts), seconds=seconds)
    sizes = sizes_of(config)
    load = load_of(config, sizes, objective, machine, prompt=prompt, held_out=held_out)
    if rates is None:
        rates = times.rates(sizes, config, rows=load.rows, tokens=load.tokens, device=machine.device)
    # Forward passes alone: the reference's, a teacher's by its size, the policy's own.
    passes_without = int("ref_logprobs" in objective.needs) + in_passes(sizes_of_teacher(config), sizes)
    passes_without += times.policy_passes(config, objective)
    work = times.operations(sizes, config, load, log_prob_passes=passes_without)
    if config.rollout.replay:  # only evaluations generate
        work = {phase: count for phase, count in work.items() if phase in ("log-probs", "training")}
    return Estimate(
        config, machine, objective, prompt, held_out, sizes, load, memory(sizes, config, load), rates,
        times.seconds(work, rates, load),
    )  # fmt: skip


def of_rows(config: Config, longest: int) -> tuple[Config, int]:
    """A run that learns as much as demonstrations of ``longest`` tokens make, from prompts of one token; and that."""
    answers = 2 if config.prefers else 1
    rollout = RolloutConfig(prompts=config.sft.batch, completions=answers, max_tokens=max(longest - 1, 1), batch=1)
    return replace(config, data=DataConfig(), sft=SftConfig(), rollout=rollout), 1


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What one rank samples in a step or an evaluation: ``sequences`` of up to ``completion`` tokens, in groups of
    ``group``; ``rows`` of them are decoded at once."""

    sequences: int
    group: int
    completion: int
    rows: int

    @classmethod
    def of(cls, config: Config, *, prompts: int, group: int, completion: int) -> _Sampled:
        # Dealt out over all ranks, prompt by prompt.
        sequences = -(-prompts // passes.ranks_of(config)) * group
        return cls(sequences, group, completion, min(config.rollout.batch, sequences))

    @property
    def prompts(self) -> int:
        """Prompts of the rows, not rows: a group's prompt is computed once and shared by its completions."""
        return -(-self.rows // self.group)

    def exceeds(self, other: _Sampled) -> bool:
        """Whether it may need more than ``other`` somewhere."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("rows", "prompts", "completion", "sequences"))
        return any(mine > theirs for mine, theirs in pairs)


def load_of(config: Config, s: Sizes, objective: Objective, machine: Machine, *, prompt: int, held_out: int) -> Load:
    """Determines how much is worked on at once, and by which code, by asking that code on a one-layer copy."""
    low = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
    rollout = config.rollout
    completion = passes.completion_tokens(config, prompt)
    step = _Sampled.of(config, prompts=rollout.prompts, group=rollout.completions, completion=completion)
    copy = copy_of(config, device=machine.device, layers=1)
    with copy.mode:
        batch = passes.batch(config, copy.model, prompt=prompt, vocabulary=s.vocabulary, layers=s.layers)
        backend = passes.backend_of(config, machine.device)
        plan = None if backend is None else backend.memory()
        native = plan is not None and plan.decodes(copy.model, autocast=low)
    types = frozenset(stored_types(loading.folder(config.model)))
    pack, way = batch.largest, batch.runner.path
    load = Load(
        tokens=pack.input_ids.size,
        # Columns that the head reads, times rows.
        reads=len(pack.read_at) * len(pack.input_ids),
        # Of one rank: the packs are dealt out over all of them.
        passes=-(-len(batch.packs) // passes.ranks_of(config)),
        prompt=prompt,
        shares=way.shared,
        fused=way.fused,
        packed=plan is not None
        and plan.product(depth=s.hidden, rows=step.rows, dtype=low or torch.float32) is not None,
        reference="ref_logprobs" in objective.needs,
        step_tokens=step_groups(config) * rollout.completions * completion if objective.sees_step else 0,
        critic=passes.critic(config, s, prompt=prompt, device=machine.device) if "values" in objective.needs else None,
        rounded=in_bfloat16(config, stored=types, backend=backends.of(config, machine.device)),
        teacher=teacher_bytes(config, machine.device),
        heap=machine.device == "cpu",
        native_decode=native,
        # Whole layers by the kernels: formulas know their needs, nothing is measured.
        body=None if way.layers else passes.training(config, s, prompt=prompt, device=machine.device),
        plan=plan,
        free=machine.free,
        stored=stored_bytes(config),
        types=types,
        process=machine.process,
        **_decoded(config, step, plan if native else None, prompt=prompt, device=machine.device),
    )
    evaluated = _evaluated(config, prompt, held_out)
    if not evaluated.exceeds(step):
        return load
    decoded = _decoded(config, evaluated, plan if native else None, prompt=prompt, device=machine.device)
    return replace(load, evaluation=replace(load, **decoded))


def _evaluated(config: Config, prompt: int, held_out: int) -> _Sampled:
    like = replace(
        config, rollout=replace(config.rollout, max_tokens=config.eval.max_tokens or config.rollout.max_tokens)
    )
    completion = passes.completion_tokens(like, prompt)
    return _Sampled.of(config, prompts=held_out, group=config.eval.samples, completion=completion)


def _decoded(config: Config, what: _Sampled, plan: Planning | None, *, prompt: int, device: str) -> dict[str, Any]:
    """What :class:`Load` says of sampling; ``plan``: of the backend, where that decodes."""
    side_by_side = max(1, min(what.prompts, PREFILL_TOKENS // prompt))
    prefill = static = None
    if plan is None:
        prefill = passes.prefill(config, prompts=side_by_side, length=prompt, device=device)
    else:
        static = passes.static(
            config, plan, rows=what.rows, columns=prompt + what.completion, prompts=side_by_side, length=prompt,
            device=device,
        )  # fmt: skip
    return {
        "rows": what.rows, "sequences": what.sequences, "completion": what.completion, "group": what.group,
        "prefill": prefill, "static": static,
    }  # fmt: skip


def step_groups(config: Config) -> int:
    """Prompts of an optimizer step."""
    return config.learner.minibatch_prompts or config.rollout.prompts


def teacher_bytes(config: Config, device: str) -> int:
    """4 N of the teacher; where its linear layers are in bfloat16, 4 (N - N_l) + 2 N_l. Pages of a file that are only
    there while they are read count as well: a teacher may be the largest part."""
    s = sizes_of_teacher(config)
    if s is None:
        return 0
    stored = stored_types(loading.folder(config.teacher.model))
    low = teacher_in_bfloat16(config, stored=stored, backend=backends.of(config, device))
    return 4 * s.weights - (2 * s.linear if low else 0)


def stored_bytes(config: Config) -> int:
    """Bytes of the model's weight files, where loading converts them; float32 is mapped and used as it is, so counts 0.
    0 as well where the files are not here yet."""
    folder = loading.folder(config.model)
    if folder is None or (config.lora.base == "float32" and stored_types(folder) == {"F32"}):
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
