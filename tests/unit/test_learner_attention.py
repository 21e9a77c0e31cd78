"""Attention of segments of any lengths (FlashAttention's form), against blocks and the model's own forward."""

from __future__ import annotations

import copy

import pytest
import torch

import learner_help as help
import tiny
from trew.learner import attention
from trew.learner.attention import Plan, _by_blocks, _by_ragged, ragged
from trew.learner.packing import Segment, pack_shared

SEGMENTS = tuple(Segment(*s) for s in ((0, 5), (5, 3, 0, 5), (8, 1, 0, 5), (9, 7), (16, 4, 9, 7), (20, 1)))


def exactly(q, k, v, query_starts, key_starts, longest_query, longest_key, *, scale=None, window_size):
    """What torch's varlen_attn computes, one segment after the other: query i of n sees the keys up to its own, which
    is i - n from the last."""
    assert window_size == (-1, 0)
    assert longest_query == query_starts.diff().max()
    assert longest_key == key_starts.diff().max()
    assert query_starts.dtype == key_starts.dtype == torch.int32
    out = []
    for i in range(len(query_starts) - 1):
        qs = q[query_starts[i] : query_starts[i + 1]].transpose(0, 1)
        ks, vs = (x[key_starts[i] : key_starts[i + 1]].transpose(0, 1) for x in (k, v))
        seen = torch.ones(qs.shape[1], ks.shape[1], dtype=torch.bool).tril(ks.shape[1] - qs.shape[1])
        scores = qs @ ks.mT * (scale or q.shape[-1] ** -0.5)
        out.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ vs).transpose(0, 1))
    return torch.cat(out)


@pytest.fixture
def in_python(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", exactly)
    monkeypatch.setattr(attention, "flash_takes", lambda *_: True)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_segments_without_padding_give_what_the_models_forward_gives(kind, in_python, monkeypatch):
    monkeypatch.setattr(attention, "blocks", None)  # not asked for, unless attention is eager
    net, items = help.model(kind), help.samples()
    if net.config._attn_implementation == "eager":
        pytest.skip("its attention is not FlashAttention's")
    forward = help.runner(net)
    for pack in forward.packs(items):
        lengths = [len(items[i].token_ids) for i in pack.samples]
        for i, got in zip(pack.samples, forward.logprobs_of(pack).split(lengths), strict=True):
            with torch.no_grad():
                torch.testing.assert_close(got, help.plain_logprobs(net, items[i]), rtol=0, atol=1e-5)
    assert forward.path.shared


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_segments_without_padding_give_the_gradients_that_blocks_give(heads, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", exactly)
    torch.manual_seed(0)
    shapes = [(1, n, 21, 8) for n in (heads[0], heads[1], heads[1])]
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    module = torch.nn.Module()
    module.num_key_value_groups = heads[0] // heads[1]
    plan, direction = Plan(SEGMENTS), torch.randn(1, 21, heads[0], 8)
    found = []
    for out in (
        _by_ragged(*given, plan.ragged, 0.3), _by_blocks(module, *given, plan.blocks, {"scaling": 0.3}),
    ):  # fmt: skip
        found.append([out, *torch.autograd.grad((out * direction).sum(), given)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_segments_that_do_not_cover_the_row_are_refused():
    with pytest.raises(AssertionError, match="segments must cover the row"):
        ragged([Segment(0, 3), Segment(4, 2, 0, 3)])


def test_without_a_gpu_or_in_single_precision_blocks_attend():
    x = torch.zeros(1, 2, 4, 8)
    assert not attention.flash_takes(x, x, x)
    assert not attention.flash_takes(*(x.bfloat16() for _ in range(3)))


@pytest.mark.parametrize(
    ("has", "capability", "dtype", "flash"),
    [
        (True, (9, 0), torch.bfloat16, True), (True, (8, 0), torch.float16, True),
        (False, (9, 0), torch.bfloat16, False),  # torch 2.10: its kernel takes no scale
        (True, (7, 5), torch.float16, False), (True, (9, 0), torch.float32, False), (True, (9, 0), None, False),
    ],
)  # fmt: skip
def test_flash_attention_is_asked_for_where_torch_and_gpu_have_it(has, capability, dtype, flash, monkeypatch):
    monkeypatch.setattr(attention, "_RAGGED", has)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention.flash_for(torch.device("cuda"), dtype) is flash
    assert not attention.flash_for(torch.device("cpu"), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_flash_attention_on_a_gpu_is_as_near_to_float32_as_blocks_are(kind, monkeypatch):
    """Log-probs and gradients of packed rows in bfloat16, with FlashAttention and with blocks."""
    net, items = help.model(kind).to("cuda"), help.samples()
    exact = found_on_a_gpu(net, items, None)
    calls = []
    kernel = attention.varlen_attn
    monkeypatch.setattr(attention, "varlen_attn", lambda *args, **options: calls.append(1) or kernel(*args, **options))
    by_flash = found_on_a_gpu(net, items, torch.bfloat16)
    assert calls
    calls.clear()
    monkeypatch.setattr(attention, "flash_takes", lambda *_: False)
    by_blocks = found_on_a_gpu(net, items, torch.bfloat16)
    assert not calls
    for name in exact:
        errors = [(found[name] - exact[name]).norm() for found in (by_flash, by_blocks)]
        assert errors[0] <= 1.5 * errors[1] + 1e-6, (name, errors)


def found_on_a_gpu(net, items, autocast) -> dict[str, torch.Tensor]:
    net = copy.deepcopy(net)
    forward = help.runner(net, autocast=autocast)
    found = {}
    for pack in pack_shared(items, budget=4096):
        with forward.running(pack) as out:
            out.float().square().mean().backward()
        found[f"out {pack.samples}"] = out.detach().float()
    assert forward.path.shared
    return found | {name: p.grad.float() for name, p in net.named_parameters() if p.grad is not None}


def top_left(q, k, v, query_starts, key_starts, *lengths, **options):
    """As where causality counts from the first key: a completion would see none of its prompt but the beginning."""
    counts = query_starts.diff().tolist()
    parts = []
    for i, count in enumerate(counts):
        own = slice(query_starts[i], query_starts[i + 1])
        first = slice(key_starts[i], key_starts[i] + count)
        starts = torch.tensor([0, count], dtype=torch.int32)
        parts.append(exactly(q[own], k[first], v[first], starts, starts, count, count, **options))
    return torch.cat(parts)


@pytest.mark.parametrize("kernel", [exactly, top_left])
def test_flash_attention_is_compared_with_blocks_on_the_first_samples(kernel, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", lambda *args, **how: kernel(*(in_float(a) for a in args), **how))
    monkeypatch.setattr(attention, "flash_takes", lambda *_: torch.is_autocast_enabled("cpu"))
    monkeypatch.setattr(attention, "flash_for", lambda *_: True)
    net, items = help.model(), help.samples()
    forward = help.runner(net, autocast=torch.bfloat16)
    if kernel is exactly:
        packs = forward.packs(items)
        assert forward.messages == []
    else:
        with pytest.warns(UserWarning, match="attention of packed rows is computed by blocks, because FlashAttention"):
            packs = forward.packs(items)
        monkeypatch.setattr(attention, "varlen_attn", None)
    assert forward.path.shared
    for pack in packs:
        forward.logprobs_of(pack)


def in_float(x):
    return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
