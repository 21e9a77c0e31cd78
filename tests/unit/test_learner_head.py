"""The head against plain autograd in float64, whole and in chunks."""

from __future__ import annotations

import pytest
import torch

from trew.learner import head

ROWS = torch.tensor([0, 0, 3, 1, 3, 3])  # several tokens read one row, row 2 is read by none
TOKENS = torch.tensor([4, 4, 0, 6, 2, 0])


@pytest.fixture(params=[1, 14, 1 << 20], ids=["row by row", "two rows", "at once"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", request.param)


def logits(seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(4, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_and_gradient_equal_plain_autograd(temperature):
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25], dtype=torch.float64)
    expected_in = logits().requires_grad_()
    expected = (expected_in / temperature).log_softmax(-1)[ROWS, TOKENS]
    (expected * weights).sum().backward()

    source = logits().float().requires_grad_()
    got = head.token_logprobs(source * 1.0, rows=ROWS, tokens=TOKENS, temperature=temperature)
    (got * weights.float()).sum().backward()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    assert source.grad is not None
    torch.testing.assert_close(source.grad.double(), expected_in.grad, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("chunk")
def test_bfloat16_logits_give_float32_logprobs_of_the_rounded_logits():
    source = logits().to(torch.bfloat16)
    expected_in = source.double().requires_grad_()
    expected = expected_in.log_softmax(-1)[ROWS, TOKENS]
    expected.sum().backward()
    leaf = source.clone().requires_grad_()
    got = head.token_logprobs(leaf * 1.0, rows=ROWS, tokens=TOKENS)
    got.sum().backward()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(leaf.grad.double(), expected_in.grad, rtol=2e-2, atol=1e-2)


def expected_with_entropies(z: torch.Tensor, temperature: float, weights: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs, entropies and the gradient of a weighted sum of both: autograd in float64."""
    z = z.double().requires_grad_()
    log_p = (z / temperature).log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)[ROWS]
    (weights * torch.stack([log_p[ROWS, TOKENS], entropies])).sum().backward()
    assert z.grad is not None
    return [log_p[ROWS, TOKENS].detach(), entropies.detach(), z.grad]


WEIGHTS = {
    "both": torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0, 0.25], [0.3, 2.0, -1.5, 0.0, 1.0, -0.7]]),
    "logprobs alone": torch.tensor([[1.0, -2.0, 0.5, 3.0, -1.0, 0.25], [0.0] * 6]),
    "entropies alone": torch.tensor([[0.0] * 6, [0.3, 2.0, -1.5, 0.0, 1.0, -0.7]]),
}


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("which", WEIGHTS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_entropies_have_the_gradient_of_plain_autograd(temperature, which):
    weights = WEIGHTS[which]
    want = expected_with_entropies(logits(), temperature, weights)
    source = logits().float().requires_grad_()
    got = head.token_logprobs_and_entropies(source * 1.0, rows=ROWS, tokens=TOKENS, temperature=temperature)
    (weights * torch.stack(got)).sum().backward()
    assert source.grad is not None
    for a, b in zip([*got, source.grad], want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=4e-6)
    plain = head.token_logprobs(logits().float(), rows=ROWS, tokens=TOKENS, temperature=temperature)
    assert torch.equal(got[0], plain)


def test_the_gradient_of_an_entropy_is_its_finite_difference():
    z = logits().float()
    source = z.clone().requires_grad_()
    head.token_logprobs_and_entropies(source * 1.0, rows=ROWS, tokens=TOKENS, temperature=1.5)[1][4].backward()
    assert source.grad is not None
    for v in range(7):
        ends = []
        for step in (-1e-3, 1e-3):
            moved = z[3].double()
            moved[v] += step
            p = (moved / 1.5).softmax(-1)
            ends.append(-(p * p.log()).sum())
        assert source.grad[3, v].item() == pytest.approx((ends[1] - ends[0]).item() / 2e-3, abs=1e-5)
    assert (source.grad[[0, 1, 2]] == 0).all()


@pytest.mark.usefixtures("chunk")
def test_entropies_of_bfloat16_logits_and_of_impossible_tokens():
    source = logits().to(torch.bfloat16)
    want = expected_with_entropies(source, 1.0, WEIGHTS["both"])
    leaf = source.clone().requires_grad_()
    got = head.token_logprobs_and_entropies(leaf * 1.0, rows=ROWS, tokens=TOKENS)
    (WEIGHTS["both"] * torch.stack(got)).sum().backward()
    torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=4e-6)
    torch.testing.assert_close(leaf.grad.double(), want[2], rtol=2e-2, atol=2e-2)

    z = torch.tensor([[-torch.inf, 0.0, 0.0], [1e4, -1e4, 0.0]], requires_grad=True)
    _, entropies = head.token_logprobs_and_entropies(z * 1.0, rows=torch.arange(2), tokens=torch.tensor([1, 0]))
    entropies.sum().backward()
    assert entropies.tolist() == pytest.approx([0.693147, 0.0], abs=1e-6)
    assert z.grad is not None
    assert z.grad.abs().max() < 1e-6  # even, and certain: both are where entropy does not move


def test_extreme_logits_stay_finite():
    z = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 0.0, 0.0]])
    assert head.token_logprobs(z, rows=torch.tensor([0, 1]), tokens=torch.tensor([0, 1])).tolist() == pytest.approx(
        [0.0, -0.693147], abs=1e-6
    )


@pytest.mark.parametrize("function", [head.token_logprobs, head.token_logprobs_and_entropies])
def test_the_gradient_takes_the_place_of_the_logits_and_a_second_backward_is_an_error(function):
    source = logits().float().requires_grad_()
    z = source * 1.0
    place = z.data_ptr()
    seen = []
    z.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    out = function(z, rows=ROWS, tokens=TOKENS)
    out = (out if isinstance(out, torch.Tensor) else torch.stack(out)).sum()
    out.backward(retain_graph=True)
    assert seen == [place]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
