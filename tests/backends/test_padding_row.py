"""The padding token where it is an ordinary token of the texts: gradients of the kernels are those of autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import cpu_help as cpu
import learner_help as help
from trew.backends.cpu import build
from trew.types import TrainingSample

needs_library = pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library()))
PAD = 7
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PACKS = {"one pack": 1000, "several packs": 40}


def model(kind: str = "llama", **more: Any) -> Any:
    """A model that pads with its end token, as many do."""
    head = {"head_dim": 16, "query_pre_attn_scalar": 16} if kind.startswith("gemma") else {}
    return help.model(kind, hidden_size=64, pad_token_id=PAD, eos_token_id=PAD, **head, **more)


def texts(shape=((5, (3, 1, 7)), (9, (2, 2)), (13, (5, 4)), (20, (9, 6)))) -> list[TrainingSample]:
    """Samples with the padding token in every prompt, and within and at the end of the completions."""
    items = help.samples(shape)
    for sample in items:
        sample.prompt_ids[[0, 3]] = PAD
        sample.token_ids[[0, -1]] = PAD
    return items


def weights(items: list[TrainingSample]) -> list[Tensor]:
    """By what each log-prob is multiplied, sample by sample."""
    lengths = [len(s.token_ids) for s in items]
    return list(torch.randn(sum(lengths), generator=torch.Generator().manual_seed(3)).split(lengths))


def by_name(net: Any) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def of_autograd(net: Any, items: list[TrainingSample]) -> dict[str, Tensor]:
    """The gradient through transformers' own forward, a sequence at a time."""
    net = copy.deepcopy(net)
    for sample, weight in zip(items, weights(items), strict=True):
        (help.plain_logprobs(net, sample) * weight).sum().backward()
    return by_name(net)


def of_kernels(net: Any, items: list[TrainingSample], *, packs: int | None = None, **settings: Any):
    """The gradient through the kernels, which must be in use, in ``packs`` packs."""
    net = copy.deepcopy(net)
    runner = cpu.runner(net, **settings)
    assert runner.path.layers == "cpu"
    parts, found = weights(items), runner.packs(items)
    assert packs is None or (len(found) > 1) == (packs > 1)
    for pack in found:
        weight = torch.cat([parts[i] for i in pack.samples])
        runner.accumulate(
            pack, lambda rows, *_, weight=weight: (weight[rows], None), lengths=[len(parts[i]) for i in pack.samples]
        )
    return by_name(net)


@needs_library
@pytest.mark.parametrize("how", PACKS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3"])
def test_gradients_equal_those_of_autograd_where_texts_hold_the_padding_token(kind, tied, how):
    net, items = model(kind, tie_word_embeddings=tied), texts()
    assert net.get_input_embeddings().padding_idx == PAD
    want = of_autograd(net, items)
    got = of_kernels(net, items, budget=PACKS[how], packs=1 if how == "one pack" else 2)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        # A key's bias moves all scores of a query alike: its gradient is 0 but for rounding.
        scale = max(float(gradient.norm()), 0.01 * float(want[EMBEDDING].norm()))
        assert float((got[name] - gradient).norm()) < 1e-4 * scale, name
    assert help.relative(got[EMBEDDING], want[EMBEDDING]) < 1e-5
    assert bool(got[EMBEDDING][PAD].any()) is tied
    if tied:
        assert help.relative(got[EMBEDDING][PAD], want[EMBEDDING][PAD]) < 1e-5


@needs_library
@pytest.mark.parametrize("how", PACKS)
def test_the_padding_row_of_a_tied_head_gets_the_share_of_the_head_and_no_other(how):
    """The same model with a head of its own says what the head's share is."""
    net, items = model(tie_word_embeddings=True), texts()
    own = model(tie_word_embeddings=False)
    own.load_state_dict(net.state_dict())
    budget = PACKS[how]
    tied, apart = of_kernels(net, items, budget=budget), of_kernels(own, items, budget=budget)
    assert not apart[EMBEDDING][PAD].any()
    assert float(apart[HEAD][PAD].norm()) > 0.1
    torch.testing.assert_close(tied[EMBEDDING][PAD], apart[HEAD][PAD], rtol=1e-5, atol=1e-5)
    others = [i for i in range(net.config.vocab_size) if i != PAD]
    both = (apart[EMBEDDING] + apart[HEAD])[others]
    torch.testing.assert_close(tied[EMBEDDING][others], both, rtol=1e-4, atol=1e-4)


@needs_library
@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {"share_prompts": False}], ids=str)
def test_so_it_is_where_layers_recompute_and_where_prompts_are_not_shared(settings):
    net, items = model(tie_word_embeddings=True), texts()
    got, want = of_kernels(net, items, **settings), of_autograd(net, items)
    assert help.relative(got[EMBEDDING], want[EMBEDDING]) < 1e-5
    assert help.relative(got[EMBEDDING][PAD], want[EMBEDDING][PAD]) < 1e-5


@needs_library
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_the_padding_row_s_gradient_was_before_a_backward_pass_stays(tied):
    """Gradients add up over the passes of a step."""
    net, items = model(tie_word_embeddings=tied), texts()
    once = of_kernels(net, items)[EMBEDDING]
    embedding = net.get_input_embeddings().weight
    embedding.grad = torch.full_like(embedding, 0.25)
    twice = copy.deepcopy(net)
    twice.get_input_embeddings().weight.grad = embedding.grad.clone()
    runner, parts = cpu.runner(twice), weights(items)
    for pack in runner.packs(items):
        weight = torch.cat([parts[i] for i in pack.samples])
        runner.accumulate(pack, lambda rows, *_, weight=weight: (weight[rows], None))
    torch.testing.assert_close(by_name(twice)[EMBEDDING], once + 0.25, rtol=1e-5, atol=1e-5)


@needs_library
def test_a_frozen_embedding_gets_no_gradient_and_a_model_without_a_padding_token_all_of_it():
    net, items = model(), texts()
    net.get_input_embeddings().weight.requires_grad_(False)
    assert not of_kernels(net, items)[EMBEDDING].any()
    without = help.model("llama", hidden_size=64)
    assert without.get_input_embeddings().padding_idx is None
    got, want = of_kernels(without, items)[EMBEDDING], of_autograd(without, items)[EMBEDDING]
    assert got[PAD].any()
    assert help.relative(got, want) < 1e-5
