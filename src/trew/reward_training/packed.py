"""Runs pairs through the learner's packs and kernels: on a CPU, for Llama-family models.

The texts of one prompt share a row without padding, with their common prefix stored once and equal texts stored once.
For the chosen text ``p0 p1 c0`` and the rejected ``p0 p1 r0 r1``:

    fed    p0  p1  c0  r0  r1
    read           *       *

The score is the model's head on the hidden state of a text's last token. A backend's :class:`trew.learner.body.Body`
runs forward and backward below the head; autograd handles the head and the loss, which are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..learner.autograd import TOLERANCE
from ..learner.body import Body
from ..learner.packing import Pack, pack_shared
from ..models.backend import Backend
from ..models.verified import Verified
from ..rewards.model.scorer import Scorer
from ..types import TrainingSample
from .data import Encoded
from .loss import bradley_terry
from .plain import Pairs, PlainPairs, Scores

PROOF = 2
"""The number of pairs on which the packed way is compared with the plain one before it is used."""


def best(
    scorer: Scorer, pairs: Sequence[Encoded], *, backend: Backend | None, again: bool = False
) -> tuple[Pairs, str]:
    """The fastest way to run pairs through ``scorer``, and a note if the ``backend`` cannot run them.

    Hidden states of the first ``pairs`` decide whether the backend's code is right for this model. Equal pairs and
    weights give the same choice, which a resumed training depends on. ``again``: recompute activations.
    """
    plain = PlainPairs(scorer, again)
    if backend is None or scorer.model.device.type != "cpu":
        return plain, ""
    packed = PackedPairs.of(scorer, backend, again=again)
    if isinstance(packed, str):
        return plain, f"pairs go through the model's own forward, because {packed}; kernels = 'plain' does so silently"
    choice: Verified[Pairs] = Verified(
        packed, plain, instead="pairs go through the model's own forward", subject="the kernels",
        remedy="kernels = 'plain'",
    )  # fmt: skip
    sample = pairs[:PROOF]
    choice.compare(
        lambda _: packed.exact_states(sample), packed.plain_states(sample), tolerance=TOLERANCE, what="hidden states",
        unit="of them", distance=_relative,
    )  # fmt: skip
    return choice.chosen, ""


def _relative(got: Tensor, want: Tensor) -> Tensor:
    """The largest difference relative to the largest value, over finite entries of ``want``; 0 if there are none."""
    finite = want.isfinite()
    if not finite.any():
        return torch.zeros(())
    return torch.where(finite, got - want, 0.0).abs().max() / want[finite].abs().max()


@dataclass(frozen=True, slots=True)
class PackedPairs:
    """Runs pairs by a backend, in packs of at most ``budget`` tokens, or of a single longer pair."""

    scorer: Scorer
    body: Body
    head: nn.Linear
    budget: int

    @staticmethod
    def of(scorer: Scorer, backend: Backend, *, again: bool = False) -> PackedPairs | str:
        """The packed runner for this model, or the reason why not, as words that complete "because ..."."""
        body = backend.body(scorer.model, autocast=scorer.autocast, recompute=again)
        if isinstance(body, str):
            return body
        if scorer.labels != 1:
            return f"its head gives {scorer.labels} numbers"
        return PackedPairs(scorer, body, body.parts.head, min(scorer.budget, body.pack_tokens))

    @torch.no_grad()
    def scores(self, pairs: Sequence[Encoded]) -> Scores:
        texts = self._texts(pairs)
        # (texts, H) -> (texts, 1) -> (texts,): the head has one label.
        good, bad = texts.both(self.head(self._states(texts)).squeeze(-1))
        return good.tolist(), bad.tolist()

    def accumulate(self, pairs: Sequence[Encoded], *, centre: float) -> tuple[float, Scores]:
        total = 0.0
        chosen, rejected = [0.0] * len(pairs), [0.0] * len(pairs)
        for batch in self._batches(pairs):
            texts = self._texts([pairs[i] for i in batch])
            # A budget that makes it one pack, since the loss needs both texts of each pair in one pass; _batches() has
            # limited its size.
            (pack,) = pack_shared(texts.samples, budget=sum(len(text) + 1 for text in texts.texts))
            row, at = _last_tokens(pack, texts.samples)
            at = at[torch.tensor(pack.samples).argsort()]  # from the pack's order to that of the texts
            with self.body.differentiable(row) as hidden:
                good, bad = texts.both(self.head(hidden[at]).squeeze(-1))
                loss = bradley_terry(good, rejected=bad, centre=centre).sum() / len(pairs)
                loss.backward()
            total += float(loss.detach())
            for i, c, r in zip(batch, good.tolist(), bad.tolist(), strict=True):
                chosen[i], rejected[i] = c, r
        return total, (chosen, rejected)

    @torch.no_grad()
    def exact_states(self, pairs: Sequence[Encoded]) -> Float[Tensor, "n H"]:
        """Hidden states at the last tokens of the pairs' texts, in float32. Scores are unfit for the comparison: a new
        head gives 0 for any hidden state."""
        return replace(self, body=self.body.exact())._states(self._texts(pairs))

    @torch.no_grad()
    def plain_states(self, pairs: Sequence[Encoded]) -> Float[Tensor, "n H"]:
        """The same states by the model's own forward."""
        return torch.cat([self._plain_state(text) for text in self._texts(pairs).texts])

    def _plain_state(self, text: Sequence[int]) -> Float[Tensor, "1 H"]:
        out = self.scorer.model.base_model(input_ids=torch.tensor([text]), use_cache=False)
        return out.last_hidden_state[:, -1]

    def _states(self, texts: _Texts) -> Float[Tensor, "n H"]:
        """Hidden states of the texts' last tokens."""
        # (texts, H), in the order of the texts; packs have an order of their own.
        found = torch.empty(len(texts.samples), self.head.in_features)
        for pack in pack_shared(texts.samples, budget=self.budget):
            row, at = _last_tokens(pack, texts.samples)
            found[list(pack.samples)] = self.body.states(row)[at]
        return found

    def _batches(self, pairs: Sequence[Encoded]) -> Iterator[list[int]]:
        """Yields positions of pairs that run together, with pairs of one prompt next to each other."""
        batch: list[int] = []
        size = 0
        # By prompt: texts of one prompt share its tokens only within one batch.
        for i in sorted(range(len(pairs)), key=lambda i: pairs[i].key):
            # An estimate by pair: pairs of one prompt share its tokens and equal texts, too.
            cost = len(pairs[i]) - _common([pairs[i].chosen, pairs[i].rejected])
            if batch and size + cost > self.budget:
                yield batch
                batch, size = [], 0
            batch.append(i)
            size += cost
        if batch:
            yield batch

    def _texts(self, pairs: Sequence[Encoded]) -> _Texts:
        return _Texts.of(pairs, pad=self.scorer.model.config.get_text_config().pad_token_id)


@dataclass(frozen=True, slots=True)
class _Texts:
    """The distinct texts of some pairs, up to the token at which their score is read."""

    texts: list[Sequence[int]]
    samples: list[TrainingSample]  # for the learner's packs; "prompt" is the common prefix of all texts of one key
    chosen: Int[Tensor, "n"]  # index of each pair's chosen text
    rejected: Int[Tensor, "n"]

    @staticmethod
    def of(pairs: Sequence[Encoded], *, pad: int | None) -> _Texts:
        # A text counts once for each prompt, however many pairs have it.
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        sides = [
            [known.setdefault((p.key, _read(text, pad=pad)), len(known)) for text in (p.chosen, p.rejected)]
            for p in pairs
        ]
        by_key: dict[str, list[tuple[int, ...]]] = {}
        for key, text in known:
            by_key.setdefault(key, []).append(text)
        # At least one token, even where texts have nothing in common: a sample must have a prompt. Texts that differ in
        # their first token get separate prompts, since packs share equal ones only.
        prompts = {key: max(_common(texts), 1) for key, texts in by_key.items()}
        groups = {key: group for group, key in enumerate(by_key)}
        samples = [_sample(text, prompt=prompts[key], group=groups[key]) for key, text in known]
        chosen, rejected = torch.tensor(sides).unbind(1)
        return _Texts([text for _, text in known], samples, chosen, rejected)

    def both(self, scores: Float[Tensor, "texts"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Maps the texts' scores to the chosen and rejected scores of the pairs."""
        return scores[self.chosen], scores[self.rejected]


def _read(text: Sequence[int], *, pad: int | None) -> tuple[int, ...]:
    """The text up to the token at which a sequence classifier reads: the last one that is not padding, or the first."""
    end = next((i for i in range(len(text) - 1, 0, -1) if text[i] != pad), 0)
    return tuple(text[: end + 1])


def _common(texts: Sequence[Sequence[int]]) -> int:
    """The length of the texts' common prefix.

    >>> _common([[1, 2, 3], [1, 2], [1, 2, 4]])
    2
    """
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def _sample(text: Sequence[int], *, prompt: int, group: int) -> TrainingSample:
    """A sample that feeds the whole text: packs do not feed a completion's last token, so it is appended twice."""
    ids = np.array([*text, text[-1]], dtype=np.int64)
    return TrainingSample(ids[:prompt], ids[prompt:], group)


def _last_tokens(pack: Pack, samples: Sequence[TrainingSample]) -> tuple[Pack, Int[Tensor, "n"]]:
    """The pack, read only where its samples' texts end, and for each sample the index of its position among those."""
    # What a sample predicts last is the second copy of its text's last token: it is read at the first copy.
    ends = np.cumsum([len(samples[i].token_ids) for i in pack.samples]) - 1
    # ``places`` are sorted, so that ``at`` says where each sample's end is among them.
    places, at = np.unique(pack.read_at[pack.read_rows[ends]], return_inverse=True)
    return replace(pack, read_at=places), torch.from_numpy(at)
