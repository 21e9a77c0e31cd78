"""The plain runner: the model's own forward pass and autograd.

Two cheaper ways are used, each only where the first samples show that it gives the same numbers:

shared  a group's prompt is computed once (:func:`.packing.pack_shared`), instead of once per completion
fused   the head is computed chunk by chunk (:mod:`.fused_head`), instead of making logits for all tokens

On request, an accelerator runs the layers: :mod:`.compiled`, :mod:`.liger`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import ModelError
from ..models.decodable import undecodable
from ..models.precision import in_float32
from ..models.verified import Verified, largest_difference, say
from ..types import TrainingSample
from . import attention, recompute
from .accelerator import LayerAccelerator
from .fused_head import FusedHead
from .head import (
    Beside,
    LossCallback,
    token_logprobs,
    token_logprobs_and_entropies,
    token_logprobs_and_score_norms,
)
from .packing import Pack, check_samples, pack_plain, pack_shared
from .path import ExecutionPath
from .runner import ModelRunner, RunnerSettings
from .token_values import TokenValues

TOLERANCE = 1e-3
"""Largest difference in nats between two ways, both computed in float32, that still counts as rounding."""

COMPARED = 512
"""Tokens of a prompt, and of a completion, with which two ways are compared."""

Products = Callable[[PreTrainedModel], AbstractContextManager[None]]
"""Replaces the code of a model's linear layers, forward and backward, inside the block."""


class AutogradRunner(TokenValues):
    """Runs samples through a model's own ``forward``. Implements :class:`.runner.ModelRunner`.

    A backend may replace parts of it: ``head``, a kind of :class:`.FusedHead`; ``products``, for the model's linear
    layers in float32; ``release``, which is called when the weights are not needed until the next step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: RunnerSettings | None = None,
        *,
        head: Callable[..., FusedHead] = FusedHead,
        products: Products | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.settings = model, settings or RunnerSettings()
        self.messages: list[str] = []
        self.verified = False
        # Whether layers that keep a state read the padding; known after the first samples.
        self._padding_open = undecodable(type(model), model.config) is not None
        self._packing_open = False  # verified but for packed rows, since the first samples were longer than a window
        self._head_kind, self._products, self._release = head, products, release
        # Arguments are passed only where the signature names them: **kwargs may swallow others unused.
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._head = head_of(model, self.settings, head) if self.settings.fused else None
        self._accelerator = self.settings.accelerator
        self._unshared = attention.unsupported(model) if self.settings.share_prompts else None
        self._shares = self.settings.share_prompts and self._unshared is None
        self._flash = self.settings.flash

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def path(self) -> ExecutionPath:
        key = self._accelerator.key if self._accelerator is not None else ""
        return ExecutionPath(shared=self._shares, fused=self._head is not None, accelerator=key)

    def packs(self, samples: Sequence[TrainingSample], *, among: Sequence[int] | None = None) -> list[Pack]:
        chosen = with_tokens(self.model, samples, among)
        if not self.verified:
            self._verify(samples, chosen)
        shared = self._shares and not self._beyond_window([samples[i] for i in chosen])
        if shared and self._packing_open and (few := _first(samples, chosen)):
            want = by_sample(self.exact(), few)
            self._verify_packing(few, want)
            self._packing_open, shared = not _decide(few, want), self._shares
        pack = pack_shared if shared else pack_plain
        return pack(samples, budget=self.settings.budget, among=chosen, ranks=self.settings.ranks)

    @torch.no_grad()
    def _values(self, pack: Pack, *, beside: Beside | None = None) -> tuple[Tensor, Tensor | None]:
        given = {"rows": self._tensor(pack.read_rows), "tokens": self._tensor(pack.targets)}
        with self.running(pack) as out:
            if self._head is not None:
                with self._head.working() as head:
                    return head.values(out, **given, beside=beside)
            temperature = self.settings.temperature
            if beside == "entropies":
                return token_logprobs_and_entropies(out, **given, temperature=temperature)
            if beside == "score_norms":
                return token_logprobs_and_score_norms(out, **given, temperature=temperature)
            return token_logprobs(out, **given, temperature=temperature), None

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        # The block stays open for the backward pass: attention, products and accelerators are looked up again there
        # where layers recompute.
        given = {"rows": self._tensor(pack.read_rows), "tokens": self._tensor(pack.targets)}
        with self._recomputing(), self.running(pack) as out:
            if self._head is None:
                loss = self._loss_of_logits(out, rule, given, entropies=entropies)
                del out  # autograd frees the logits once the head's gradient is computed
                loss.backward()
                return
            # The head does its own backward pass chunk by chunk, beside its forward; autograd sees only the layers and
            # starts from the gradient by the hidden states.
            with self._head.working() as head:
                gradient = head.accumulate(out.detach(), rule, **given, entropies=entropies, lengths=lengths)
            if out.requires_grad:  # not where only the head is trained
                out.backward(gradient.to(out.dtype))

    def _recomputing(self) -> AbstractContextManager[None]:
        """Lets layers recompute their activations, unless an accelerator does so itself."""
        again = self.settings.gradient_checkpointing and self._accelerator is None
        return recompute.recomputing(self.model) if again else nullcontext()

    def _loss_of_logits(
        self, logits: Tensor, rule: LossCallback, given: dict[str, Tensor], *, entropies: bool
    ) -> Tensor:
        """A function of the logits of all tokens that has the loss's gradient."""
        temperature = self.settings.temperature
        if entropies:
            logprobs, entropy = token_logprobs_and_entropies(logits, **given, temperature=temperature)
        else:
            logprobs, entropy = token_logprobs(logits, **given, temperature=temperature), None
        by_logprob, by_entropy = rule(
            slice(0, len(logprobs)), logprobs.detach(), None if entropy is None else entropy.detach()
        )
        # Linear in log-probs and entropies, with the derivatives as constants: the same gradient as the real loss, and
        # autograd never sees the objective.
        loss = (by_logprob * logprobs).sum()
        if by_entropy is not None and entropy is not None:
            loss = loss + (by_entropy * entropy).sum()
        return loss

    def idle(self, *, gradient: bool) -> None:
        pass

    def sees_whole(self, lengths: Sequence[int]) -> bool:
        return self._head is None or self._head.holds(lengths)

    def release(self) -> None:
        self._release()

    def exact(self) -> AutogradRunner:
        """The model's own forward in float32 on padded rows, with logits for all tokens; one sample at a time, as these
        logits may be more memory than the whole step takes."""
        return self._like(share_prompts=False, fused=False, budget=1)

    # ---------------------------------------------------------------------------------------------- the forward pass

    @contextmanager
    def running(self, pack: Pack) -> Iterator[Tensor]:
        """The model's own forward: logits (K, V) at the positions of ``pack.read_at``, or with a fused head its input,
        (K, H). A backward pass belongs inside the block."""
        with self._prepared(pack):
            yield self._run(pack)

    @contextmanager
    def _prepared(self, pack: Pack) -> Iterator[None]:
        """Sets the model up for a pack: its attention, products and accelerator."""
        with ExitStack() as stack:
            if pack.mask is None:
                plan = attention.Plan(pack.segments, self.device, flash=self._flash)
                stack.enter_context(attention.shared_prefix(self.model, plan))
            if self.settings.autocast is None:
                stack.enter_context(in_float32(self.model))
                if self._products is not None:
                    stack.enter_context(self._products(self.model))
            if self._accelerator is not None:
                again = self.settings.gradient_checkpointing
                stack.enter_context(self._accelerator.layers(self.model, again=again))
            yield

    def _run(self, pack: Pack) -> Tensor:
        if pack.mask is None:
            # transformers passes a 4-D mask through as it is. This one is a placeholder that attend() never reads; with
            # None, transformers would build a mask itself.
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        else:
            mask = self._tensor(pack.mask).long()
        read_at = self._tensor(pack.read_at)
        inputs = {
            "attention_mask": mask,
            "position_ids": self._tensor(pack.position_ids),
            "logits_to_keep": read_at,
            "use_cache": False,
        }
        # Older architectures lack position_ids or logits_to_keep; unsupported() has kept those off packed rows.
        inputs = {name: value for name, value in inputs.items() if name in self._accepts}
        low = self.settings.autocast
        with torch.autocast(self.device.type, dtype=low) if low else nullcontext():
            if self._head is not None:
                inputs.pop("logits_to_keep", None)
                out = self.model.base_model(input_ids=self._tensor(pack.input_ids), **inputs)
                return out.last_hidden_state[:, read_at].flatten(0, 1)
            logits = self.model(input_ids=self._tensor(pack.input_ids), **inputs).logits
        if "logits_to_keep" not in self._accepts:
            logits = logits[:, read_at]
        return logits.flatten(0, 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=self.device)

    def _beyond_window(self, samples: Sequence[TrainingSample]) -> bool:
        """Whether a sequence is longer than a sliding window of the model: attention over packed rows ignores windows.

        Decided from these samples alone: if earlier ones had a say, a resumed run would differ."""
        window = attention.window(self.model)
        longest = max((len(sample.prompt_ids) + len(sample.token_ids) for sample in samples), default=0)
        if window is None or longest <= window:
            return False
        self._say_unshared(f"its attention window of {window} tokens is shorter than some sequences")
        return True

    # -------------------------------------------------------------------------------------------------- verification

    def _verify(self, samples: Sequence[TrainingSample], chosen: Sequence[int]) -> None:
        """Compares each shortcut with the model's own forward on plain rows, and drops those that differ."""
        if self._unshared is not None:
            self._say_unshared(self._unshared)
        few = _first(samples, chosen)
        if few and self._padding_open:
            self._refuse_padding(few[0])
        if not few or self.path == ExecutionPath():
            return
        # One shortcut at a time, each on top of those that passed, so that a mismatch names its cause.
        want = by_sample(self.exact(), few)
        shared = self._shares and not self._beyond_window(few)
        if self._head is not None:
            alone = self._choice(
                "logits are made for all tokens at once", subject="the fused head", remedy="kernels = 'plain'",
                candidate=self._like(share_prompts=False),
            )  # fmt: skip
            if not alone.compare(lambda runner: by_sample(runner, few), want, tolerance=TOLERANCE):
                self._head = None
        if shared:
            self._verify_packing(few, want)
        if self._accelerator is not None:
            self._verify_accelerator(self._accelerator, few)
        self.verified = _decide(few, want)
        self._packing_open = self._shares and not shared

    def _refuse_padding(self, sample: TrainingSample) -> None:
        """Raises ModelError where padding changes log-probs, as in recurrent layers that take no mask: plain rows, the
        way that all else is compared with, would be wrong."""
        longer = replace(sample, prompt_ids=np.concatenate([sample.prompt_ids] * 2))  # beside it, the sample is padded
        padded, alone = (
            by_sample(self._like(share_prompts=False, **size), [sample, longer]) for size in ({}, {"budget": 1})
        )
        apart = float(largest_difference(padded, alone))
        if not apart <= TOLERANCE:
            raise ModelError(
                f"{type(self.model).__name__}: its log-probs differ by {apart:.2g} nats beside a longer sequence, "
                "because its layers read the padding; use a model whose layers are all attention"
            )
        self._padding_open = False

    def _verify_packing(self, few: Sequence[TrainingSample], want: Tensor) -> None:
        packed = self._choice(
            "prompts are computed once per completion", subject="packed rows",
            remedy="learner.share_prompts = false", candidate=self._like(fused=self._head is not None),
        )  # fmt: skip
        self._shares = packed.compare(lambda runner: by_sample(runner, few), want, tolerance=TOLERANCE)
        if self._shares and self._flash and attention.flash_for(self.device, self.settings.autocast):
            self._verify_flash(few, want)

    def _verify_flash(self, few: Sequence[TrainingSample], want: Tensor) -> None:
        """Compares how far FlashAttention and blocks, both in half precision, are from float32 on average."""
        low = {"autocast": self.settings.autocast, "fused": self._head is not None}
        blocks = _mean_difference(by_sample(self._like(**low, flash=False), few), want)
        choice = self._choice(
            "attention of packed rows is computed by blocks", subject="FlashAttention",
            remedy="learner.dtype = 'float32'", candidate=self._like(**low),
        )  # fmt: skip
        self._flash = choice.compare(
            lambda runner: by_sample(runner, few), want, tolerance=2 * float(blocks) + TOLERANCE,
            distance=_mean_difference,
        )  # fmt: skip

    def _verify_accelerator(self, accelerator: LayerAccelerator, few: Sequence[TrainingSample]) -> None:
        """Compares log-probs, and the gradient that has passed through all layers: third-party kernels and generated
        code may be right in the forward pass and wrong in the backward pass."""
        shared = self._shares and not self._beyond_window(few)
        plain = self._like(share_prompts=shared, fused=self._head is not None)
        choice = self._choice(
            "its layers run as they are", subject=accelerator.what, remedy=f"learner.{accelerator.key} = false",
            candidate=self._like(share_prompts=shared, fused=self._head is not None, accelerator=accelerator),
        )  # fmt: skip
        # Its errors come as they are, so that compare() takes them for a mismatch.
        accelerator.trial = True
        try:
            same = choice.compare(lambda runner: by_sample(runner, few), by_sample(plain, few), tolerance=TOLERANCE)
            if same and (weight := self._first_trained()) is not None:
                (pack, *_) = plain.packs(few)
                want = _slope(plain, pack, weight)
                choice.compare(
                    lambda runner: _slope(runner, pack, weight), want, tolerance=TOLERANCE, what="gradients",
                    unit="times their length", distance=_relative,
                )  # fmt: skip
        finally:
            accelerator.trial = False
        if choice.refused:
            self._accelerator = None

    def _first_trained(self) -> Tensor | None:
        """The first trained weight of the layers: its gradient passes through all layers behind it."""
        weights = (p for layer in recompute.layers(self.model) for p in layer.parameters())
        return next((p for p in weights if p.requires_grad), None)

    def _choice(
        self, instead: str, *, subject: str, remedy: str, candidate: AutogradRunner
    ) -> Verified[AutogradRunner]:
        """Sets a candidate for one part of this runner against the plain way."""
        return Verified(
            candidate, self, instead=f"{type(self.model).__name__}: {instead}", subject=subject, remedy=remedy,
            messages=self.messages,
        )  # fmt: skip

    def _like(self, **changes: Any) -> AutogradRunner:
        """The same parts in float32 with other settings, taken as verified."""
        # float32, so that a difference is one of code: bfloat16 rounding would drown TOLERANCE.
        plainly: dict[str, Any] = {
            "budget": 1 << 30, "ranks": 1, "autocast": None, "gradient_checkpointing": False, "accelerator": None,
        }  # fmt: skip
        products = self._products if self.settings.autocast is None else None
        settings = replace(self.settings, **(plainly | changes))
        made = type(self)(self.model, settings, head=self._head_kind, products=products)
        made.verified = True
        return made

    def _say_unshared(self, reason: str) -> None:
        say(
            self.messages,
            f"{type(self.model).__name__}: prompts are computed once per completion, because {reason}. "
            "Set learner.share_prompts = false to do so without this warning.",
        )


def head_of(model: PreTrainedModel, settings: RunnerSettings, kind: Callable[..., FusedHead]) -> FusedHead | None:
    """The fused head for a model whose head is a plain matrix behind its body; None otherwise.

    Only what can be seen is checked here. Scaling inside ``forward`` cannot, so the first samples are compared."""
    head, body = model.get_output_embeddings(), model.base_model
    # Exactly nn.Linear with its own forward: a subclass, hook or replaced forward may compute something else.
    if type(head) is not torch.nn.Linear or head.weight.dtype != torch.float32 or body is model:
        return None
    if head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__:
        return None
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        return None  # the fused head adds to ``grad`` directly, which such hooks would miss
    cap = getattr(model.config, "final_logit_softcapping", None) or 0.0
    return kind(
        head.weight, head.bias, cap=float(cap), temperature=settings.temperature, low=settings.autocast,
    )  # fmt: skip


def with_tokens(model: PreTrainedModel, samples: Sequence[TrainingSample], among: Sequence[int] | None) -> list[int]:
    """The samples (of those ``among``) that have tokens to predict. Raises EngineError where one has token ids outside
    the model's vocabulary."""
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    check_samples(samples, vocab_size=len(embeddings))
    return [i for i in (range(len(samples)) if among is None else among) if len(samples[i].predicted)]


def first_samples(
    model: PreTrainedModel, samples: Sequence[TrainingSample], among: Sequence[int] | None
) -> list[TrainingSample]:  # fmt: skip
    """The samples to compare: the first two completions of the first two groups, so that a pack holds both a shared
    prompt and a neighbour from another group. Of longer ones, the last COMPARED tokens of the prompt and the first
    COMPARED of the completion: the reference makes logits of all tokens in float32, and attends in float32."""
    return _first(samples, with_tokens(model, samples, among))


def _first(samples: Sequence[TrainingSample], chosen: Sequence[int]) -> list[TrainingSample]:
    groups = list(dict.fromkeys(samples[i].group for i in chosen))[:2]
    few = [i for group in groups for i in [j for j in chosen if samples[j].group == group][:2]]
    return [_shortened(samples[i]) for i in few]


def _decide(few: Sequence[TrainingSample], want: Tensor) -> bool:
    """Whether a comparison on these samples decides. One sample has no prompt to share, and NaN weights match anything:
    the next samples decide then. The learner reports NaN itself."""
    return len(few) > 1 and not bool(want.isnan().any())


def _shortened(sample: TrainingSample) -> TrainingSample:
    count = max(COMPARED, int(sample.predicted[0]) + 1)  # a token that is predicted stays
    return replace(sample.first(count), prompt_ids=sample.prompt_ids[-COMPARED:])


def by_sample(runner: ModelRunner, samples: Sequence[TrainingSample]) -> Tensor:
    """Log-probs of the samples, concatenated in their order, whatever packs they are in."""
    parts = {}
    for pack in runner.packs(samples):
        lengths = [len(samples[i].predicted) for i in pack.samples]
        parts |= dict(zip(pack.samples, runner.logprobs_of(pack).split(lengths), strict=True))
    return torch.cat([parts[i] for i in range(len(samples))])


def _mean_difference(got: Tensor, want: Tensor) -> Tensor:
    return torch.where(want.isfinite(), got - want, 0.0).abs().mean()


def _slope(runner: AutogradRunner, pack: Pack, weight: Tensor) -> Tensor:
    """The gradient by ``weight`` of an arbitrary linear function of the model's output."""
    # cos(0), cos(1), ...: fixed without touching a random generator, and of mixed signs. A constant would be a poor
    # probe, since errors of opposite signs would cancel.
    with torch.enable_grad(), runner.running(pack) as out:
        by_out = torch.arange(out.numel(), device=out.device).cos().view_as(out).to(out.dtype)
        return torch.autograd.grad(out, weight, by_out)[0]


def _relative(got: Tensor, want: Tensor) -> Tensor:
    """The norm of the difference divided by the norm of ``want``; 0 where the latter is not finite."""
    length = want.norm()
    if not length.isfinite():
        return torch.zeros(())
    return (got - want).norm() / length.clamp(min=torch.finfo(length.dtype).tiny)
