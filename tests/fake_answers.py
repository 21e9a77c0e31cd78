"""Completions of a stand-in server: what they are made of, and the distribution that they are drawn from."""

from __future__ import annotations

from typing import Any

import torch


class Row:
    """A completion in the making."""

    def __init__(self, seed: int, most: int) -> None:
        self.draws, self.most = torch.Generator().manual_seed(seed), most
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.reason, self.stop = "", None

    def add(self, token: int, logprob: float, version: str) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def choice(self, index: int) -> dict[str, Any]:
        pairs = zip(self.tokens, self.logprobs, strict=True)
        content = [{"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []} for t, p in pairs]
        spans: list[dict[str, Any]] = []
        for at, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": at, "end": at})
            spans[-1]["end"] = at + 1
        return {
            "index": index, "token_ids": self.tokens, "logprobs": {"content": content}, "weight_versions": spans,
            "finish_reason": self.reason, "stop_reason": self.stop,
        }  # fmt: skip


def cut(probs: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """The sampling distribution: top-k, then min-p, then top-p, renormalised."""
    if sampling["top_k"] > 0:
        probs = probs.where(probs >= probs.topk(min(sampling["top_k"], len(probs))).values[-1], 0.0)
    probs = probs.where(probs >= sampling["min_p"] * probs.max(), 0.0)
    if sampling["top_p"] < 1:
        ordered, at = (probs / probs.sum()).sort(descending=True)
        outside = at[ordered.cumsum(0) - ordered >= sampling["top_p"]]
        probs = probs.index_fill(0, outside, 0.0)
    return probs / probs.sum()
