"""Functions on several gloo ranks: one process imports everything, and forks the ranks of each call.

    with Fleet() as fleet:
        fleet.run("ranks_work:step", 3, name="dapo")   # what each of three ranks returns

Ranks are processes of their own, connected as torchrun connects them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 300.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def variables(rank: int, size: int, port: int, nodes: Sequence[int] | int = 1) -> dict[str, str]:
    """What torchrun sets for a rank, on this machine as if it were ``nodes``: how many, or the ranks of each."""
    each = [size // nodes] * nodes if isinstance(nodes, int) else nodes
    index, local = [(index, count) for count in each for index in range(count)][rank]
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


class Fleet:
    """Runs functions on ranks; use as a context."""

    def __enter__(self) -> Fleet:
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], env=env, text=True, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def run(
        self, call: str, size: int, *, nodes: Sequence[int] | int = 1, join_s: float = 60, **arguments: Any
    ) -> list[Any]:
        """What ``module:function`` returns on each rank: anything that torch.save can write."""
        import torch

        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            order = {"call": call, "size": size, "nodes": nodes, "arguments": arguments, "folder": folder,
                     "port": free_port(), "join_s": join_s}  # fmt: skip
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            assert select.select([self._process.stdout], [], [], PATIENCE)[0], order
            self._process.stdout.readline()
            errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
            assert not errors, "\n".join(errors)
            return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(order: dict[str, Any], rank: int) -> None:
    import torch

    from trew.distributed import Ranks, here

    folder = Path(order["folder"])
    try:
        os.environ |= variables(rank, order["size"], order["port"], order["nodes"])
        place = here()
        assert place is not None
        ranks = Ranks(place, device="cpu", join_s=order["join_s"], wait_s=60)
        module, _, name = order["call"].partition(":")
        result = getattr(importlib.import_module(module), name)(ranks, **order["arguments"])
        torch.save(result, folder / f"{rank}.pt")
        ranks.close()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(0)


def _serve() -> None:
    import torch

    import ranks_work

    torch.set_num_threads(1)
    ranks_work.warm()
    gc.collect()
    gc.freeze()  # no collection of a rank looks at what is there by now, and so none copies its pages
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for rank in range(order["size"]):
            if (pid := os.fork()) == 0:
                _rank(order, rank)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        print("done", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _serve()
