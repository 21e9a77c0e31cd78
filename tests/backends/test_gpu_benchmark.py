"""The benchmark of generation on a GPU."""

from __future__ import annotations

import json
import sys

import pytest

from test_benchmarks import module  # noqa: F401


def test_the_gpu_s_benchmark_runs_on_a_cpu(module, monkeypatch, tmp_path):  # noqa: F811
    """In small: its floor is the bytes that a step reads, its share the arithmetic over the rate of products."""
    made = module("decode_gpu")
    monkeypatch.setattr(made, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(made, "product_rates", lambda dtype, device: (2e9, 1e9))
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--device", "cpu", "--small", "--repeats", "1", "--json", str(found)])
    made.main()
    row = json.loads(found.read_text())
    body, head = module("floor").weights(made.SMALL)
    assert row["decoding"]["floor"] == 2 * (body + head + 4 * (32 + 16) * 2 * 2 * 32) / 1e9
    assert set(row["decoding"]["by"]) == {"eager", "forward"}
    assert row["training"]["tokens"] == 2 * (32 + 8 * 28)
    assert row["training"]["share"] == pytest.approx(row["training"]["flops"] / 1e9 / row["training"]["seconds"])
