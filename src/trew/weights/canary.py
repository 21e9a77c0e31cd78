"""The canary: the policy's log-probs of a few fixed tokens, which identify its weights.

A server that computes other values has other weights, whatever version it reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..learner import Policy
from ..rollout.vllm.update import Canary
from ..types import TrainingSample

SEQUENCES, TOKENS, SHARED = 3, 48, 16
"""Number and length of the canary's sequences; the first ``SHARED`` tokens of each are its prompt, which two share."""
LIMITS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean difference of the canary in nats that counts as rounding, by the dtype of both sides."""


def canary_samples(vocabulary: int, positions: int | None = None) -> list[TrainingSample]:
    """Returns fixed tokens, the same for every model of this vocabulary; shorter if the model has fewer positions."""
    length = min(TOKENS, (positions or TOKENS + 1) - 1)  # a server generates one more token
    # A generator of its own: every rank makes the same tokens, and the run's random state stays as it is.
    ids = torch.randint(vocabulary, (SEQUENCES, length), generator=torch.Generator().manual_seed(0)).numpy()
    shared = min(SHARED, length // 2)
    # The first samples decide how the policy runs samples: two of them share a prompt, as in training.
    ids[1, :shared] = ids[0, :shared]
    # Sequences 0 and 1 are group 0, sequence 2 is group 1.
    return [TrainingSample(row[:shared], row[shared:], group=max(0, i - 1)) for i, row in enumerate(ids)]


def canary_of(policy: Policy, samples: Sequence[TrainingSample], dtype: str) -> Canary:
    """Computes the policy's log-probs of ``samples``. ``dtype``: the servers'."""
    # At temperature 1, as servers are asked for theirs, whatever temperature the run samples at.
    values, _ = policy.untempered(samples)
    logprobs = values.split([len(s.token_ids) for s in samples])
    ids = tuple((*s.prompt_ids.tolist(), *s.token_ids.tolist()) for s in samples)
    return Canary(ids, tuple(tuple(part.tolist()) for part in logprobs), LIMITS[dtype])
