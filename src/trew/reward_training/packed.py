"""Pairs by the learner's packs and kernels: on a CPU, for models of the Llama kind.

Texts of one prompt stand in one row without padding, what they begin with in common once, equal texts once. For the
chosen text ``p0 p1 c0`` and the rejected ``p0 p1 r0 r1``:

    fed    p0  p1  c0  r0  r1
    read           *       *

The score is the model's head on the hidden state of a text's last token. Forward and backward below the head are those
of a backend's :class:`trew.learner.body.Body`; the head itself and the loss are a few numbers, by autograd.
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
"""Pairs on which the packed way is compared with the plain one before it is used."""


def best(
    scorer: Scorer, pairs: Sequence[Encoded], *, backend: Backend | None, again: bool = False
) -> tuple[Pairs, str]:
    """How pairs run fastest through ``scorer``, and a note where the ``backend`` cannot run them.

    Hidden states of the first of ``pairs`` decide whether its code is right for this model: the same pairs and weights
    give the same choice, which a training that continues depends on. ``again``: activations are computed again.
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
    few = pairs[:PROOF]
    choice.compare(
        lambda _: packed.exact_states(few), packed.plain_states(few), tolerance=TOLERANCE, what="hidden states",
        unit="of them", distance=_relative,
    )  # fmt: skip
    return choice.chosen, ""


def _relative(got: Tensor, want: Tensor) -> Tensor:
    """The largest difference as a share of the largest value, where ``want`` is finite; 0 where it is so nowhere."""
    finite = want.isfinite()
    if not finite.any():
        return torch.zeros(())
    return torch.where(finite, got - want, 0.0).abs().max() / want[finite].abs().max()


@dataclass(frozen=True, slots=True)
class PackedPairs:
    """By a backend, in packs of at most ``budget`` tokens, or of one pair."""

    scorer: Scorer
    body: Body
    head: nn.Linear
    budget: int

    @staticmethod
    def of(scorer: Scorer, backend: Backend, *, again: bool = False) -> PackedPairs | str:
        """For this model, or why not, in words that complete "because ..."."""
        body = backend.body(scorer.model, autocast=scorer.autocast, recompute=again)
        if isinstance(body, str):
            return body
        if scorer.labels != 1:
            return f"its head gives {scorer.labels} numbers"
        return PackedPairs(scorer, body, body.parts.head, min(scorer.budget, body.pack_tokens))

    @torch.no_grad()
    def scores(self, pairs: Sequence[Encoded]) -> Scores:
        texts = self._texts(pairs)
        good, bad = texts.both(self.head(self._states(texts)).squeeze(-1))
        return good.tolist(), bad.tolist()

    def accumulate(self, pairs: Sequence[Encoded], *, centre: float) -> tuple[float, Scores]:
        total = 0.0
        chosen, rejected = [0.0] * len(pairs), [0.0] * len(pairs)
        for batch in self._batches(pairs):
            texts = self._texts([pairs[i] for i in batch])
            (pack,) = pack_shared(texts.samples, budget=sum(len(text) + 1 for text in texts.texts))
            row, at = _last_tokens(pack, texts.samples)
            at = at[torch.tensor(pack.samples).argsort()]  # in the order of the texts
            with self.body.differentiable(row) as hidden:
                good, bad = texts.both(self.head(hidden[at]).squeeze(-1))
                loss = bradley_terry(good, rejected=bad, centre=centre).sum() / len(pairs)
                loss.backward()
            self._without_padding()
            total += float(loss.detach())
            for i, c, r in zip(batch, good.tolist(), bad.tolist(), strict=True):
                chosen[i], rejected[i] = c, r
        return total, (chosen, rejected)

    def _without_padding(self) -> None:
        """A classifier's embedding of its padding token is not trained, wherever in a text the token stands."""
        embedding = self.body.parts.embedding
        if embedding.padding_idx is not None and embedding.weight.grad is not None:
            embedding.weight.grad[embedding.padding_idx] = 0

    @torch.no_grad()
    def exact_states(self, pairs: Sequence[Encoded]) -> Float[Tensor, "n H"]:
        """Hidden states behind the last tokens of the pairs' texts, in float32. Scores would not show what is wrong
        with them: those of a new head are all 0."""
        return replace(self, body=self.body.exact())._states(self._texts(pairs))

    @torch.no_grad()
    def plain_states(self, pairs: Sequence[Encoded]) -> Float[Tensor, "n H"]:
        """The same by the model's own forward."""
        return torch.cat([self._plain_state(text) for text in self._texts(pairs).texts])

    def _plain_state(self, text: Sequence[int]) -> Float[Tensor, "1 H"]:
        out = self.scorer.model.base_model(input_ids=torch.tensor([text]), use_cache=False)
        return out.last_hidden_state[:, -1]

    def _states(self, texts: _Texts) -> Float[Tensor, "n H"]:
        """Hidden states of the texts' last tokens."""
        found = torch.empty(len(texts.samples), self.head.in_features)
        for pack in pack_shared(texts.samples, budget=self.budget):
            row, at = _last_tokens(pack, texts.samples)
            found[list(pack.samples)] = self.body.states(row)[at]
        return found

    def _batches(self, pairs: Sequence[Encoded]) -> Iterator[list[int]]:
        """Positions of pairs that run together, those of one prompt side by side."""
        batch: list[int] = []
        size = 0
        for i in sorted(range(len(pairs)), key=lambda i: pairs[i].key):
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
    """The different texts of some pairs, as far as their scores depend on them."""

    texts: list[Sequence[int]]
    samples: list[TrainingSample]  # as the learner packs them: a prompt is what all texts of one key begin with
    chosen: Int[Tensor, "n"]  # which text is a pair's chosen one
    rejected: Int[Tensor, "n"]

    @staticmethod
    def of(pairs: Sequence[Encoded], *, pad: int | None) -> _Texts:
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        sides = [
            [known.setdefault((p.key, _read(text, pad=pad)), len(known)) for text in (p.chosen, p.rejected)]
            for p in pairs
        ]
        by_key: dict[str, list[tuple[int, ...]]] = {}
        for key, text in known:
            by_key.setdefault(key, []).append(text)
        prompts = {key: max(_common(texts), 1) for key, texts in by_key.items()}
        groups = {key: group for group, key in enumerate(by_key)}
        samples = [_sample(text, prompt=prompts[key], group=groups[key]) for key, text in known]
        chosen, rejected = torch.tensor(sides).unbind(1)
        return _Texts([text for _, text in known], samples, chosen, rejected)

    def both(self, scores: Float[Tensor, "texts"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """From scores of the texts to those of the pairs' sides."""
        return scores[self.chosen], scores[self.rejected]


def _read(text: Sequence[int], *, pad: int | None) -> tuple[int, ...]:
    """The text up to the token that a sequence classifier reads: the last one that is not padding, or the first."""
    end = next((i for i in range(len(text) - 1, 0, -1) if text[i] != pad), 0)
    return tuple(text[: end + 1])


def _common(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens all texts begin with.

    >>> _common([[1, 2, 3], [1, 2], [1, 2, 4]])
    2
    """
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def _sample(text: Sequence[int], *, prompt: int, group: int) -> TrainingSample:
    """A text whose last token is fed too: packs leave out a completion's last, so one more stands behind it."""
    ids = np.array([*text, text[-1]], dtype=np.int64)
    return TrainingSample(ids[:prompt], ids[prompt:], group)


def _last_tokens(pack: Pack, samples: Sequence[TrainingSample]) -> tuple[Pack, Int[Tensor, "n"]]:
    """The pack read only where its samples' texts end, and which of these places is each sample's, in its order."""
    ends = np.cumsum([len(samples[i].token_ids) for i in pack.samples]) - 1
    places, at = np.unique(pack.read_at[pack.read_rows[ends]], return_inverse=True)
    return replace(pack, read_at=places), torch.from_numpy(at)
