"""Chooses a schedule's decoder: the backend's if it matches the model's own forward pass, else the plain one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ...models.backend import Backend
from ...models.precision import in_float32
from ...models.verified import Verified
from .decoder import Decoder, Decoding
from .plain import ForwardDecoder

PROBE_TOKENS = 8
"""Tokens of a prompt that a backend's decoder is compared on for every schedule, the last of them as a decoding step.
Few, because the comparison costs a plain forward pass each time."""
TOLERANCE = 1e-5
TOLERANCE_HALF = 0.05
"""Largest KL divergence in nats, between the next-token distributions of the model and of a backend's decoder, that
counts as rounding: in float32, and in bfloat16."""


def choose(
    stack: contextlib.ExitStack, model: Any, backend: Backend | None, work: Decoding, *, probe: list[int],
    messages: list[str],
) -> tuple[Decoder, bool]:  # fmt: skip
    """Returns a decoder that lives as long as ``stack``, and whether the backend's decoder was refused.

    ``probe``: a prompt to compare both on. Warnings are also added to ``messages``.
    """
    plain = ForwardDecoder(model, slots=work.slots, max_tokens=work.max_tokens)
    found = None if backend is None else backend.decoder(model, work)
    if backend is None or found is None or isinstance(found, str):
        return plain, False
    probe = probe[:PROBE_TOKENS] if len(probe) > 1 else 2 * probe  # a prompt's end and a step take two tokens
    want = _plain_log_probs(model, probe)
    # A stack of its own: a decoder that is refused is closed before the schedule ends.
    candidate = stack.enter_context(contextlib.ExitStack())
    choice: Verified[Decoder] = Verified(
        candidate.enter_context(found), plain, messages=messages, subject="the kernels",
        instead=f"{type(model).__name__}: decodes through its own forward pass", remedy="kernels = 'plain'",
    )  # fmt: skip
    choice.compare(
        lambda decoder: _log_probs(decoder, probe, plain.device), want, distance=_divergence,
        tolerance=TOLERANCE if work.autocast is None else TOLERANCE_HALF, what="next-token distributions",
    )  # fmt: skip
    if choice.refused:
        candidate.close()  # now, not with the schedule: the plain decoder needs the memory
        backend.release()
    return choice.chosen, choice.refused


def _log_probs(decoder: Decoder, probe: list[int], device: torch.device) -> Tensor:
    """Returns a decoder's next-token log-probabilities (2, V): after a prefill of ``probe`` without its last token, and
    after a step with that token. So both code paths are compared. Leaves the decoder empty."""
    with decoder.active():
        got = [decoder.add([decoder.open(probe[:-1], 1)])[0].clone()]
        got.append(decoder.step(torch.tensor(probe[-1:], device=device))[0].clone())
    # Rows first, then their prompts: nothing of the probe may stay.
    decoder.keep([])
    decoder.forget()
    return torch.stack(got).float().log_softmax(-1)


def _plain_log_probs(model: Any, probe: list[int]) -> Tensor:
    """Returns the same by the model's own forward pass, always in float32: compared with a bfloat16 pass, the
    rounding errors of both sides would add up."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False), in_float32(model):
        output = model(input_ids=torch.tensor([probe], device=device), use_cache=False)
    return output.logits[0, -2:].float().log_softmax(-1)


def _divergence(got: Tensor, want: Tensor) -> Tensor:
    """Returns the rows' largest KL divergence in nats; tokens with probability 0 in ``want`` do not count."""
    # KL(want || got) = sum of p (log p - log q); abs(), since rounding may make it negative.
    return (want.exp() * (want - got)).where(want.isfinite(), 0.0).sum(-1).abs().max()
