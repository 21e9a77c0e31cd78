"""Log-probs of completion tokens under a model: chooses a layout, packs, runs, and proves it on real samples."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ..onednn import linears
from . import attention
from .head import entropies, token_logprobs, token_logprobs_and_entropies
from .packing import Pack, Sample, check_samples, pack_plain, pack_shared

TOLERANCE = 1e-3
"""Largest difference in nats between the two layouts, both computed in float32, that counts as rounding."""


@dataclass
class Forward:
    """A model, and how samples are run through it.

    ``share_prompts`` computes a group's prompt once (:func:`.packing.pack_shared`), where the architecture allows it.
    That is decided by its configuration *and* by the first samples: their log-probs are computed in both layouts, and
    if they differ, the plain layout is used from there on, with a warning; ``messages`` keeps what was said.
    """

    model: PreTrainedModel
    temperature: float = 1.0
    budget: int = 4096
    share_prompts: bool = True
    autocast: torch.dtype | None = None
    onednn: bool = True  # on a CPU in float32, linear layers through oneDNN: faster on many, the same products
    messages: list[str] = field(default_factory=list)
    _proven: bool = False

    def __post_init__(self) -> None:
        accepted = inspect.signature(self.model.forward).parameters
        self._accepts = frozenset(accepted)
        if self.share_prompts and (reason := attention.unsupported(self.model)):
            self._fall_back(reason)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def packs(self, samples: Sequence[Sample], *, among: Sequence[int] | None = None) -> list[Pack]:
        """The forward passes that give the log-probs of all completion tokens of the samples (or those ``among``)."""
        embeddings = self.model.get_input_embeddings().weight
        assert isinstance(embeddings, Tensor)
        check_samples(samples, vocab_size=len(embeddings))
        chosen = [i for i in (range(len(samples)) if among is None else among) if len(samples[i].completion_ids)]
        share = self.share_prompts and not self._beyond_window(samples, chosen)
        if share and not self._proven:
            self._prove(samples, chosen)
        pack = pack_shared if share and self.share_prompts else pack_plain
        return pack(samples, budget=self.budget, among=chosen)

    @contextmanager
    def running(self, pack: Pack) -> Iterator[Float[Tensor, "K V"]]:
        """The logits at the positions of ``pack.read_at``; a backward pass belongs inside the block."""
        layout = (
            attention.shared_prefix(self.model, attention.plan(pack.segments, device=self.device))
            if pack.mask is None
            else nullcontext()
        )
        fast = linears(self.model) if self.onednn and self.autocast is None else nullcontext()
        with layout, fast:
            yield self._logits(pack)

    def logprobs(self, logits: Float[Tensor, "K V"], pack: Pack) -> Float[Tensor, "n"]:
        """Log-probs of the pack's completion tokens at ``temperature``, from the logits of :meth:`running`."""
        rows, tokens = self._tensor(pack.read_rows), self._tensor(pack.targets)
        return token_logprobs(logits, rows=rows, tokens=tokens, temperature=self.temperature)

    def logprobs_and_entropies(
        self, logits: Float[Tensor, "K V"], pack: Pack
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """:meth:`logprobs`, and the entropies of the same distributions, both with a gradient."""
        rows, tokens = self._tensor(pack.read_rows), self._tensor(pack.targets)
        return token_logprobs_and_entropies(logits, rows=rows, tokens=tokens, temperature=self.temperature)

    @torch.no_grad()
    def logprobs_of(self, pack: Pack) -> Float[Tensor, "n"]:
        """Log-probs of the pack's completion tokens at ``temperature``, without gradient."""
        with self.running(pack) as logits:
            return self.logprobs(logits, pack)

    @torch.no_grad()
    def entropies(self, pack: Pack) -> Float[Tensor, "n"]:
        """Entropies at temperature 1 of the distributions that the pack's completion tokens come from."""
        with self.running(pack) as logits:
            return entropies(logits)[self._tensor(pack.read_rows)]

    def _logits(self, pack: Pack) -> Tensor:
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
            logits = self.model(input_ids=self._tensor(pack.input_ids), **inputs).logits
        if "logits_to_keep" not in self._accepts:
            logits = logits[:, read_at]
        return logits.flatten(0, 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=self.device)

    def _beyond_window(self, samples: Sequence[Sample], chosen: Sequence[int]) -> bool:
        """Whether a sequence is longer than a sliding window of the model, which packed rows know nothing of. A matter
        of these samples alone: what came before must not decide how they are run, or a resumed run would differ."""
        window = attention.window(self.model)
        longest = max((len(samples[i].prompt_ids) + len(samples[i].completion_ids) for i in chosen), default=0)
        if window is None or longest <= window:
            return False
        self._say(f"its attention window of {window} tokens is shorter than some sequences")
        return True

    def _prove(self, samples: Sequence[Sample], chosen: Sequence[int]) -> None:
        """Compares both layouts on the first few completions of two groups, the worst that packing can do to them."""
        groups = list(dict.fromkeys(samples[i].group for i in chosen))[:2]
        few = [i for group in groups for i in [j for j in chosen if samples[j].group == group][:2]]
        if not few:
            return
        try:
            difference = (self._by(pack_shared, samples, few) - self._by(pack_plain, samples, few)).abs().max().item()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
            # Whatever an unknown architecture does with packed rows, the plain layout remains.
            first_line = (str(error).splitlines() or [""])[0]
            self._fall_back(f"packed rows raise {type(error).__name__}: {first_line}")
            return
        if difference > TOLERANCE:
            self._fall_back(f"log-probs of packed rows differ by {difference:.2g} nats from the plain ones")
        # One sample has nothing to share, and with NaN weights nothing is proven (the learner will say so).
        self._proven = len(few) > 1 and difference == difference

    def _by(self, pack, samples: Sequence[Sample], few: Sequence[int]) -> Tensor:
        """Log-probs of the samples ``few`` in their order, laid out by ``pack``; in float32, whatever autocast says."""
        exact = Forward(self.model, temperature=self.temperature, share_prompts=False)
        parts = {}
        for p in pack(samples, budget=1 << 30, among=few):
            lengths = [len(samples[i].completion_ids) for i in p.samples]
            parts |= dict(zip(p.samples, exact.logprobs_of(p).split(lengths), strict=True))
        return torch.cat([parts[i] for i in few])

    def _fall_back(self, reason: str) -> None:
        self.share_prompts = False
        self._say(reason)

    def _say(self, reason: str) -> None:
        """Warns, once per reason."""
        message = (
            f"{type(self.model).__name__}: prompts are computed once per completion, because {reason}. "
            "Set learner.share_prompts = false to do so without this warning."
        )
        if message not in self.messages:
            self.messages.append(message)
            warnings.warn(message, stacklevel=2)
