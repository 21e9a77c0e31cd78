"""What the C library does with freed blocks: sharded ranks on a CPU have large ones returned at once."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trew.config import parse
from trew.distributed import sharding
from trew.training import build
from trew.utils.memory import LARGE

PROGRAM = """
import sys
import torch
from trew.utils.memory import return_large_blocks, used_bytes

size = int(sys.argv[2]) // 4
torch.ones(6 * size)  # glibc learns from the first large block that is freed
if sys.argv[1] == "returned":
    assert return_large_blocks()
small, large = [], []
for _ in range(32):
    large.append(torch.ones(size))
    small.append(torch.ones(1 << 18))  # keeps two large blocks apart
held = used_bytes()
large.clear()
print(held - used_bytes())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_blocks_of_a_sharded_rank_go_back_at_once():
    def returned(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how, str(LARGE)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert returned("returned") > 31 * LARGE
    assert returned("kept") < 4 * LARGE, "this C library returns them by itself: nothing needs to be told"


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("cuda:0", False)])
def test_ranks_that_share_weights_on_a_cpu_ask_for_it(device: str, told: bool, monkeypatch: pytest.MonkeyPatch):
    """Before anything is loaded: what was allocated before stays in the heap."""
    asked: list[bool] = []
    monkeypatch.setattr(build, "return_large_blocks", lambda: asked.append(True))
    monkeypatch.setattr(sharding, "mesh", stop)
    plan: Any = SimpleNamespace(config=parse({"model": "m", "cluster": {"learner": 2}}))
    ranks: Any = SimpleNamespace(device=torch.device(device), place=SimpleNamespace(nodes=1))
    with pytest.raises(InterruptedError):
        build._sharded(plan, ranks)
    assert asked == [True] * told


def stop(*_: Any) -> None:
    raise InterruptedError
