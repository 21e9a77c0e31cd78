"""Starts the ranks of a run on a Ray cluster by Ray Train, shows what rank 0 prints, and passes back how it ended."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.places import bundles, rank_bundle, uses_gpus
from ..errors import ConfigError, MissingResources, RankError
from ..utils import ray_cluster
from ..utils.ray_cluster import connect, lacking, nodes, passed, total
from ..utils.signals import Interrupted, Interrupts
from . import ray_rank
from .ray_board import Board
from .ray_rank import LOOK_S, Order

_TELL_S = 3.0  # that places may take to be found, before somebody is told that they are missing


def free_gpus(config: Config) -> int:
    """The GPUs of the cluster that servers leave. Raises ConfigError where there is none."""
    cluster, every = config.cluster, total(nodes(connect()), "GPU")
    taken = cluster.servers * cluster.server_gpus
    if every - taken > 0:
        return every - taken
    means = "cluster.learner: got 0, which means every GPU that servers leave"
    if not every:
        raise ConfigError(f"{means}; no node of the Ray cluster has one: set the number of ranks")
    raise ConfigError(f"{means}; the Ray cluster has {every}, servers take {taken}: use fewer servers")


def launch(config: Config, arguments: Sequence[str], tell: Callable[[str], None]) -> int:
    """Runs ``trew ARGUMENTS`` as ``cluster.learner`` ranks on the cluster; returns the run's exit code.

    Ranks that die are started again from the newest checkpoint, all together, up to ``cluster.restarts`` times. Raises
    RankError, which names the first rank that died, after that; MissingResources where the cluster has no place for
    them for ``cluster.resources_timeout_s`` seconds.
    """
    module, run = connect(), Path(config.out)
    try:
        board = Board.make(run)
        try:
            _check_shared(module, board, config)
            return _Launch(module, board, config, arguments, tell).run()
        finally:
            board.keep_logs(run)
            board.remove()
    finally:
        module.shutdown()  # ends Ray's workers, and with them their ranks


def _check_shared(module: Any, board: Board, config: Config) -> None:
    """Raises ConfigError where a node that may get a rank does not see the run folder, or this working directory."""
    kind = "GPU" if uses_gpus(config, nodes(module)) else "CPU"
    strategies = module.util.scheduling_strategies
    # All nodes at once. num_cpus=0: one that is full must answer too; soft=False: no other may answer for it. Nodes in
    # containers may share a host's name and yet not its folders.
    asked = [
        (
            node["NodeManagerHostname"],
            module.remote(_sees)
            .options(
                num_cpus=0, scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            )
            .remote(str(board.folder), board.mark, str(Path.cwd())),
        )
        for node in module.nodes()
        if node["Alive"] and node["Resources"].get(kind)
    ]
    problems = []
    for name, answer in asked:
        try:
            missing = module.get(answer, timeout=120)
        except Exception as error:  # a node that is busy or just lost: the ranks that it gets look again
            problems += [f"node {name}: {_first_line(error)}"] if _unimportable(error) else []
            continue
        problems += [f"node {name} does not see {place}: {ray_rank.NOT_SHARED}" for place in missing]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _sees(board: str, mark: str, folder: str) -> list[str]:
    """On another node: which of the two folders it does not see."""
    found = [] if Board(Path(board), mark).seen() else [board]
    return found if Path(folder).is_dir() else [*found, folder]


def _unimportable(error: Exception) -> bool:
    return "ModuleNotFoundError" in str(error) or isinstance(error, ImportError)


class _Launch:
    """One run on the cluster, as the process sees it that started it."""

    def __init__(
        self, module: Any, board: Board, config: Config, arguments: Sequence[str], tell: Callable[[str], None]
    ) -> None:
        self.module, self.board, self.config, self.tell = module, board, config, tell
        self.gpus = uses_gpus(config, nodes(module))
        self.arguments = arguments
        self._shown = _Shown(board)
        self._since, self._told = time.monotonic(), False

    def run(self) -> int:
        fit = _Fit(self._trainer())
        with Interrupts(more=self.config.stop.signals) as interrupts:
            fit.start()
            asked: Interrupted | None = None
            while not fit.done.is_set():
                try:
                    # anywhere() raises while there is a request: once that is met, waiting goes on without it.
                    with interrupts.anywhere() if asked is None else contextlib.nullcontext():
                        fit.done.wait(LOOK_S)
                except Interrupted as error:
                    asked = error
                    self._stop(error)
                self._look()
        self._shown.copy()
        if (code := self.board.code) is not None:
            return code
        if asked is not None:
            self.tell(f"the ranks ended before they had saved: {_first_line(fit.error)}")
            raise asked
        raise self._death(fit.error)

    def _look(self) -> None:
        self._shown.copy()
        if not self.board.waiting:
            # Ranks run; should they die, the time without a place counts from here.
            self._since, self._told = time.monotonic(), False
            return
        waited, limit = time.monotonic() - self._since, self.config.cluster.resources_timeout_s
        if waited > min(_TELL_S, limit) and not self._told:
            self._told = True
            if missing := self._missing():
                self.tell(f"waiting for places on the Ray cluster: {missing} (cluster.resources_timeout_s = {limit:g})")
        if waited > limit:
            raise MissingResources(
                f"cluster.resources_timeout_s: no place for the ranks on the Ray cluster for {limit:g} s: "
                f"{self._missing() or 'the nodes have room, other jobs may use it'}. Everything up to the newest "
                "checkpoint is kept: add nodes, and continue with --resume"
            )

    def _missing(self) -> str:
        return lacking(bundles(self.config, gpus=self.gpus), nodes(self.module))

    def _stop(self, error: Interrupted) -> None:
        """Has the ranks end their step and save; a second signal ends this process, and them with it."""
        if self.board.waiting:
            raise error
        self.tell("asking the ranks to end this step and to save; once more stops now")
        self.board.stop()

    def _trainer(self) -> Any:
        train, torch = ray_cluster.train()
        cluster, rank = self.config.cluster, rank_bundle(self.config, gpus=self.gpus)
        return torch.TorchTrainer(
            ray_rank.run,
            train_loop_config=asdict(self._order()),
            torch_config=_rendezvous(torch),
            scaling_config=train.ScalingConfig(
                num_workers=cluster.learner, use_gpu=self.gpus, resources_per_worker=dict(rank)
            ),
            run_config=train.RunConfig(
                name="ranks", storage_path=str(self.board.folder / "ray"), callbacks=[_failures(train, self.board)],
                failure_config=train.FailureConfig(max_failures=cluster.restarts),
            ),
        )  # fmt: skip

    def _order(self) -> Order:
        config = self.config
        return Order(
            arguments=tuple(self.arguments), folder=str(Path.cwd()), board=str(self.board.folder), mark=self.board.mark,
            variables=passed(os.environ), address=self.module.get_runtime_context().gcs_address,
            threads=config.threads or 1, hang_s=config.cluster.hang_s, grace_s=config.stop.grace_s,
            shard=config.cluster.shard,
        )  # fmt: skip

    def _death(self, error: BaseException | None) -> RankError:
        """The error for ranks that died too often."""
        kept = "Everything up to the newest checkpoint is kept: continue with --resume"
        death = self.board.death()
        if death is None:
            return RankError(f"Ray Train ended the ranks: {_first_line(error)}. {kept}")
        said = "".join(f"\n  {line}" for line in death.lines)
        return RankError(
            f"rank {death.rank} on {death.node}: {death.how}; it died after {self.config.cluster.restarts} restarts "
            f"(cluster.restarts). {kept}; what ranks printed is in {Path(self.config.out) / 'ranks'}"
            f"{said and f'. Its last lines:{said}'}"
        )


class _Fit(threading.Thread):
    """Ray Train at work, in a thread: the main thread has the signals."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(name="trew-ray-train", daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None
        # Not join: where a signal interrupts that, Python 3.11 takes the thread for one that has ended.
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # whatever it is, the main thread must see it
            self.error = error
        finally:
            self.done.set()


class _Shown:
    """Copies what rank 0 prints to this process's output, as it comes."""

    def __init__(self, board: Board) -> None:
        self._board, self._start, self._at = board, 0, 0
        self._decoder = _decoder()

    def copy(self) -> None:
        while True:
            with contextlib.suppress(OSError), self._board.log(self._start, 0).open("rb") as log:
                log.seek(self._at)
                text = log.read()
                self._at += len(text)
                # What was read may end inside a character: the decoder keeps that for the next time.
                sys.stdout.write(self._decoder.decode(text))
                sys.stdout.flush()
            if not self._board.log(self._start + 1, 0).exists():
                return
            self._start, self._at = self._start + 1, 0
            self._decoder = _decoder()


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _rendezvous(torch: Any) -> Any:
    """A process group of Ray's workers, by whose store ranks find each other: gloo, and no GPU is touched by it."""

    class Rendezvous(torch.TorchConfig):
        @property
        def train_func_context(self) -> Any:
            # Ray's own would select the worker's CUDA device, and that GPU belongs to the rank.
            return contextlib.nullcontext

    return Rendezvous(backend="gloo")


def _failures(train: Any, board: Board) -> Any:
    """Has Ray Train note on the board that ranks were given up."""

    class Failures(train.UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
            board.failed()

    return Failures()


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return lines[-1][:400] if lines else type(error).__name__
