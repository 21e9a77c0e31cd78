"""TorchEngine: completions from any causal language model in Hugging Face's form."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...backends.cpu import Transformer, describe
from ...backends.cpu import decoder as native_decoder
from ...backends.cpu.arena import Room
from ...backends.cpu.linears import packed_linears
from ...backends.cuda_graphs import static_model
from ...backends.cuda_graphs.graphs import Graphs
from ...backends.cuda_graphs.static import StaticDecoder
from ...backends.cuda_graphs.static_draw import StaticDraw
from ...backends.cuda_graphs.static_model import StaticModel
from ...errors import EngineError
from ...models.lora import in_float32
from ...types import FinishReason, Group, Prompt, Rollout, Sampling, single_turn
from ..chat import Renderer
from .decode import Finished, Schedule
from .generic import ForwardDecoder

PROBE_TOKENS = 8  # of a prompt, that our decoder is tried on in every call: the last of them as a step
TOLERANCE = 1e-5
TOLERANCE_HALF = 0.05
"""Largest KL divergence in nats, of the model's next-token distribution from the native decoder's, that counts as
rounding: in float32, and in bfloat16."""


class TorchEngine:
    """Generates with ``model`` where it stands: no second copy of the weights, so an update is seen at once.

    ``batch``: most completions decoded at once (memory and speed; the result does not depend on it beyond float
    rounding). ``autocast``: compute in this type, for instance bfloat16; None = as the weights are. Log-probabilities
    are float32 in any case. ``native``: Llama-family models go through :mod:`trew.backends.cpu` where it can be used,
    which every ``generate`` proves anew against the model's own forward pass; all others, and with False these
    too, through that. ``linear``: on a CPU, with weights packed for our products there too (faster, the same numbers).
    ``room``: for what a call takes on a CPU; a learner may have the same one, since one waits for the other.
    ``messages`` keeps what the user should know.

    On a GPU that is :class:`.static.StaticDecoder`; its weights, buffers and graphs stay between calls as long as half
    of the GPU's memory is free. ``_graphs``: for tests, the same on any device, with these graphs.
    """

    def __init__(
        self,
        model: Any,
        renderer: Renderer,
        *,
        batch: int = 128,
        autocast: torch.dtype | None = None,
        linear: bool = True,
        native: bool = True,
        room: Room | None = None,
        _graphs: Callable[[torch.device], Graphs] | None = None,
    ) -> None:
        if batch < 1:
            raise EngineError(f"batch: got {batch}, accepts a whole number of at least 1")
        self.model = model
        self.renderer = renderer
        self.batch = batch
        self.autocast = autocast
        self.linear = linear
        self.native = native
        self.room = room or Room()
        self._graphs = _graphs
        self._static: StaticModel | None = None
        self.messages: list[str] = []
        self.version = 0

    def state(self) -> dict[str, Any]:
        """What later completions depend on beside the weights, as JSON can hold it."""
        return {"native": self.native, "version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state` was taken: what was given up then stays given up."""
        self.native = bool(state["native"])
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
            stack.callback(self._settle)
            room = stack.enter_context(self.room.held())
            runner = self._native_runner(prompt_ids, n=n, slots=slots, max_tokens=sampling.max_tokens, room=room)
            if runner is None:
                if self.linear:
                    stack.enter_context(packed_linears(self.model, autocast=self.autocast))
                runner = ForwardDecoder(self.model, prompt_ids, n=n, slots=slots, max_tokens=sampling.max_tokens)
            schedule = Schedule(
                runner,
                prompt_ids,
                uids=[prompt.uid for prompt in prompts],
                n=n,
                sampling=sampling,
                slots=slots,
                stop_ids=stop_ids,
                stop_strings=strings,
                decode=self.renderer.decode,
                device=self.device,
                native=self.native,
                drawing=StaticDraw(runner.model, sampling) if isinstance(runner, StaticDecoder) else None,
            )
            groups: dict[int, Group] = {}
            for i in schedule.run(progress or (lambda count: None)):
                context = np.asarray(prompt_ids[i], dtype=np.int64)
                rows = [self._rollout(context, row, stop_ids, strings) for row in schedule.finished(i)]
                groups[i] = Group(prompts[i], tuple(rows))
                if on_group is not None:
                    on_group(i, groups[i])
        return [groups[i] for i in range(len(prompts))]

    def _native_runner(
        self, prompt_ids: Sequence[Sequence[int]], *, n: int, slots: int, max_tokens: int, room: Room
    ) -> native_decoder.Decoder | StaticDecoder | None:
        """Our own decoder, after it has shown that it computes what the model computes; None where it cannot."""
        parts = describe(self.model, adapters=True) if self.native else "it is switched off"
        if isinstance(parts, str):
            return None
        probe = list(max(prompt_ids, key=len))[:PROBE_TOKENS]
        probe = probe if len(probe) > 1 else 2 * probe
        prompt_ids = [*prompt_ids, probe[:-1]]
        if static_model.runs_on(self.device) or self._graphs is not None:
            runner = self._static_runner(parts, prompt_ids, n=n, slots=slots, max_tokens=max_tokens)
        elif native_decoder.unsupported(parts, autocast=self.autocast) is None:
            runner = native_decoder.Decoder(
                parts, prompt_ids, n=n, slots=slots, max_tokens=max_tokens, autocast=self.autocast, room=room,
            )  # fmt: skip
        else:
            runner = None
        if runner is None or (why := self._disproof(runner, probe)) is None:
            return runner
        self.native, self._static = False, None
        self._warn(
            f"{type(self.model).__name__}: decodes through its own forward pass, because the native one {why}. "
            'Set kernels = "plain" to do so without this warning.'
        )
        return None

    def _static_runner(
        self, parts: Transformer, prompt_ids: Sequence[Sequence[int]], *, n: int, slots: int, max_tokens: int
    ) -> StaticDecoder | None:
        """In the buffers of the last call where they are large enough, as its graphs are good for them alone."""
        if static_model.unsupported(parts):
            return None
        columns = max(map(len, prompt_ids)) + max_tokens
        dtype = self.autocast or torch.float32
        kept, self._static = self._static, None
        if kept is None or not kept.serves(slots=slots, columns=columns, dtype=dtype) or not kept.begin(parts):
            del kept  # its memory is needed
            graphs = (self._graphs or Graphs.on)(self.device)
            kept = StaticModel(parts, slots=slots, columns=columns, dtype=dtype, graphs=graphs)
            kept.begin(parts)
        self._static = kept
        return StaticDecoder(kept, prompt_ids, n=n)

    def _disproof(self, runner: native_decoder.Decoder | StaticDecoder, probe: list[int]) -> str | None:
        """How the runner, whose last prompt is ``probe`` without its last token, differs from the model's own forward
        pass: at the prompt's end, and after a step. None where it does not. It is left without rows."""
        try:
            got = [runner.add([len(runner.prompt_ids) - 1])[0].clone()]
            got.append(runner.step(torch.tensor(probe[-1:], device=self.device))[0].clone())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation that this device does not have
            return f"failed ({str(error).strip().partition(chr(10))[0]})"
        runner.keep([])
        runner.forget()
        with torch.autocast(self.device.type, enabled=False), in_float32(self.model):
            output = self.model(input_ids=torch.tensor([probe], device=self.device), use_cache=False)
        wanted = output.logits[0, -2:].float().log_softmax(-1)
        divergences = (wanted.exp() * (wanted - torch.stack(got).log_softmax(-1))).nan_to_num().sum(-1)
        divergence = float(divergences.abs().max())
        if divergence <= (TOLERANCE if self.autocast is None else TOLERANCE_HALF) or not wanted.isfinite().any():
            return None
        return f"differs from it by {divergence:.2g} nats"

    def _settle(self) -> None:
        """At a call's end: says what became of the graphs; gives the buffers back where memory is not plenty."""
        if self._static is None:
            return
        if failed := self._static.graphs.failed:
            self._graphs = lambda device: Graphs(None)
            self._static.graphs.failed = None
            self._warn(f"no CUDA graphs, because recording one failed ({failed}): decoding goes on, slower")
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if free + unused < total / 2:
                self._static = None

    def _warn(self, message: str) -> None:
        self.messages.append(message)
        warnings.warn(message, stacklevel=4)

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
