"""TorchEngine: completions from any causal language model in Hugging Face's form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import EngineError
from ...models.backend import Backend
from ...models.lora import in_float32
from ...models.verified import Verified, say
from ...types import FinishReason, Group, Prompt, Rollout, Sampling, single_turn
from ..chat import Renderer
from .decode import Finished, Schedule
from .decoder import Decoder, Decoding
from .plain import ForwardDecoder

PROBE_TOKENS = 8  # of a prompt, that a backend's decoder is tried on in every call: the last of them as a step
TOLERANCE = 1e-5
TOLERANCE_HALF = 0.05
"""Largest KL divergence in nats, of the model's next-token distribution from that of a backend's decoder, that counts
as rounding: in float32, and in bfloat16."""


class TorchEngine:
    """Generates with ``model`` where it stands: no second copy of the weights, so an update is seen at once.

    ``batch``: most completions decoded at once (memory and speed; the result does not depend on it beyond float
    rounding). ``autocast``: compute in this type, for instance bfloat16; None = as the weights are. Log-probabilities
    are float32 in any case. ``backend``: what may decode instead of the model's own forward pass, which every
    ``generate`` compares it with anew; from the first difference on it is ``refused``. ``messages`` keeps what the user
    should know.
    """

    def __init__(
        self,
        model: Any,
        renderer: Renderer,
        *,
        batch: int = 128,
        autocast: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        if batch < 1:
            raise EngineError(f"batch: got {batch}, accepts a whole number of at least 1")
        self.model = model
        self.renderer = renderer
        self.batch = batch
        self.autocast = autocast
        self.backend = backend
        self.refused = False
        self.messages: list[str] = []
        self.version = 0

    def state(self) -> dict[str, Any]:
        """What later completions depend on beside the weights, as JSON can hold it."""
        return {"refused": self.refused, "version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state` was taken: a backend that was refused then stays refused."""
        self.refused = bool(state["refused"])
        self.version = int(state["version"])

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def stop_ids(self) -> frozenset[int]:
        """The renderer's end tokens and those of the model's own generation configuration."""
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        own = ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]
        return self.renderer.stop_ids | frozenset(int(i) for i in own)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """``n`` completions for each of ``prompts``, in their order; see Engine.generate.

        A completion ends with the first stop token, which it includes, with the token that completes a stop string,
        or at ``sampling.max_tokens``. Equal uids draw the same numbers, so they should not occur twice.
        """
        if n < 1 or sampling.max_tokens < 1:
            raise EngineError(f"n = {n}, max_tokens = {sampling.max_tokens}: both must be at least 1")
        prompt_ids = [self.renderer.encode(prompt) for prompt in prompts]
        self._check_lengths(prompts, prompt_ids, sampling.max_tokens)
        if not prompts:
            return []
        more_ids, strings = self.renderer.split_stop((*sampling.stop, *self.renderer.stop))
        stop_ids = self.stop_ids | more_ids
        slots = min(self.batch, n * len(prompts))
        with contextlib.ExitStack() as stack:
            stack.enter_context(_generating(self.model, self.autocast))
            schedule = Schedule(
                self._decoder(stack, prompt_ids, n=n, slots=slots, max_tokens=sampling.max_tokens),
                prompt_ids,
                uids=[prompt.uid for prompt in prompts],
                n=n,
                sampling=sampling,
                slots=slots,
                stop_ids=stop_ids,
                stop_strings=strings,
                decode=self.renderer.decode,
                device=self.device,
            )
            groups: dict[int, Group] = {}
            for i in schedule.run(progress or (lambda count: None)):
                context = np.asarray(prompt_ids[i], dtype=np.int64)
                rows = [self._rollout(context, row, stop_ids, strings) for row in schedule.finished(i)]
                groups[i] = Group(prompts[i], tuple(rows))
                if on_group is not None:
                    on_group(i, groups[i])
        return [groups[i] for i in range(len(prompts))]

    def _decoder(
        self, stack: contextlib.ExitStack, prompt_ids: Sequence[Sequence[int]], *, n: int, slots: int, max_tokens: int
    ) -> Decoder:
        """The backend's, after it has shown that it computes what the model computes, or the plain one."""
        plain = ForwardDecoder(self.model, prompt_ids, n=n, slots=slots, max_tokens=max_tokens)
        if self.backend is None or self.refused:
            return plain
        probe = list(max(prompt_ids, key=len))[:PROBE_TOKENS]
        probe = probe if len(probe) > 1 else 2 * probe
        work = Decoding(
            [*prompt_ids, probe[:-1]], n=n, slots=slots, max_tokens=max_tokens, autocast=self.autocast,
            tell=lambda text: say(self.messages, text),
        )  # fmt: skip
        found = self.backend.decoder(self.model, work)
        if isinstance(found, str):
            return plain
        want = self._plainly_after(probe)  # before the backend may exchange anything in the model
        inner = stack.enter_context(contextlib.ExitStack())
        choice: Verified[Decoder] = Verified(
            inner.enter_context(found), plain, messages=self.messages, subject="the kernels",
            instead=f"{type(self.model).__name__}: decodes through its own forward pass", remedy="kernels = 'plain'",
        )  # fmt: skip
        choice.compare(
            lambda decoder: self._after(decoder, probe), want, distance=_divergence,
            tolerance=TOLERANCE if self.autocast is None else TOLERANCE_HALF, what="next-token distributions",
        )  # fmt: skip
        if choice.refused:
            self.refused = True
            inner.close()
            self.backend.release()
        return choice.chosen

    def _after(self, decoder: Decoder, probe: list[int]) -> Tensor:
        """Log-probabilities (2, V) of the next token, by a decoder whose last prompt is ``probe`` without its last
        token: at the prompt's end, and after a step. It is left without rows."""
        got = [decoder.add([len(decoder.prompt_ids) - 1])[0].clone()]
        got.append(decoder.step(torch.tensor(probe[-1:], device=self.device))[0].clone())
        decoder.keep([])
        decoder.forget()
        return torch.stack(got).float().log_softmax(-1)

    def _plainly_after(self, probe: list[int]) -> Tensor:
        """The same by the model's own forward pass in float32."""
        with torch.autocast(self.device.type, enabled=False), in_float32(self.model):
            output = self.model(input_ids=torch.tensor([probe], device=self.device), use_cache=False)
        return output.logits[0, -2:].float().log_softmax(-1)

    def _rollout(
        self, prompt_ids: np.ndarray, row: Finished, stop_ids: frozenset[int], strings: Sequence[str]
    ) -> Rollout:
        ids = row.token_ids.tolist()
        ended = ids[-1] in stop_ids
        text = self.renderer.decode(ids[:-1] if ended else ids)
        cuts = [at for string in strings if (at := text.find(string)) >= 0]
        reason: FinishReason = "stop" if ended or cuts else "length"
        return single_turn(
            prompt_ids,
            row.token_ids,
            logprobs=row.sampling_logprobs,
            policy_logprobs=row.logprobs,
            entropies=row.entropies,
            version=self.version,
            text=text[: min(cuts)] if cuts else text,
            finish_reason=reason,
        )

    def _check_lengths(self, prompts: Sequence[Prompt], prompt_ids: list[list[int]], max_tokens: int) -> None:
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        rows = self.model.get_input_embeddings().weight.shape[0]
        for prompt, ids in zip(prompts, prompt_ids, strict=True):
            if not ids:
                raise EngineError(f"prompt {prompt.uid!r}: has no tokens; remove it or give it text")
            if limit and len(ids) + max_tokens > limit:
                raise EngineError(
                    f"prompt {prompt.uid!r}: {len(ids)} prompt tokens + max_tokens = {max_tokens} is more than the "
                    f"model's {limit} positions; lower rollout.max_tokens or data.max_prompt_tokens"
                )
            if max(ids) >= rows:
                raise EngineError(
                    f"prompt {prompt.uid!r}: token id {max(ids)} is outside the model's vocabulary of {rows}; use the "
                    "tokenizer that was trained with the model"
                )


def _divergence(got: Tensor, want: Tensor) -> Tensor:
    """The largest KL divergence in nats of rows of log-probabilities; tokens that ``want`` rules out do not count."""
    return (want.exp() * (want - got)).where(want.isfinite(), 0.0).sum(-1).abs().max()


@contextlib.contextmanager
def _generating(model: Any, autocast: torch.dtype | None) -> Iterator[None]:
    """No gradients, eval mode, the asked precision; every module's own mode is put back afterwards.

    no_grad and not inference_mode: models that keep something from a forward pass (rotary tables that grow with the
    longest input) would keep inference tensors, which fail in the next training pass.
    """
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    cast = torch.autocast(device.type, dtype=autocast) if autocast is not None else contextlib.nullcontext()
    model.eval()
    try:
        with torch.no_grad(), cast:
            yield
    finally:
        for module, training in modes:
            module.training = training
