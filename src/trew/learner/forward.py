"""Log-probs of completion tokens under a model, and gradients: chooses a way to run it, packs, and proves the way on
real samples.

Three things are computed in a faster way where that is possible, each by itself:

native  the layers by kernels of our own, forward and backward (:mod:`.native`), instead of the model's forward
shared  a group's prompt once (:func:`.packing.pack_shared`), instead of once per completion
fused   the head chunk by chunk (:mod:`.fused_head`), instead of logits for all tokens

Where the model's own forward runs, its layers can be run by something faster, if that is asked for: :mod:`.compiled`,
:mod:`.liger`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..backends.cpu import build
from ..backends.cpu.arena import Room
from ..backends.cpu.file_backed import Mapped
from ..backends.cpu.linears import linears
from ..backends.cpu.runner import NativeBody
from ..models.lora import in_float32
from . import attention, recompute
from .fused_head import FusedHead, Rule
from .head import token_logprobs, token_logprobs_and_entropies
from .packing import Pack, Sample, check_samples, pack_plain, pack_shared

TOLERANCE = 1e-3
"""Largest difference in nats between two ways, both computed in float32, that counts as rounding."""

NATIVE_TOKENS = 1024
"""Tokens of a pack that the kernels run: more would take more memory and be no faster ..."""
NATIVE_BYTES = 32 << 20
"""... unless they keep less than this for the way back: fewer, larger packs suffer less from busy neighbours ..."""
NATIVE_PROMPTS = 3
"""... or are not so many times as long as the longest prompt, which a group that is cut computes again in each pack.
Several groups share a pack only up to half as many tokens, or twice as many bytes: not cutting one gains more."""


@dataclass(frozen=True, slots=True)
class Way:
    """How samples are run; all False is the model's own forward on padded rows."""

    native: bool = False
    shared: bool = False
    fused: bool = False
    faster: str = ""  # the key of what runs the layers of the model's own forward


@runtime_checkable
class Faster(Protocol):
    """Something else than the layers' own code. ``key``: of the configuration; ``what``: it has, in a message.
    In a ``trial`` its errors are RuntimeErrors; else ModelErrors, with what to do."""

    key: ClassVar[str]
    what: ClassVar[str]
    trial: bool

    def layers(self, model: PreTrainedModel, *, again: bool = False) -> AbstractContextManager[None]:
        """In force inside the block, which must enclose the backward pass; nothing is left of it outside. ``again``:
        layers compute their activations again in the backward pass."""
        ...

    def report(self) -> None:
        """Tells what the user may like to know after an optimizer step."""
        ...


@dataclass
class Forward:
    """A model, and how samples are run through it.

    What is possible is decided by the model's kind *and* by the first samples: their log-probs are computed in the fast
    way and by the model's own forward, one sample at a time, and if they differ, that way is not used from there on,
    with a warning; ``messages`` keeps what was said. ``kernels``, ``share_prompts``, ``faster``: whether to try at
    all.
    """

    model: PreTrainedModel
    temperature: float = 1.0
    budget: int = 4096
    share_prompts: bool = True
    autocast: torch.dtype | None = None
    linear: bool = True  # on a CPU, products by our kernels, which the layers' own need; else torch's
    kernels: bool = True
    gradient_checkpointing: bool = False
    faster: Faster | None = None
    room: Room = field(default_factory=Room)
    seldom: bool = False  # weights are read once in a step: what lies in files is given back when it has been read
    messages: list[str] = field(default_factory=list)
    _proven: bool = False

    def __post_init__(self) -> None:
        self._accepts = frozenset(inspect.signature(self.model.forward).parameters)
        self._head = self._fused_head() if self.kernels else None
        self._body: NativeBody | None = None
        if self._head is not None and self.linear:
            body = NativeBody.of(self.model, dtype=self.autocast or torch.float32,
                                 recompute=self.gradient_checkpointing)  # fmt: skip
            self._body = None if isinstance(body, str) else body
        self._mapped = self._weights_in_files() if self.seldom else None
        if self._body is not None and self.faster is not None:
            self._say(
                f"learner.{self.faster.key}: got true, which does nothing where {type(self.model).__name__} is trained "
                "by trew's own kernels. Set it to false; or, to train through the model's own forward, kernels = "
                "'plain'."
            )
        if self._body is None and self.share_prompts and (reason := attention.unsupported(self.model)):
            self._say_unshared(reason)
            self.share_prompts = False

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def proven(self) -> bool:
        """Whether the way is decided."""
        return self._proven

    @property
    def way(self) -> Way:
        """How samples are run, as far as is known."""
        return Way(native=self._body is not None, shared=self.share_prompts, fused=self._head is not None,
                   faster=self.faster.key if self.faster is not None and self._body is None else "")  # fmt: skip

    def packs(self, samples: Sequence[Sample], *, among: Sequence[int] | None = None) -> list[Pack]:
        """The forward passes that give the log-probs of all completion tokens of the samples (or those ``among``)."""
        embeddings = self.model.get_input_embeddings().weight
        assert isinstance(embeddings, Tensor)
        check_samples(samples, vocab_size=len(embeddings))
        chosen = [i for i in (range(len(samples)) if among is None else among) if len(samples[i].completion_ids)]
        if not self._proven:
            self._prove(samples, chosen)
        if self._body is not None:
            prompt = max((len(samples[i].prompt_ids) for i in chosen), default=0)
            enough = max(NATIVE_TOKENS, NATIVE_BYTES // self._body.kept_bytes, NATIVE_PROMPTS * prompt)
            budget = min(self.budget, enough)
            join = min(budget, max(NATIVE_TOKENS // 2, 2 * NATIVE_BYTES // self._body.kept_bytes))
            return pack_shared(samples, budget=budget, join=join, among=chosen, share=self.share_prompts)
        shared = self.share_prompts and not self._beyond_window(samples, chosen)
        return (pack_shared if shared else pack_plain)(samples, budget=self.budget, among=chosen)

    @torch.no_grad()
    def logprobs_of(self, pack: Pack) -> Float[Tensor, "n"]:
        """Log-probs of the pack's completion tokens at ``temperature``, without gradient."""
        rows, tokens = self._tensor(pack.read_rows), self._tensor(pack.targets)
        if self._head is None:
            with self.running(pack) as logits:
                return token_logprobs(logits, rows=rows, tokens=tokens, temperature=self.temperature)
        with self.room.held() as room:
            if self._body is not None:
                passed = None if self._mapped is None else self._mapped.give_back
                hidden, _ = self._body.forward(pack, keep=False, room=room, passed=passed)
                return self._head.values(hidden, rows=rows, tokens=tokens, room=room)[0]
            with self.running(pack) as hidden:
                return self._head.values(hidden, rows=rows, tokens=tokens, room=room)[0]

    def give_back(self) -> None:
        """Memory of weights that lie in files and are seldom read: until the next pass nobody needs them."""
        if self._mapped is not None:
            self._mapped.give_back_all()

    def _weights_in_files(self) -> Mapped:
        """By layer, as far as the kernels read them so, and behind those the rest."""
        layers = [] if self._body is None else self._body.weights()
        known = {id(p) for layer in layers for p in layer}
        return Mapped([*layers, [p for p in self.model.parameters() if id(p) not in known]])

    def accumulate(
        self, pack: Pack, rule: Rule, *, entropies: bool = False, lengths: Sequence[int] | None = None
    ) -> None:
        """Adds the gradient of a loss of the pack's completion tokens to the parameters' ``grad``.

        ``rule`` gives the loss's derivatives by log-probs and, with ``entropies``, by entropies. It may be asked for a
        few tokens at a time; ``lengths`` are then runs (sequences) that it must see whole.
        """
        given = {"rows": self._tensor(pack.read_rows), "tokens": self._tensor(pack.targets)}
        asked = {**given, "entropies": entropies, "lengths": lengths}
        if self._head is not None and self._body is not None:
            with self.room.held() as room:
                hidden, tape = self._body.forward(pack, keep=True, room=room)
                self._body.backward(tape, self._head.accumulate(hidden, rule, **asked, room=room))
            return
        again = self.gradient_checkpointing and self.faster is None
        with recompute.recomputing(self.model) if again else nullcontext(), self.running(pack) as out:
            if self._head is not None:
                with self.room.held() as room:
                    gradient = self._head.accumulate(out.detach(), rule, **asked, room=room)
                if out.requires_grad:
                    out.backward(gradient.to(out.dtype))
                return
            if entropies:
                logprobs, entropy = token_logprobs_and_entropies(out, **given, temperature=self.temperature)
            else:
                logprobs, entropy = token_logprobs(out, **given, temperature=self.temperature), None
            by_logprob, by_entropy = rule(
                slice(0, len(logprobs)), logprobs.detach(), None if entropy is None else entropy.detach()
            )
            loss = (by_logprob * logprobs).sum()
            if by_entropy is not None and entropy is not None:
                loss = loss + (by_entropy * entropy).sum()
            loss.backward()

    def sees_whole(self, lengths: Sequence[int]) -> bool:
        """Whether a rule may be asked to see sequences of these lengths whole, without much memory."""
        return self._head is None or self._head.holds(lengths)

    @contextmanager
    def running(self, pack: Pack) -> Iterator[Tensor]:
        """The model's own forward: logits (K, V) at the positions of ``pack.read_at``, or with a fused head what goes
        into it, (K, H). A backward pass belongs inside the block."""
        layout = (
            attention.shared_prefix(self.model, attention.plan(pack.segments, device=self.device))
            if pack.mask is None
            else nullcontext()
        )
        fast = linears(self.model) if self.linear and self.autocast is None else nullcontext()
        again = self.gradient_checkpointing
        faster = self.faster.layers(self.model, again=again) if self.faster is not None else nullcontext()
        with layout, fast, faster:
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
        cast = torch.autocast(self.device.type, dtype=self.autocast) if self.autocast else nullcontext()
        with cast:
            if self._head is not None:
                inputs.pop("logits_to_keep", None)
                out = self.model.base_model(input_ids=self._tensor(pack.input_ids), **inputs)
                return out.last_hidden_state[:, read_at].flatten(0, 1)
            logits = self.model(input_ids=self._tensor(pack.input_ids), **inputs).logits
        if "logits_to_keep" not in self._accepts:
            logits = logits[:, read_at]
        return logits.flatten(0, 1)

    def _fused_head(self) -> FusedHead | None:
        """The head, where it is one plain matrix behind the model's body; whether that is all, the proof will say."""
        head, body = self.model.get_output_embeddings(), self.model.base_model
        if type(head) is not nn.Linear or head.weight.dtype != torch.float32 or body is self.model:
            return None
        if head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__:
            return None
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.model.parameters()):
            return None  # what goes straight into grad would pass them by
        cap = getattr(self.model.config, "final_logit_softcapping", None) or 0.0
        compiled = self.device.type == "cpu" and not isinstance(build.library(), str)
        return FusedHead(
            head.weight, head.bias, cap=float(cap), temperature=self.temperature, low=self.autocast,
            linear=self.linear, compiled=compiled,
        )  # fmt: skip

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=self.device)

    def _beyond_window(self, samples: Sequence[Sample], chosen: Sequence[int]) -> bool:
        """Whether a sequence is longer than a sliding window of the model, which the model's own layers know nothing of
        on packed rows. A matter of these samples alone: what came before must not decide how they are run, or a resumed
        run would differ."""
        window = attention.window(self.model)
        longest = max((len(samples[i].prompt_ids) + len(samples[i].completion_ids) for i in chosen), default=0)
        if window is None or longest <= window:
            return False
        self._say_unshared(f"its attention window of {window} tokens is shorter than some sequences")
        return True

    def _prove(self, samples: Sequence[Sample], chosen: Sequence[int]) -> None:
        """Compares on the first few completions of two groups, the worst that packing can do to them; what comes out
        wrong is given up."""
        groups = list(dict.fromkeys(samples[i].group for i in chosen))[:2]
        few = [i for group in groups for i in [j for j in chosen if samples[j].group == group][:2]]
        if not few or self.way == Way():
            return
        with in_float32(self.model):
            # One at a time: logits of all their tokens may be more memory than the whole step takes.
            want = _by(replace(self._exact(), kernels=False, share_prompts=False, budget=1), samples, few)
        if self._body is not None and (wrong := self._difference(self._exact(), samples, few, want)):
            self._body = None
            self._say(
                f"{type(self.model).__name__}: trained through its own forward, because the kernels' {wrong}. Set "
                "kernels = 'plain' to do so without this warning."
            )
            if self.share_prompts and (reason := attention.unsupported(self.model)):
                self._say_unshared(reason)
                self.share_prompts = False
        if self._body is None:
            with in_float32(self.model):
                self._prove_without_kernels(samples, few, want)
        # One sample has nothing to share, and with NaN weights nothing is proven (the learner will say so).
        self._proven = len(few) > 1 and not bool(want.isnan().any())

    def _prove_without_kernels(self, samples: Sequence[Sample], few: Sequence[int], want: Tensor) -> None:
        shared = self.share_prompts and not self._beyond_window(samples, few)
        if self._head is not None:
            alone = replace(self._exact(), share_prompts=False)
            alone._body = None
            if wrong := self._difference(alone, samples, few, want):
                self._head = None
                self._say(
                    f"{type(self.model).__name__}: logits are made for all tokens at once, because without that its "
                    f"{wrong}. Set kernels = 'plain' to do so without this warning."
                )
        if shared:
            packed = replace(self._exact(), kernels=self._head is not None)
            packed._body = None
            if wrong := self._difference(packed, samples, few, want):
                self.share_prompts = False
                self._say_unshared(f"packed rows' {wrong}" if "differ" in wrong else f"packed rows {wrong}")

        if self.faster is not None:
            self._prove_faster(self.faster, samples, few)

    def _prove_faster(self, faster: Faster, samples: Sequence[Sample], few: Sequence[int]) -> None:
        """Log-probs, and a gradient from the last layer to the first: it is code of others, made for this model."""
        shared = self.share_prompts and not self._beyond_window(samples, few)
        plain = replace(self._exact(), kernels=self._head is not None, share_prompts=shared)
        plain._body = None
        quick = replace(plain, faster=faster, _proven=True)
        quick._body = None
        faster.trial = True
        try:
            wrong = self._difference(quick, samples, few, _by(plain, samples, few))
            wrong = wrong or self._slope_difference(quick, samples, few, plain)
        finally:
            faster.trial = False
        if wrong:
            self.faster = None
            self._say(
                f"{type(self.model).__name__}: its layers run as they are, because {faster.what} {wrong}. Set "
                f"learner.{faster.key} = false to do so without this warning."
            )

    def _slope_difference(self, quick: Forward, samples: Sequence[Sample], few: Sequence[int], plain: Forward) -> str:
        """What is wrong with the gradient by the first weight that is trained; empty if nothing, or none is."""
        weights = (p for layer in recompute.layers(self.model) for p in layer.parameters())
        weight = next((p for p in weights if p.requires_grad), None)
        if weight is None:
            return ""
        (pack, *_), found = plain.packs(samples, among=few), []
        try:
            for forward in (quick, plain):
                with torch.enable_grad(), forward.running(pack) as out:
                    by_out = torch.arange(out.numel(), device=out.device).cos().view_as(out).to(out.dtype)
                    found += torch.autograd.grad(out, weight, by_out)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return f"backward pass raises {_kind_and_line(error)}"
        apart, length = float((found[0] - found[1]).norm()), float(found[1].norm())
        if apart <= TOLERANCE * length or not np.isfinite(length):
            return ""
        return f"gradient differs by {apart:.2g} from the plain one, whose length is {length:.2g}"

    def _exact(self) -> Forward:
        """The same in float32, whatever autocast says, and taken as proven."""
        return Forward(
            self.model, temperature=self.temperature, budget=1 << 30, share_prompts=self.share_prompts,
            kernels=self.kernels, linear=self.linear, room=self.room, _proven=True,
        )  # fmt: skip

    def _difference(self, other: Forward, samples: Sequence[Sample], few: Sequence[int], want: Tensor) -> str:
        """What is wrong with the log-probs that ``other`` gives; empty if nothing."""
        try:
            difference = (_by(other, samples, few) - want).abs().max().item()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
            # Whatever an unknown architecture does, its own forward on plain rows remains.
            return f"raise {_kind_and_line(error)}"
        return f"log-probs differ by {difference:.2g} nats from the plain ones" if difference > TOLERANCE else ""

    def _say_unshared(self, reason: str) -> None:
        self._say(
            f"{type(self.model).__name__}: prompts are computed once per completion, because {reason}. "
            "Set learner.share_prompts = false to do so without this warning."
        )

    def _say(self, message: str) -> None:
        """Warns, once."""
        if message not in self.messages:
            self.messages.append(message)
            warnings.warn(message, stacklevel=2)


def _kind_and_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _by(forward: Forward, samples: Sequence[Sample], few: Sequence[int]) -> Tensor:
    """Log-probs of the samples ``few`` in their order."""
    parts = {}
    for pack in forward.packs(samples, among=few):
        lengths = [len(samples[i].completion_ids) for i in pack.samples]
        parts |= dict(zip(pack.samples, forward.logprobs_of(pack).split(lengths), strict=True))
    return torch.cat([parts[i] for i in few])
