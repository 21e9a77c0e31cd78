"""Starts the ranks of a run by torchrun's agent, and passes back how the run ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ..config import ClusterConfig, Config
from ..errors import ConfigError, LostRankError, RankError, TrewError
from ..utils.ray_cluster import ADDRESS, INSIDE
from ..utils.signals import Interrupted
from .orders import Orders
from .pulse import FOLDER, Watch
from .ranks import Place, Ranks, here, telling_of_lost_ranks

OUTCOME = "outcome.json"
"""The file in which rank 0 leaves the exit code of a run that ended by its own decision."""
OPENED = "opened"
"""The file that rank 0 leaves once it has opened the run's folder: what is in there is of this run from then on."""
LAST_LINES = 20
"""Lines of a rank's log in the message about its death."""


def launcher(config: Config) -> Literal["", "torchrun", "ray"]:
    """What is to start the processes of a run; "" where there is nothing to start, or where this is one of them.

    Raises ConfigError where ranks that something else started were to be started by Ray."""
    cluster = config.cluster
    if here() is not None:
        if cluster.launcher == "ray" and INSIDE not in os.environ:
            raise ConfigError(
                "cluster.launcher: got 'ray', but RANK and WORLD_SIZE are set: torchrun or a batch system has started "
                "this rank; set cluster.launcher = 'torchrun', or run trew train once, without torchrun"
            )
        return ""
    # 0 learners mean one for each GPU, which may be several.
    some = cluster.learner != 1 or cluster.servers > 0
    # Servers that take turns with ranks must be on the same node, of which Ray makes no promise.
    on_cluster = bool(os.environ.get(ADDRESS)) and some and not cluster.colocate
    if cluster.launcher == "ray" or (cluster.launcher == "auto" and on_cluster):
        return "ray"
    return "torchrun" if cluster.learner > 1 else ""


def with_ranks(config: Config) -> Config:
    """The configuration with a number of ranks: where ``cluster.learner`` is 0, as many as torchrun has started, or one
    for each GPU of this machine that servers leave. Raises ConfigError where there is none."""
    if config.cluster.learner != 0:
        return config
    place = here()
    if place is not None:
        count = place.size
    elif launcher(config) == "ray":
        from . import ray_launch

        count = ray_launch.free_gpus(config)
    else:
        count = _free_gpus(config)
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, learner=count))


def _free_gpus(config: Config) -> int:
    cluster, every = config.cluster, _gpus()
    means = "cluster.learner: got 0, which means every GPU that servers leave"
    if not every:
        raise ConfigError(f"{means}; this machine has none: set the number of ranks, 1 for a single process")
    taken = 0 if cluster.colocate else cluster.servers * cluster.server_gpus
    if taken >= every:
        raise ConfigError(
            f"{means}; cluster.servers = {cluster.servers} with cluster.server_gpus = {cluster.server_gpus} leave none "
            f"of {every}: use fewer, or cluster.colocate = true"
        )
    return every - taken


def unwatched(config: Config) -> list[str]:
    """Settings of ranks that are watched and started again, where this run has none: a single process here, or ranks of
    another launcher."""
    if launched() or INSIDE in os.environ or (here() is None and launcher(config)):
        return []
    usual = ClusterConfig()
    own = [key for key in ("restarts", "hang_s") if getattr(config.cluster, key) != getattr(usual, key)]
    return [
        f"cluster.{key}: does nothing here: trew train watches, and starts again, only ranks that it has started "
        "itself (cluster.learner above 1, or on Ray)"
        for key in own
    ]


def check_device(config: Config, device: Any) -> None:
    """Raises ConfigError where ``device`` of the recipe is another one than that on which this rank, of several,
    computes: the others would compute on theirs."""
    kind, _, index = config.device.partition(":")
    if config.device == "auto" or (kind == device.type and not index):
        return
    hidden = "; to keep them off the GPUs, start them with CUDA_VISIBLE_DEVICES= in their environment"
    each = "a GPU of its own" if device.type == "cuda" else "the CPU"
    raise ConfigError(
        f"device: got {config.device!r} with cluster.learner = {config.cluster.learner}, accepts 'auto' or "
        f"{device.type!r}: each of these ranks computes on {each}{hidden if kind == 'cpu' else ''}"
    )


def place_for(config: Config) -> Place | None:
    """This process's place among the ranks that ``config`` asks for; None where it is the only one. Raises ConfigError
    where other ranks were started than asked for, or by something else than the launcher asked for."""
    place, wanted = here(), config.cluster.learner
    how = launcher(config)  # refuses ranks that something else than Ray has started where the recipe names Ray
    if place is None and how == "ray":
        raise ConfigError(
            f"cluster.launcher: got {config.cluster.launcher!r}, but this process was not started on Ray; run the "
            "recipe with trew train, which starts the ranks there, or set cluster.launcher = 'torchrun'"
        )
    if place is None:
        if wanted > 1:
            raise ConfigError(
                f"cluster.learner: got {wanted}, but this is a single process; run the recipe with trew train, which "
                f"starts the ranks, or with torchrun --nproc-per-node {wanted}"
            )
        return None
    if wanted != place.size:
        raise ConfigError(
            f"cluster.learner: got {wanted}, but {place.size} ranks were started; set cluster.learner = {place.size}"
        )
    return place if place.size > 1 else None


def alone_problems(config: Config, command: str) -> list[str]:
    """Says why a command whose trainings are a single process cannot run this one."""
    if config.cluster.learner != 1:
        return [f"cluster.learner: got {config.cluster.learner}, accepts 1: {command} trains in a single process"]
    if launcher(config) == "ray":
        return [
            f"cluster.launcher: got {config.cluster.launcher!r}, but {command} is not started on Ray; set it to "
            "'torchrun'"
        ]
    return []


def launch(config: Config, arguments: Sequence[str], tell: Callable[[str], None]) -> int:
    """Runs ``trew ARGUMENTS`` as ``cluster.learner`` ranks on this machine; returns the run's exit code.

    Ranks that die are started again from the newest checkpoint, all together, up to ``cluster.restarts`` times. Raises
    RankError, which names the first rank that died, after that.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    size = config.cluster.learner
    gpus = 0 if config.device == "cpu" else _gpus()
    if 0 < gpus < size:
        raise ConfigError(
            f"cluster.learner: got {size}, but this machine has {gpus} GPUs, and each rank computes on one; set it to "
            f"{gpus} or less, or device = 'cpu'"
        )
    work = Path(tempfile.mkdtemp(prefix="trew-ranks-"))
    # Each rank gets its share of the cores, unless the user says how many; torch would give every one of them all.
    threads = str(config.threads or os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // size))
    # Port 0 lets the agent take a free one: runs beside each other must not meet. Rank 0 prints here, others to files.
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, run_id=work.name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=config.cluster.restarts, monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(work / "logs"), redirects=dict.fromkeys(range(1, size), Std.ALL), tee=Std.NONE
        ),
        signals_to_handle=",".join(["SIGTERM", "SIGINT", *{*config.stop.signals} - {"SIGHUP"}]),
        **_patience(LaunchConfig, int(config.stop.grace_s) + SAVE_S),
    )  # fmt: skip
    # The agent's children inherit the environment of this process, which is restored afterwards.
    given = {"OMP_NUM_THREADS": threads, FOLDER: str(work)}
    if config.device == "cpu":  # a rank that sees GPUs takes one, before it knows the recipe
        given |= {"CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": in_huge_pages(os.environ.get("GLIBC_TUNABLES", ""))}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        with Watch(work, config.cluster.hang_s, tell), _terminal_closed(SignalException):
            elastic_launch(settings, sys.executable)("-m", "trew", *arguments)
        # All ranks ended with 0, and rank 0 leaves an outcome when a run ends: without one, something is wrong.
        return _code(work, 1)
    except ChildFailedError as error:
        # A rank that died after the run had decided to end is no failure of the run.
        if (code := outcome_of(work)) is not None:
            return code
        raise RankError(_death(error, work / "logs", config)) from None
    except SignalException as error:
        # Asked to stop: rank 0's code if it could still save, otherwise what a shell shows for the signal.
        return _code(work, 128 + error.sigval)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _keep_logs(work / "logs", Path(config.out))
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _terminal_closed(signal_exception: Any) -> Iterator[None]:
    """Handles SIGHUP as torch's agent handles signals, but once: kernel and shell both send it when a terminal is
    closed, and to the agent a second signal of any kind means to stop at once. Where it is ignored (nohup), it stays
    so."""

    def handle(signum: int, frame: Any) -> None:
        if not isinstance(sys.exc_info()[1], signal_exception):  # or the agent is ending the ranks already
            raise signal_exception("the terminal was closed", sigval=signal.SIGHUP)

    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def in_huge_pages(tunables: str) -> str:
    """``GLIBC_TUNABLES`` with which glibc asks the kernel for huge pages, where the user's own do not say whether.
    Gathered weights are new memory each time: in pages of 4 KiB, clearing them takes a tenth of a step."""
    if "glibc.malloc.hugetlb=" in tunables:
        return tunables
    return ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))


def _keep_logs(logs: Path, run: Path) -> None:
    """Moves what ranks other than 0 printed into the run's folder, where there is one: one file for each start."""
    if not run.is_dir():
        return
    for path in sorted(logs.glob("*/attempt_*/*/std*.log")):
        if path.stat().st_size:
            attempt, rank = _attempt(path), path.parent.name
            with contextlib.suppress(OSError):
                (run / "ranks").mkdir(exist_ok=True, mode=0o700)
                shutil.copy(path, run / "ranks" / f"{logs.parent.name}-start-{attempt}-rank-{rank}-{path.name}")


def _attempt(log: Path) -> int:
    """The number of the start whose log this is: torch keeps them as ID/attempt_N/RANK/NAME."""
    return int(log.parent.parent.name.partition("_")[2])


SAVE_S = 600
"""Seconds for the checkpoint of a run that was asked to stop."""


def _patience(launch_config: type, seconds: int) -> dict[str, Any]:
    """The setting that lets ranks that were asked to stop end their step, or give it up after the grace, and save.
    Older versions of torch do not have it: there they are killed 30 seconds after the signal."""
    known = any(field.name == "shutdown_timeout" for field in dataclasses.fields(launch_config))
    return {"shutdown_timeout": seconds} if known else {}


def outcome_of(folder: Path) -> int | None:
    """The exit code of a run that ended by its own decision, in the folder that its rank 0 shares; None before."""
    try:
        return int(json.loads((folder / OUTCOME).read_text())["code"])
    except (OSError, ValueError, KeyError):
        return None


def _code(folder: Path, otherwise: int) -> int:
    code = outcome_of(folder)
    return otherwise if code is None else code


def _death(error: Any, logs: Path, config: Config) -> str:
    """Describes the first rank that died, with its last lines."""
    rank, failure = error.get_first_failure()
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"killed by {signal.Signals(-failure.exitcode).name}"
        if failure.exitcode == -signal.SIGKILL:
            how += " (out of memory, or by hand)"
    text = f"rank {rank} on {os.uname().nodename}: {how}"
    # By number: as text, attempt_9 would come behind attempt_10.
    found = sorted(logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"), key=_attempt)
    lines = found[-1].read_text(errors="replace").splitlines()[-LAST_LINES:] if found else []
    said = "".join(f"\n  {line}" for line in lines)
    restarts = config.cluster.restarts
    return (
        f"{text}; it died after {restarts} restarts (cluster.restarts). Everything up to the newest checkpoint is "
        f"kept: continue with --resume; what ranks printed is in {Path(config.out) / 'ranks'}"
        f"{said and f'. Its last lines:{said}'}"
    )


@contextlib.contextmanager
def leading(place: Place) -> Iterator[Orders | None]:
    """Joins the ranks as rank 0, whose decisions the others follow; None where there are no others. However the block
    ends, they are told."""
    with telling_of_lost_ranks():
        orders = None if place.size == 1 else Orders(join(place))
        try:
            yield orders
        except BaseException as error:
            # The agent ends all ranks by the same signal when one has died: that is no wish to stop.
            if isinstance(error, Interrupted) and orders is not None and orders.heard:
                orders.check()
            # Anything else is a death: the ranks are started again, or the run is resumed by hand.
            if decided(error):
                # The outcome first: the agent restarts ranks that end badly after it, and they must see that it is
                # over.
                _leave(getattr(error, "exit_code", 1))
                _dismiss(orders)
            raise
        _leave(0)
        _dismiss(orders)


def decided(error: BaseException) -> bool:
    """Whether the run ends by its own decision, and would end in the same way if it were started again."""
    return isinstance(error, TrewError | Interrupted) and not isinstance(error, LostRankError)


def _dismiss(orders: Orders | None) -> None:
    # Amid an update the others take no order; they end when the connections of this process close.
    if orders is not None and orders.heard:
        orders.give("end")
        orders.ranks.close()


def over() -> bool:
    """Whether the run has ended by its own decision, before this process was started again."""
    return launched() and outcome_of(Path(os.environ[FOLDER])) is not None


def launched() -> bool:
    """Whether :func:`launch` started this rank, and waits to hear how the run ended."""
    return FOLDER in os.environ


def _leave(code: int) -> None:
    if launched():
        path = Path(os.environ[FOLDER]) / OUTCOME
        # Whole or not at all: the launcher, or a rank that is started again, may look at any time.
        path.with_suffix(".tmp").write_text(json.dumps({"code": code}))
        path.with_suffix(".tmp").rename(path)


def note_opened() -> None:
    """Notes that the run's folder is open: ranks that are started again go on with what is in it."""
    if launched():
        (Path(os.environ[FOLDER]) / OPENED).touch()


def restarted() -> bool:
    """Whether ranks are started again after one had died, and have something to go on with: before the folder was
    opened it may hold another run, which is to be overwritten, or refused."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again and (not launched() or (Path(os.environ[FOLDER]) / OPENED).exists())


def join(place: Place) -> Ranks:
    """Connects this rank with the others. Raises LostRankError if some do not come."""
    return Ranks(place, device=own_device(place), join_s=JOIN_S, wait_s=WAIT_S)


def own_device(place: Place) -> str:
    """The device of a rank: one GPU each, where there are GPUs. Raises ConfigError where there are too few."""
    gpus = _gpus()
    if 0 < gpus < place.local_size:
        raise ConfigError(
            f"cluster.learner: {place.local_size} ranks were started on {os.uname().nodename}, and see {gpus} GPUs "
            "there; each computes on one: start fewer, or let every rank see all GPUs of its node"
        )
    return f"cuda:{place.local_rank}" if gpus else "cpu"


def _gpus() -> int:
    """The GPUs that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


JOIN_S = 600.0
"""Limit for all ranks to find each other: nodes of a cluster start minutes apart. A rank that died before it connected
leaves no connection that could break, so that the others would wait for it as long as for slow rewards."""

WAIT_S = 7 * 24 * 3600.0
"""Limit of one collective operation. Ranks wait for rank 0 while it generates and scores, for hours where rewards are
slow. A rank that dies closes its connections, which the others see at once; one that hangs is the watch's matter."""
