"""A rank on Ray: Ray Train's worker starts the same ``trew train`` that torchrun would, and reports how it ended.

The rank is a process of its own under a guardian, so that it has a main thread for signals, and ends with the worker.
It joins the others through the store of the process group that Ray Train has made, as it would through that of
torchrun's agent.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ConfigError, RankError
from ..rewards.isolation.program import GuardedProgram, how_it_ended
from ..utils import ray_cluster
from .launch import LAST_LINES, OPENED, SAVE_S, outcome_of
from .pulse import FOLDER, Watch
from .ranks import Place, check_nodes
from .ray_board import Board, Death

LOOK_S = 0.3
_OF_WORKERS = re.compile(
    r"RAY_(JOB_ID|RAYLET_PID|NODE_ID|WORKER_\w+|TRAIN_\w+|LD_PRELOAD_ON_WORKERS)|SPT_NOENV|PYTHONBREAKPOINT"
)
"""Variables that make a process one of Ray's workers; a rank connects by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What every rank is started with. ``arguments`` are those of ``trew``; ``variables`` are environment variables of
    the process that started the run; ``mark`` is that of the board in ``board``."""

    arguments: tuple[str, ...]
    folder: str
    board: str
    mark: str
    variables: Mapping[str, str]
    address: str
    threads: int
    hang_s: float
    grace_s: float
    shard: str


def run(table: dict[str, Any]) -> None:
    """Runs this worker's rank to its end. Ray Train calls it on every worker, with an :class:`Order` as a table.

    Raises RankError where the rank died: Ray Train then starts all ranks again."""
    order = Order(**table)
    board, place = Board(Path(order.board), order.mark), _place()
    if not board.seen():
        raise RankError(f"node {os.uname().nodename} does not see {board.folder}: {NOT_SHARED}")
    # All ranks take part, also where the run is over.
    start, local_sizes = _agree(place, board)
    if board.code is not None or board.stopping:
        return  # started again although the run had ended by its own decision
    with board.log(start, place.rank).open("ab") as log:
        try:
            check_nodes(local_sizes, order.shard, how="Ray placed")
        except ConfigError as error:  # of all ranks alike
            if place.rank == 0:
                log.write(f"trew: {error}\n".encode())
                board.end(error.exit_code)
            return
        _run(order, place, board, start, log)


NOT_SHARED = (
    "the run folder and the working directory must be on a file system that all nodes share; choose another place with "
    "--out, or run trew from one"
)


def _place() -> Place:
    """This worker's place, by Ray Train's variables, which are torchrun's."""
    return Place(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def _agree(place: Place, board: Board) -> tuple[int, list[int]]:
    """How often the ranks were started before, by rank 0, and the number of ranks on each one's node."""
    import torch
    import torch.distributed as dist

    mine = torch.tensor([board.begin() if place.rank == 0 else 0, place.local_size])
    found = [torch.zeros_like(mine) for _ in range(place.size)]
    dist.all_gather(found, mine)
    return int(found[0][0]), [int(each[1]) for each in found]


def _run(order: Order, place: Place, board: Board, start: int, log: BinaryIO) -> None:
    work = Path(tempfile.mkdtemp(prefix="trew-rank-"))  # of this node: clocks of file servers may be others
    try:
        if board.opened:  # by an earlier start
            (work / OPENED).touch()
        status = _watched(order, place, board, start, log, work)
        code = outcome_of(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    # The outcome, which rank 0 alone leaves, and not the status says that the run has decided to end.
    if code is not None and place.rank == 0:
        board.end(code)
    # A rank that fails after that is no death.
    elif status and board.code is None:
        death = Death(place.rank, os.uname().nodename, _how(status), _last_lines(board.log(start, place.rank)))
        board.died(start, death)
        raise RankError(f"rank {death.rank} on {death.node}: {death.how}")


def _watched(order: Order, place: Place, board: Board, start: int, log: BinaryIO, work: Path) -> int:
    """Runs the rank; returns its exit status."""

    def tell(text: str) -> None:
        log.write(f"trew: {text}\n".encode())
        log.flush()

    # The grace covers the end of a step and a checkpoint: a stop must cut off neither.
    program = GuardedProgram(
        [sys.executable, "-m", "trew", *order.arguments], output=log, folder=Path(order.folder),
        environment=environment(order, place, start, work), grace_s=order.grace_s + SAVE_S,
    )  # fmt: skip
    with contextlib.closing(_Ending(program)), Watch(work, order.hang_s, tell):
        asked = False
        while (status := program.poll()) is None:
            if not asked and board.stopping:
                asked = True
                program.ask_to_end()
            _note_opened(board, work)
            time.sleep(LOOK_S)
    _note_opened(board, work)
    return status


def _note_opened(board: Board, work: Path) -> None:
    # At once, not at the end of the rank: this worker may be lost before that.
    if (work / OPENED).exists() and not board.opened:
        board.note_opened()


class _Ending:
    """Ends a program when it is closed."""

    def __init__(self, program: GuardedProgram) -> None:
        self.close = program.end


def environment(order: Order, place: Place, start: int, work: Path) -> dict[str, str]:
    """The environment of a rank: the worker's, without what makes it Ray's, with what torchrun's agent would set."""
    kept = {name: value for name, value in os.environ.items() if not _OF_WORKERS.fullmatch(name)}
    # A rank takes the GPU whose number is its local rank (:func:`.launch.own_device`): here that Ray gave this worker.
    if ids := kept.get("CUDA_VISIBLE_DEVICES"):
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(own_first(ids.split(","), _own_gpu(), place.local_rank))
    return {
        **kept, **order.variables,
        "OMP_NUM_THREADS": str(order.threads), "PYTHONUNBUFFERED": "1",
        FOLDER: str(work), ray_cluster.INSIDE: order.address, ray_cluster.ADDRESS: order.address,
        # The rank connects to the store of Ray Train's group instead of opening one at the same address.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(start),
    }  # fmt: skip


def own_first(ids: Sequence[str], own: str, index: int) -> list[str]:
    """The GPUs of a node, reordered so that a worker's ``own`` has the number ``index``, which its rank uses.

    >>> own_first(["0", "1", "2"], "2", 0)
    ['2', '1', '0']
    """
    found = list(ids)
    if own in found and index < len(found):
        there = found.index(own)
        found[index], found[there] = found[there], found[index]
    return found


def _own_gpu() -> str:
    ids = ray_cluster.ray().get_gpu_ids()
    return str(ids[0]) if ids else ""


def _how(status: int) -> str:
    return how_it_ended(status) + (" (out of memory, or by hand)" if status == -9 else "")


def _last_lines(log: Path) -> tuple[str, ...]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        return tuple(file.read().decode("utf-8", "replace").splitlines()[-LAST_LINES:])
