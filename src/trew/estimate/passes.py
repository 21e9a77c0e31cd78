"""Runs the model's own forward and backward pass on tensors without memory, to see what it would allocate.

Layers are alike, or nearly so: what the last two of a few add gives the cost of each. The last two and not the first,
because in a very shallow model the peak may lie elsewhere, in the gradient of a large embedding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Config, LoraConfig
from ..learner import recompute
from ..learner.autograd import AutogradRunner
from ..learner.head import token_logprobs
from ..learner.packing import Pack
from ..learner.runner import ModelRunner, RunnerSettings
from ..models import backends, loading
from ..models.backend import Backend
from ..models.planning import Planning
from ..types import TrainingSample
from .sizes import Copy, Sizes, copy_of, in_passes, sizes_of_critic
from .storages import StorageCount

DEEPEST = 8
"""Layers of the deepest copy tried: enough that the layers dominate the peak, few enough to be quick."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batches of an optimizer step, and the code that will run them."""

    packs: Sequence[Pack]
    runner: ModelRunner

    @property
    def largest(self) -> Pack:
        return max(self.packs, key=lambda pack: pack.input_ids.size)


@dataclass(frozen=True, slots=True)
class BytesByDepth:
    """Bytes of a pass as a linear function of depth: ``layer`` for each layer, plus ``rest``."""

    layer: int
    rest: int


@dataclass(frozen=True, slots=True)
class Pass:
    """Memory of a forward and backward pass: until the backward pass reaches the first layer, when activations of all
    layers are there, and from there on, when most gradients are."""

    before: BytesByDepth
    after: BytesByDepth


def batch(
    config: Config, model: Any, *, prompt: int, vocabulary: int, layers: int | None = None, critic: bool = False
) -> Batch:
    """Cuts an optimizer step of longest prompts and completions as the learner would, for all ranks.

    ``layers`` is the depth of the real model where ``model`` is a shallower copy: the size of micro-batches depends on
    what all layers keep. ``critic``: as a critic would, which always runs its own forward, and has no logits.
    """
    learner, rollout = config.learner, config.rollout
    # Which ids they are does not matter: lengths alone decide memory.
    one = np.arange(completion_tokens(config, prompt)) % vocabulary
    ids = np.arange(prompt) % vocabulary
    groups = learner.minibatch_prompts or rollout.prompts
    samples = [TrainingSample(ids, one, group) for group in range(groups) for _ in range(rollout.completions)]
    settings = RunnerSettings(
        temperature=rollout.temperature, budget=learner.microbatch_tokens, share_prompts=learner.share_prompts,
        fused=critic or config.kernels == "auto", autocast=torch.bfloat16 if learner.dtype == "bfloat16" else None,
        gradient_checkpointing=learner.gradient_checkpointing, layers=layers or 0, ranks=ranks_of(config),
    )  # fmt: skip
    plain = AutogradRunner(model, settings)
    backend = None if critic else backend_of(config, model.device.type)
    found = "there is no backend" if backend is None else backend.runner(model, plain=plain)
    runner: Any = plain if isinstance(found, str) else found
    runner.verified = True  # skips the comparison with a plain pass: without numbers there is nothing to compare
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about slow settings: the run will repeat them
        return Batch(runner.packs(samples), runner)


def completion_tokens(config: Config, prompt: int) -> int:
    """The most tokens behind a prompt: episodes end where the model's positions do."""
    positions = loading.positions(config.model) if config.plays else None
    return min(config.completion_tokens, positions - prompt) if positions else config.completion_tokens


def ranks_of(config: Config) -> int:
    """The ranks that share the packs of a step; one where their number is not known yet."""
    return max(1, config.cluster.learner)


def backend_of(config: Config, device: str) -> Backend | None:
    """Returns the run's backend, without its whole-layer code for nf4."""
    # The copy has 16- or 32-bit layers in place of nf4 ones: the backend would accept the copy, but not the model.
    return backends.of(replace(config, kernels="plain") if config.lora.base == "nf4" else config, device)


def training(config: Config, s: Sizes, *, prompt: int, device: str) -> Pass:
    """Bytes of the largest micro-batch's forward and backward pass, besides weights.

    Includes the head and its logits only where they are not computed in chunks.
    """

    def peaks(copy: Copy) -> tuple[int, int]:
        with copy.mode:
            found = batch(config, copy.model, prompt=prompt, vocabulary=s.vocabulary)
            several, head = len(found.packs) > 1, copy.model.get_output_embeddings().weight
            for p in copy.model.parameters():
                # Gradients that are there before autograd's are not counted: those of earlier micro-batches, and the
                # head's, which is made chunk by chunk before. What ranks keep of theirs is counted with the ranks.
                there = p.requires_grad and (several or (found.runner.path.fused and p is head))
                p.grad = torch.zeros_like(p) if there else None
            return training_peaks(found)

    return Pass(*_lines(peaks, config, device=device))


@dataclass(frozen=True, slots=True)
class CriticLoad:
    """A critic: its weights, its size in passes of the policy, and the bytes of its largest micro-batch's forward and
    backward pass besides weights and gradients, of them those that layers keep."""

    weights: int
    passes: float
    activations: int
    layered: int


def critic(config: Config, s: Sizes, *, prompt: int, device: str) -> CriticLoad:
    """Measures the critic of a policy of sizes ``s``. Its model's own head gives way to one with a single output."""
    own = sizes_of_critic(config)
    config = replace(config, model=config.critic.model or config.model, lora=LoraConfig())
    weights = own.weights - (0 if own.tied else own.head) + own.hidden
    counts = []

    def peaks(copy: Copy) -> tuple[int, int]:
        with copy.mode:
            found = batch(config, copy.model, prompt=prompt, vocabulary=own.vocabulary, critic=True)
            counts.append(len(found.packs))
            for p in copy.model.parameters():
                p.grad = torch.zeros_like(p) if len(found.packs) > 1 else None
            return training_peaks(found)

    before, after = _lines(peaks, config, device=device)
    largest = max(line.layer * own.layers + line.rest for line in (before, after))
    # In a single micro-batch autograd makes the gradients, which were counted with the rest.
    made = 4 * weights if max(counts) == 1 else 0
    return CriticLoad(weights, in_passes(own, s), max(0, largest - made), before.layer * own.layers)


def training_peaks(batch: Batch) -> tuple[int, int]:
    """Peak bytes of the largest micro-batch's pass, besides what exists already: until the backward pass reaches the
    first layer, and from there on."""
    runner, pack, before = batch.runner, batch.largest, []
    assert isinstance(runner, AutogradRunner)

    # Called by autograd when the gradient of the first layer's output is there: the peak so far becomes the first
    # figure, and counting goes on for the second.
    def reached(gradient: Tensor) -> None:
        before.append(storages.peak)
        storages.peak = storages.live

    def watch(layer: nn.Module, given: Any, out: Any) -> None:
        # A layer returns its hidden states, or a tuple that begins with them.
        hidden = out if isinstance(out, Tensor) else out[0]
        if hidden.requires_grad:
            hidden.register_hook(reached)

    settings, layers = runner.settings, recompute.layers(runner.model)
    again = recompute.recomputing(runner.model) if settings.gradient_checkpointing else nullcontext()
    # The handle of a hook removes it at the end of the block.
    watched = layers[0].register_forward_hook(watch) if layers else nullcontext()
    with StorageCount() as storages, again, watched, runner.running(pack) as out:
        # A fused runner returns hidden states: the head works chunk by chunk outside, and :mod:`.memory` counts it.
        if runner.path.fused:
            out.backward(torch.zeros_like(out))
        else:
            rows, tokens = (torch.as_tensor(x, device=out.device) for x in (pack.read_rows, pack.targets))
            loss = token_logprobs(out, rows=rows, tokens=tokens).sum()
            del out  # as the learner does
            loss.backward()
    # Without a layer that was reached, one peak stands for the whole pass.
    return (before[0], storages.peak) if before else (storages.peak, 0)


def prefill(config: Config, *, prompts: int, length: int, device: str) -> BytesByDepth:
    """Bytes of computing prompts side by side, including their keys and values."""
    low = torch.bfloat16 if config.learner.dtype == "bfloat16" else None

    def peak(copy: Copy) -> tuple[int]:
        cast = torch.autocast(torch.device(device).type, dtype=low) if low is not None else nullcontext()
        with copy.mode, torch.no_grad(), cast, StorageCount() as storages:
            ids = torch.zeros((prompts, length), dtype=torch.int64, device=device)
            copy.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return (storages.peak,)

    return _lines(peak, config, device=device)[0]


@dataclass(frozen=True, slots=True)
class Static:
    """Memory of generation on a GPU: buffers (including copies of weights), and the work of prefill and step."""

    buffers: BytesByDepth
    cache: BytesByDepth  # the part of ``buffers`` that holds keys and values
    work: BytesByDepth


def static(
    config: Config, plan: Planning, *, rows: int, columns: int, prompts: int, length: int, device: str
) -> Static | None:
    """Measures generation of ``rows`` of up to ``columns`` tokens, with ``prompts`` of ``length`` tokens prefilled
    together. None where the decoder keeps nothing between calls."""
    dtype = torch.bfloat16 if config.learner.dtype == "bfloat16" else torch.float32

    def made(copy: Copy) -> Any:
        return plan.buffers(copy.model, rows=rows, columns=columns, dtype=dtype)

    def buffers(copy: Copy) -> int:
        with copy.mode:
            return made(copy).bytes

    def cache(copy: Copy) -> int:
        with copy.mode:
            return made(copy).cache.nbytes

    def work(copy: Copy) -> int:
        with copy.mode, torch.no_grad(), StorageCount() as storages:
            model = made(copy)
            # Two rounds: the first also creates what stays between calls; only the second is the work of a step.
            for _ in range(2):
                storages.peak = before = storages.live
                piece = max(plan.prefill_tokens // prompts, 1)
                model.prefill([[0] * length] * prompts, range(prompts), piece=piece)
                model.compute(model.slots, model.columns)
            return storages.peak - before

    one = copy_of(config, device=device, layers=1)
    with one.mode:
        if made(one) is None:
            return None
    return Static(*_lines(lambda copy: (buffers(copy), cache(copy), work(copy)), config, device=device))


def _lines(peaks: Callable[[Copy], Sequence[int]], config: Config, *, device: str) -> list[BytesByDepth]:
    more = copy_of(config, device=device, layers=DEEPEST)
    few = copy_of(config, device=device, layers=max(more.layers - 2, 1))
    return [
        _line(low, high, few=few.layers, more=more.layers) for low, high in zip(peaks(few), peaks(more), strict=True)
    ]


def _line(low: int, high: int, *, few: int, more: int) -> BytesByDepth:
    # A one-layer model has no second depth to compare with: all of it counts as rest.
    layer = (high - low) // max(more - few, 1)
    return BytesByDepth(layer, low - layer * few) if more > few else BytesByDepth(0, low)
