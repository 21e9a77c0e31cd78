"""The small model of a study: made from a seed, and trained on problems and answers until it is sometimes right.

A study needs hundreds of runs, and so a model that takes seconds for each; and a model that is never right gives
reinforcement learning nothing to start from. The tokenizer has one token for each character of arithmetic. Supervised
steps stop at the first look at which the mean probability of a right answer, at temperature 1 and computed exactly,
reaches ``Warm.accuracy``.

The same settings give the same weights to the bit on different processors, so that the parts of a study may be run on
several machines, and anyone can repeat a cell from the same start. Everything is computed in float64, where processors
differ in the 16th digit; gradients are rounded, so that the differences do not grow; and the weights are rounded to
bfloat16 at the end, to three digits. The supervised steps are the plainest there are, so
that the start of a study depends on nothing else in trew.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..config import Config
from ..errors import ConfigError, DataError
from ..models.loading import PLAIN_TEMPLATE
from ..models.quiet import quiet
from ..models.writing import written_whole
from ..rollout.chat import Renderer
from ..training import episodes
from ..types import Prompt
from .settings import Warm

CHARACTERS = "0123456789+-*/=(), \n"
_PAD, _END = "<pad>", "<end>"
_PROBED = 512  # problems over which the probability is averaged
_EVERY = 5  # steps between two looks


def make(config: Config, warm: Warm, folder: Path) -> dict[str, Any]:
    """Makes the model for the data of ``config`` in ``folder``; returns what is known about it.

    Raises DataError if the task's problems cannot be learned from, and ConfigError if they are not learned.
    """
    torch.set_num_threads(1)  # sums in another order would give other weights
    made = tokenizer()
    data = episodes.dataset(dataclasses.replace(config, seed=warm.seed))
    rows = [_encoded(prompt, Renderer(made)) for prompt in data.train]
    ids, answers = _padded(rows)
    model = _drawn(_shape(warm, len(made), longest=ids.shape[1]), seed=warm.seed)
    # The first problems, the same at every look: the stopping step does not depend on draws.
    probed = torch.arange(min(_PROBED, len(ids)))
    steps, reached = _train(model, ids, answers, probed, warm)
    if reached < warm.accuracy:
        raise ConfigError(
            f"warm.accuracy: got {warm.accuracy}, but after warm.steps = {steps} the probability of a right answer is "
            f"{reached:.3f}; lower it, or give more steps or a larger model"
        )
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    reached = _accuracy(model, ids, answers, probed)
    with written_whole(folder) as place, quiet():
        model.float().save_pretrained(place)
        made.save_pretrained(place)
    count = sum(p.numel() for p in model.parameters())
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {"parameters": count, "steps": steps, "accuracy": round(reached, 4), "problems": len(rows),
            "sha256": weights}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character of ``CHARACTERS``. A chat is its contents and a line break."""
    vocabulary = {token: i for i, token in enumerate([_PAD, _END, *CHARACTERS])}
    # No text holds another character: _encoded refuses it.
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=_PAD, eos_token=_END)
    made.chat_template = PLAIN_TEMPLATE
    return made


def _encoded(prompt: Prompt, renderer: Renderer) -> tuple[list[int], list[int]]:
    """The tokens of a problem and of its answer, with the end. Raises DataError if it has none that can be written."""
    answer = prompt.columns.get("gold")
    if not isinstance(answer, str) or not answer:
        raise DataError(f"prompt {prompt.uid!r}: has no gold to learn from; [warm] needs a task such as arithmetic")
    text = renderer.render(prompt)
    if foreign := sorted(set(text + answer) - set(CHARACTERS)):
        raise DataError(
            f"prompt {prompt.uid!r}: contains {foreign[0]!r}, and the tokens of [warm] are {CHARACTERS!r}; for "
            "arithmetic set data.args.template = '{expression}='"
        )
    return renderer.encode(prompt), [*renderer.tokens(answer), *renderer.tokens(_END)]


def _padded(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """All rows with padding at their ends, and which tokens are answers."""
    # (rows, longest): the prompt, the answer, then padding (0 is _PAD).
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, answers = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        ids[i, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        answers[i, len(prompt) : len(prompt) + len(answer)] = True
    return ids, answers


def _shape(warm: Warm, vocabulary: int, *, longest: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=warm.hidden, intermediate_size=warm.intermediate,
        num_hidden_layers=warm.layers, num_attention_heads=warm.heads, num_key_value_heads=warm.heads,
        # 0 and 1 are the places of _PAD and _END in the vocabulary.
        max_position_embeddings=max(128, 4 * longest), tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip


class _Norm(torch.nn.Module):
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight, in the type of its input; that of transformers is in float32."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.weight, self.eps = own.weight, own.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _Rotary(torch.nn.Module):
    """Cosines and sines of the rotary angles, (1, places, head size), in float64."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size // config.num_attention_heads
        rope: Any = config.rope_parameters
        self.frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)

    def forward(self, _: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * self.frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def _drawn(config: LlamaConfig, *, seed: int) -> LlamaForCausalLM:
    """A model with weights drawn from the seed, which computes in float64 throughout."""
    model = LlamaForCausalLM(config).double()
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # the others are the norms' ones
                weight.normal_(std=config.initializer_range, generator=draws)
    inner: Any = model.model
    inner.rotary_emb = _Rotary(config)
    inner.norm = _Norm(inner.norm)
    for layer in inner.layers:
        layer.input_layernorm = _Norm(layer.input_layernorm)
        layer.post_attention_layernorm = _Norm(layer.post_attention_layernorm)
    return model


def _train(model: LlamaForCausalLM, ids: Tensor, answers: Tensor, probed: Tensor, warm: Warm) -> tuple[int, float]:
    """Supervised steps on the answers; the number of steps, and the mean probability of a right answer after them."""
    draws = torch.Generator().manual_seed(warm.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm.lr, weight_decay=0.0)
    for step in range(warm.steps + 1):
        if step % _EVERY == 0 or step == warm.steps:
            reached = _accuracy(model, ids, answers, probed)
            if reached >= warm.accuracy or step == warm.steps:
                return step, reached
        drawn = torch.randint(len(ids), (warm.batch,), generator=draws)
        # The mean over the answers' tokens of the batch.
        loss = -_logprobs(model, ids, answers, drawn).sum() / answers[drawn].sum()
        optimizer.zero_grad()
        loss.backward()
        _round_gradients(model)
        optimizer.step()
    raise AssertionError("the last step returns")


def _round_gradients(model: LlamaForCausalLM) -> None:
    """Rounds each weight's gradient to 12 bits below those of its largest number.

    The last digits, in which processors differ, must not reach the weights: training would double a difference about
    every dozen steps, and end with another model.
    """
    for weight in model.parameters():
        assert weight.grad is not None
        _, exponent = torch.frexp(weight.grad.abs().max())
        unit = 2.0 ** (int(exponent) - 12)
        weight.grad.div_(unit).round_().mul_(unit)


def _accuracy(model: LlamaForCausalLM, ids: Tensor, answers: Tensor, probed: Tensor) -> float:
    """The mean probability of a right answer at temperature 1, without sampling."""
    with torch.no_grad():
        # Sum over the answer's tokens, exp: the probability of the whole answer.
        return float(_logprobs(model, ids, answers, probed).sum(-1).exp().mean())


def _logprobs(model: LlamaForCausalLM, ids: Tensor, answers: Tensor, rows: Tensor) -> Tensor:
    """The log-probs of the answers' tokens; 0 elsewhere. Padding comes last, so that no answer sees it."""
    tokens = ids[rows]
    # (rows, longest, vocabulary) -> (rows, longest - 1): position t scores token t + 1.
    logprobs = torch.log_softmax(model(input_ids=tokens).logits[:, :-1], -1)
    return logprobs.gather(-1, tokens[:, 1:, None])[..., 0] * answers[rows][:, 1:]
