"""The plain runner: the model's own forward pass and autograd.

Two things are done in a cheaper way where the first samples show that it gives the same numbers, each by itself:

shared  a group's prompt is computed once (:func:`.packing.pack_shared`), instead of once per completion
fused   the head is computed chunk by chunk (:mod:`.fused_head`), instead of making logits for all tokens

The layers can be run by something faster, if that is asked for: :mod:`.compiled`, :mod:`.liger`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ..models.lora import in_float32
from ..models.verified import Verified, say
from ..types import TrainingSample
from . import attention, recompute
from .accelerator import LayerAccelerator
from .fused_head import FusedHead
from .head import LossCallback, token_logprobs, token_logprobs_and_entropies
from .packing import Pack, check_samples, pack_plain, pack_shared
from .runner import ExecutionPath, ModelRunner, RunnerSettings

TOLERANCE = 1e-3
"""Largest difference in nats between two ways, both computed in float32, that counts as rounding."""

Products = Callable[[PreTrainedModel], AbstractContextManager[None]]
"""Lets the linear layers of a model compute, forward and backward, by other code inside the block."""


class AutogradRunner:
    """Runs samples through a model's own ``forward``. Implements :class:`.runner.ModelRunner`.

    A backend may give other code for parts of it: ``head``, a kind of :class:`.FusedHead`; ``products``, for the
    model's linear layers in float32; ``release``, which is called when the weights are not needed until the next step.
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
        self._head_kind, self._products, self._release = head, products, release
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._head = head_of(model, self.settings, head) if self.settings.fused else None
        self._accelerator = self.settings.accelerator
        self._unshared = attention.unsupported(model) if self.settings.share_prompts else None
        self._shares = self.settings.share_prompts and self._unshared is None

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
        shared = self._shares and not self._beyond_window(samples, chosen)
        return (pack_shared if shared else pack_plain)(samples, budget=self.settings.budget, among=chosen)

    @torch.no_grad()
    def logprobs_of(self, pack: Pack) -> Float[Tensor, "n"]:
        rows, tokens = self._tensor(pack.read_rows), self._tensor(pack.targets)
        with self.running(pack) as out:
            if self._head is None:
                return token_logprobs(out, rows=rows, tokens=tokens, temperature=self.settings.temperature)
            with self._head.working() as head:
                return head.values(out, rows=rows, tokens=tokens)[0]

    def accumulate(
        self, pack: Pack, rule: LossCallback, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        given = {"rows": self._tensor(pack.read_rows), "tokens": self._tensor(pack.targets)}
        again = self.settings.gradient_checkpointing and self._accelerator is None
        with recompute.recomputing(self.model) if again else nullcontext(), self.running(pack) as out:
            if self._head is None:
                self._through_logits(out, rule, given, entropies=entropies)
                return
            with self._head.working() as head:
                gradient = head.accumulate(out.detach(), rule, **given, entropies=entropies, lengths=lengths)
            if out.requires_grad:
                out.backward(gradient.to(out.dtype))

    def _through_logits(self, logits: Tensor, rule: LossCallback, given: dict[str, Tensor], *, entropies: bool) -> None:
        """The backward pass where the logits of all tokens were made."""
        temperature = self.settings.temperature
        if entropies:
            logprobs, entropy = token_logprobs_and_entropies(logits, **given, temperature=temperature)
        else:
            logprobs, entropy = token_logprobs(logits, **given, temperature=temperature), None
        by_logprob, by_entropy = rule(
            slice(0, len(logprobs)), logprobs.detach(), None if entropy is None else entropy.detach()
        )
        loss = (by_logprob * logprobs).sum()
        if by_entropy is not None and entropy is not None:
            loss = loss + (by_entropy * entropy).sum()
        loss.backward()

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
        """The model's own forward: logits (K, V) at the positions of ``pack.read_at``, or with a fused head what goes
        into it, (K, H). A backward pass belongs inside the block."""
        with ExitStack() as stack:
            if pack.mask is None:
                plan = attention.plan(pack.segments, device=self.device)
                stack.enter_context(attention.shared_prefix(self.model, plan))
            if self.settings.autocast is None:
                stack.enter_context(in_float32(self.model))
                if self._products is not None:
                    stack.enter_context(self._products(self.model))
            if self._accelerator is not None:
                again = self.settings.gradient_checkpointing
                stack.enter_context(self._accelerator.layers(self.model, again=again))
            yield self._run(pack)

    def _run(self, pack: Pack) -> Tensor:
        if pack.mask is None:
            # transformers hands a 4-D mask through as it is; this one is a token of "no mask needed", never read.
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

    def _beyond_window(self, samples: Sequence[TrainingSample], chosen: Sequence[int]) -> bool:
        """Whether a sequence is longer than a sliding window of the model, which the model's own layers know nothing of
        on packed rows. A matter of these samples alone: what came before must not decide how they are run, or a resumed
        run would differ."""
        window = attention.window(self.model)
        longest = max((len(samples[i].prompt_ids) + len(samples[i].token_ids) for i in chosen), default=0)
        if window is None or longest <= window:
            return False
        self._say_unshared(f"its attention window of {window} tokens is shorter than some sequences")
        return True

    # -------------------------------------------------------------------------------------------------- verification

    def _verify(self, samples: Sequence[TrainingSample], chosen: Sequence[int]) -> None:
        """Compares what is not the model's own forward on plain rows with that; what differs is given up."""
        if self._unshared is not None:
            self._say_unshared(self._unshared)
        few = _first(samples, chosen)
        if not few or self.path == ExecutionPath():
            return
        want = by_sample(self.exact(), samples, few)
        shared = self._shares and not self._beyond_window(samples, few)
        if self._head is not None:
            alone = self._choice(
                "logits are made for all tokens at once", subject="the fused head", remedy="kernels = 'plain'",
                candidate=self._like(share_prompts=False),
            )  # fmt: skip
            if not alone.compare(lambda runner: by_sample(runner, samples, few), want, tolerance=TOLERANCE):
                self._head = None
        if shared:
            packed = self._choice(
                "prompts are computed once per completion", subject="packed rows",
                remedy="learner.share_prompts = false", candidate=self._like(fused=self._head is not None),
            )  # fmt: skip
            self._shares = packed.compare(lambda runner: by_sample(runner, samples, few), want, tolerance=TOLERANCE)
        if self._accelerator is not None:
            self._verify_accelerator(self._accelerator, samples, few)
        # One sample has nothing to share, and with NaN weights nothing is shown (the learner will say so).
        self.verified = len(few) > 1 and not bool(want.isnan().any())

    def _verify_accelerator(
        self, accelerator: LayerAccelerator, samples: Sequence[TrainingSample], few: Sequence[int]
    ) -> None:  # fmt: skip
        """Log-probs, and a gradient from the last layer to the first: it is code of others, made for this model."""
        shared = self._shares and not self._beyond_window(samples, few)
        plain = self._like(share_prompts=shared, fused=self._head is not None)
        choice = self._choice(
            "its layers run as they are", subject=accelerator.what, remedy=f"learner.{accelerator.key} = false",
            candidate=self._like(share_prompts=shared, fused=self._head is not None, accelerator=accelerator),
        )  # fmt: skip
        accelerator.trial = True
        try:
            same = choice.compare(
                lambda runner: by_sample(runner, samples, few), by_sample(plain, samples, few), tolerance=TOLERANCE
            )
            if same and (weight := self._first_trained()) is not None:
                (pack, *_) = plain.packs(samples, among=few)
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
        """The first weight of the layers that is trained."""
        weights = (p for layer in recompute.layers(self.model) for p in layer.parameters())
        return next((p for p in weights if p.requires_grad), None)

    def _choice(
        self, instead: str, *, subject: str, remedy: str, candidate: AutogradRunner
    ) -> Verified[AutogradRunner]:
        """The candidate for a part of this runner."""
        return Verified(
            candidate, self, instead=f"{type(self.model).__name__}: {instead}", subject=subject, remedy=remedy,
            messages=self.messages,
        )  # fmt: skip

    def _like(self, **changes: Any) -> AutogradRunner:
        """The same parts in float32 with other settings, taken as verified."""
        plainly = {"budget": 1 << 30, "autocast": None, "gradient_checkpointing": False, "accelerator": None}
        products = self._products if self.settings.autocast is None else None
        settings = replace(self.settings, **(plainly | changes))
        made = AutogradRunner(self.model, settings, head=self._head_kind, products=products)
        made.verified = True
        return made

    def _say_unshared(self, reason: str) -> None:
        say(
            self.messages,
            f"{type(self.model).__name__}: prompts are computed once per completion, because {reason}. "
            "Set learner.share_prompts = false to do so without this warning.",
        )


def head_of(model: PreTrainedModel, settings: RunnerSettings, kind: Callable[..., FusedHead]) -> FusedHead | None:
    """The model's head, where it is one plain matrix behind the model's body; whether that is all of it, the first
    samples will show."""
    head, body = model.get_output_embeddings(), model.base_model
    if type(head) is not torch.nn.Linear or head.weight.dtype != torch.float32 or body is model:
        return None
    if head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__:
        return None
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):
        return None  # what goes straight into grad would pass them by
    cap = getattr(model.config, "final_logit_softcapping", None) or 0.0
    return kind(
        head.weight, head.bias, cap=float(cap), temperature=settings.temperature, low=settings.autocast,
    )  # fmt: skip


def with_tokens(model: PreTrainedModel, samples: Sequence[TrainingSample], among: Sequence[int] | None) -> list[int]:
    """The samples (of those ``among``) that have completion tokens. Raises ValueError where one has tokens that the
    model does not know."""
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    check_samples(samples, vocab_size=len(embeddings))
    return [i for i in (range(len(samples)) if among is None else among) if len(samples[i].token_ids)]


def first_samples(model: PreTrainedModel, samples: Sequence[TrainingSample], among: Sequence[int] | None) -> list[int]:
    """The first completions of two groups, the worst that packing can do to them: what is compared."""
    return _first(samples, with_tokens(model, samples, among))


def _first(samples: Sequence[TrainingSample], chosen: Sequence[int]) -> list[int]:
    groups = list(dict.fromkeys(samples[i].group for i in chosen))[:2]
    return [i for group in groups for i in [j for j in chosen if samples[j].group == group][:2]]


def by_sample(runner: ModelRunner, samples: Sequence[TrainingSample], few: Sequence[int]) -> Tensor:
    """Log-probs of the samples ``few`` in their order."""
    parts = {}
    for pack in runner.packs(samples, among=few):
        lengths = [len(samples[i].token_ids) for i in pack.samples]
        parts |= dict(zip(pack.samples, runner.logprobs_of(pack).split(lengths), strict=True))
    return torch.cat([parts[i] for i in few])


def _slope(runner: AutogradRunner, pack: Pack, weight: Tensor) -> Tensor:
    """The gradient by a weight of some function of what the model gives."""
    with torch.enable_grad(), runner.running(pack) as out:
        by_out = torch.arange(out.numel(), device=out.device).cos().view_as(out).to(out.dtype)
        return torch.autograd.grad(out, weight, by_out)[0]


def _relative(got: Tensor, want: Tensor) -> Tensor:
    """The length of the difference over that of ``want``; 0 where that is not finite."""
    length = want.norm()
    if not length.isfinite():
        return torch.zeros(())
    return (got - want).norm() / length.clamp(min=torch.finfo(length.dtype).tiny)
