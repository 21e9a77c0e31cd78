"""What ranks compute in tests; each function runs on every rank (``ranks_help``)."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import learner_help as help
from engine_help import ScriptedEngine
from trew.config import CriticConfig, LearnerConfig, LoraConfig, load
from trew.distributed import Ranks, sharding
from trew.distributed.orders import DealtEngine, Held, Orders, generate_share
from trew.distributed.pulse import FOLDER, Pulse
from trew.errors import ConfigError, NumericsError, TrewError
from trew.learner import Learner, Parallel
from trew.learner.critic import Critic
from trew.learner.placement import Placement
from trew.learner.value_runner import with_value_head
from trew.models import loading, lora
from trew.models.sharded import full, local
from trew.objective import preset
from trew.rollout.generate import generate
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.teacher import EndpointTeacher
from trew.runs.rollouts import Sampler
from trew.training import loop
from trew.training.follower import FollowerRun, Over
from trew.training.start import lead
from trew.types import Prompt, Sampling
from trew.utils.console import Silent
from trew.utils.signals import Interrupted, Interrupts


def warm() -> None:
    """Imports and prepares, in the process that forks them, what ranks would need a second each for."""
    from trew.learner import sharded_runner  # noqa: F401 - imported by the first step
    from trew.runs import tensor_files  # noqa: F401

    for kind in ("llama", "smollm", "qwen3"):
        lora.attach(copy.deepcopy(help.model(kind)), LoraConfig(rank=2), name="tiny", seed=0)


class Moves:
    """Moves tensors from the CPU to the CPU: into other memory, and what was there before is lost."""

    def __init__(self) -> None:
        self.calls: list[torch.device] = []
        self.numbers = 0

    def __call__(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.calls.append(device)
        self.numbers += tensor.numel()
        moved = tensor.clone()
        local(tensor).fill_(float("nan") if tensor.is_floating_point() else 0)
        return moved


def _learner(parallel: Parallel | None, name: str, *, how: str, kind: str, rank: int = 0, **settings: Any) -> Learner:
    objective = preset(name, **help.OVERRIDES.get(name, {}), **settings.pop("objective", {}))
    net, adapters = copy.deepcopy(help.model(kind)), None
    if rank:
        adapters = lora.attach(net, LoraConfig(rank=rank), name="tiny", seed=0)
        settings["adapters"] = adapters
    reference, shared = None, settings.pop("shared", True)  # memory, between ranks that share weights
    if settings.pop("with_reference", False):
        reference = copy.deepcopy(help.model(kind))
        settings["reference"] = reference
    if isinstance(parallel, Ranks) and how != "none":
        over = sharding.mesh(parallel.place, "cpu", "hsdp" if how == "hsdp" else "fsdp")
        memory = sharding.shared_memory(over) if shared else None
        for each in (net, reference):
            if each is not None:
                low = torch.bfloat16 if settings.get("dtype") == "bfloat16" else None
                sharding.shard(each, over, offload=how == "offload", low=low, memory=memory)
    # Adam divides the gradient by its own size: where it is near adam_eps = 1e-8 its rounding moves a weight by a share
    # of the learning rate. After two steps of 1e-3, one process in float32 is up to 4.6e-5 from float64, and ranks
    # 5.8e-5 (an entry of a gradient of norm 9 is 1.11e-8 in float64, 1.34e-8 and 1.40e-8 here); at 1e-4 a tenth.
    return help.learner(net, objective, parallel=parallel, **{"microbatch_tokens": 24, "lr": 1e-4, **settings})


def steps(
    ranks: Parallel | None,
    name: str,
    *,
    how: str = "fsdp",
    kind: str = "llama",
    count: int = 2,
    moving: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Log-probs, outputs and weights of ``count`` optimizer steps. ``moving``: tensors leave in between."""
    learner = _learner(ranks, name, how=how, kind=kind, **settings)
    items = help.samples()
    data = help.prepared(help.model(kind), learner.objective, items, seed=3)
    outputs = []
    placement = Placement(learner, move=Moves() if moving else None)
    for _ in range(count):
        placement.enter()
        logprobs = learner.logprobs(items)
        out = learner.step(items, data)
        placement.leave()
        if settings.get("with_reference"):
            learner.update_reference()
        outputs.append({"loss": out.loss, "norm": out.grad_norm, "metrics": dict(out.metrics), "logprobs": logprobs})
    reference = learner.logprobs(items, reference=True) if settings.get("with_reference") else None
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    return {"outputs": outputs, "weights": weights, "reference": reference, "path": learner._runner.path}


def score_norms(ranks: Parallel | None, *, how: str, fused: bool) -> list[torch.Tensor]:
    """Log-probs and score norms of all tokens, at a temperature."""
    learner = _learner(ranks, "otb", how=how, kind="llama", fused=fused, temperature=0.7)
    return list(learner.score_norms(help.samples()))


def critic_steps(ranks: Parallel | None, *, count: int = 2) -> dict[str, Any]:
    """Values, outputs and weights of ``count`` optimizer steps of a critic, of which every rank has all weights."""
    model = with_value_head(help.model(), std=1.0)
    settings = LearnerConfig(microbatch_tokens=24, max_grad_norm=0.05)
    critic = Critic(model, config=CriticConfig(lr=1e-2), learner=settings, optimizer_steps=10, parallel=ranks)
    items = help.samples()
    outputs = []
    for _ in range(count):
        values = critic.values(items)
        out = critic.step(items, preset("ppo").prepare(help.batch(items, values=values)))
        outputs.append({"loss": out.loss, "norm": out.grad_norm, "metrics": dict(out.metrics), "values": values})
    return {"outputs": outputs, "weights": {n: p.detach().clone() for n, p in model.named_parameters()}}


class Traffic(TorchDispatchMode):
    """Counts the bytes of whole tensors that are gathered and reduced, by operation and type."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, dict[str, int]] = {"_allgather_base_": {}, "_reduce_scatter_base_": {}}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (found := self.bytes.get(func.__name__.partition(".")[0])) is not None:
            whole = max(args[:2], key=torch.numel)
            kind = str(whole.dtype).removeprefix("torch.")
            found[kind] = found.get(kind, 0) + whole.numel() * whole.element_size()
        return func(*args, **(kwargs or {}))


def traffic(ranks: Ranks, *, dtype: str) -> list[dict[str, int]]:
    """The bytes that a step of one pack gathers, and those that it reduces, by type."""
    learner = _learner(ranks, "dr-grpo", how="fsdp", kind="llama", dtype=dtype, microbatch_tokens=4096, shared=False)
    items = help.samples()
    learner.verify(items)
    learner.release()
    data = help.prepared(help.model(), learner.objective, items, seed=3)
    with Traffic() as counted:
        learner.step(items, data)
    return list(counted.bytes.values())


def broken(ranks: Ranks, *, name: str, how: str) -> dict[str, Any]:
    """A step in which one pack's log-probs are not finite: the same error on every rank, and the next step works."""
    learner = _learner(ranks, name, how=how, kind="llama")
    items = help.samples()
    data = help.prepared(help.model(), learner.objective, items, seed=3)
    bad = data.replace(old_logprobs=data.old_logprobs.clone())
    last = bad.sequence_ids == len(items) - 1
    bad.old_logprobs[last] = float("nan")
    bad = bad.replace(mask=bad.mask | last)
    bad = learner.objective.prepare(bad.replace(advantages=None, token_weights=None))
    error = None
    try:
        learner.step(items, bad)
    except NumericsError as found:
        error = found.to_json()
    out = learner.step(items, data)
    return {"error": error, "version": out.policy_version, "loss": out.loss}


def disagreeing(ranks: Ranks) -> str:
    """One rank's gradient is another: the error that each of them raises."""
    learner = _learner(ranks, "dr-grpo", how="none", kind="llama")
    items = help.samples()
    data = help.prepared(help.model(), learner.objective, items, seed=3)
    done = learner.accumulate(items, data)
    if ranks.rank == 1:
        done.loss += 1e-7
    try:
        learner.apply(done)
    except TrewError as error:
        assert all(p.grad is None for p in learner.model.parameters())
        return f"{type(error).__name__}: {error}"
    return "nothing"


def distributed(ranks: Ranks, *, kind: str, rank: int) -> dict[str, Any]:
    """A model that rank 0 alone has loaded: its weights and buffers on this rank, and whether its head is tied."""
    net = copy.deepcopy(help.model(kind))
    if rank:
        lora.attach(net, LoraConfig(rank=rank), name="tiny", seed=0)
    source = sharding.tensors_of(net)
    if ranks.rank:
        net.to("meta")
        loading.allocate(net)
        with torch.no_grad():
            for tensor in sharding.tensors_of(net).values():
                tensor.fill_(7)
    tied = net.get_output_embeddings().weight is net.get_input_embeddings().weight
    sharding.shard(net, sharding.mesh(ranks.place, "cpu", "fsdp"))
    sharding.distribute(net, None if ranks.rank else source, ranks)
    return {"tensors": {name: full(t).clone() for name, t in sharding.tensors_of(net).items()}, "tied": tied}


def stored(ranks: Ranks, *, folder: str, optimizer: str, how: str = "fsdp") -> dict[str, Any]:
    """Writes a part of a checkpoint after a step, from every rank; the whole tensors."""
    from pathlib import Path

    from trew.runs import tensor_files

    learner = _learner(ranks, "dr-grpo", how=how, kind="llama", optimizer=optimizer)
    items = help.samples()
    learner.step(items, help.prepared(help.model(), learner.objective, items, seed=3))
    tensors, counters = learner.state()
    tensor_files.write(Path(folder), tensors, part=ranks.rank + 1, parts=ranks.size)
    return {"tensors": {name: full(t).clone() for name, t in tensors.items()}, "counters": counters}


def restored(ranks: Parallel | None, *, folder: str, counters: dict[str, Any], optimizer: str) -> dict[str, Any]:
    """Loads what other ranks have written, and takes the next step."""
    from pathlib import Path

    from trew.runs import tensor_files

    learner = _learner(ranks, "dr-grpo", how="fsdp", kind="llama", optimizer=optimizer)
    tensors, _ = tensor_files.read(Path(folder), [path.name for path in Path(folder).iterdir()])
    learner.load_state(tensors, counters)
    now = {name: full(t).clone() for name, t in learner.state()[0].items()}
    items = help.samples()
    out = learner.step(items, help.prepared(help.model(), learner.objective, items, seed=4))
    return {"tensors": now, "loss": out.loss, "version": out.policy_version, "weights": dict(learner.weights())}


def late(ranks: Ranks, *, seconds: float) -> list[str]:
    """What every rank hears of rank 0, and rank 0 of rank 1, where each speaks only after so many seconds."""
    heard = []
    if ranks.rank == 0:
        time.sleep(seconds)
    heard.append(ranks.broadcast(b"orders" if ranks.rank == 0 else None).decode())
    if ranks.rank == 1:
        time.sleep(seconds)
        ranks.send(b"completions")
    elif ranks.rank == 0:
        heard.append(ranks.receive(1).decode())
    return heard


def sums(ranks: Ranks) -> dict[str, Any]:
    tensors = [torch.tensor([1.0, float(ranks.rank)]), torch.tensor(ranks.rank + 1), torch.ones(3, dtype=torch.float64)]
    ranks.sum_(tensors)
    found = ranks.gather({"rank": ranks.rank, "text": "é" * ranks.rank})
    sent = ranks.broadcast(b"order" * 1000 if ranks.rank == 0 else None)
    empty = ranks.broadcast(b"" if ranks.rank == 0 else None)
    return {"tensors": tensors, "found": found, "sent": sent, "empty": empty}


def taught(ranks: Ranks, *, folder: str, address: str, token: str) -> dict[str, Any]:
    """A teacher's log-probs from a server, and whether a watch over ``folder`` takes this rank for busy afterwards."""
    os.environ[FOLDER] = folder
    ranks.pulse = Pulse(ranks.rank)
    endpoint = Endpoint.parse(address, token)
    with closing(EndpointTeacher(endpoint, request_timeout_s=60, wait_s=60, parallel=ranks)) as teacher:
        if ranks.rank == 0:
            teacher.meet(range(40, 80))
        ranks.gather(None)
        ranks.pulse.busy()  # as in an update
        found = teacher.logprobs(help.samples())
    ranks.gather(None)
    busy = (Path(folder) / f"pulse-{ranks.rank}").exists()
    return {"logprobs": found, "busy": busy}


class WatchedFollower(FollowerRun):
    """Counts the rows that are ``held`` for later turns after each round; whether all is ``freed`` when an update
    begins."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.held: list[int] = []
        self.freed: list[bool] = []

    def _generate(self, order: dict[str, Any]) -> None:
        super()._generate(order)
        schedule = self.engine._schedule
        self.held.append(len(schedule.held) if schedule else 0)

    def learning(self) -> None:
        self.freed.append(self.engine._schedule is None)
        super().learning()

    _do = FollowerRun._do | {"generate": _generate}


def trained(ranks: Ranks, *, recipe: str) -> dict[str, Any] | None:
    """A whole run in the folder of its recipe; what the engines of other ranks than 0 held for later turns."""
    os.chdir(Path(recipe).parent)
    orders = Orders(ranks)
    if ranks.rank == 0:
        lead(load(recipe), orders, resume=False, overwrite=False, allow_changes=False, display=Silent())
        orders.give("end")
        return None
    order = orders.take()
    run = WatchedFollower(order["config"], Sampler(**order["sampler"]), orders, order["objective"])
    with suppress(Over):
        loop.train(run)
    return {"held": run.held, "freed": run.freed}


def begun(ranks: Ranks, *, recipe: str) -> str | None:
    """Why rank 0 does not begin the run of a recipe; the others do what it tells them."""
    os.chdir(Path(recipe).parent)
    orders = Orders(ranks)
    if ranks.rank:
        return orders.take()["order"]
    try:
        lead(load(recipe), orders, resume=False, overwrite=False, allow_changes=False, display=Silent())
    except ConfigError as error:
        return str(error)
    finally:
        orders.give("end")
    return None


class Late(ScriptedEngine):
    """Takes ``seconds`` for its first answer; with None, gives none until it is told to stop."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__(batch=64)
        self.seconds = seconds

    def poll(self, timeout_s: float | None = None) -> list[Any]:
        time.sleep(self.seconds or 0.01)
        return [] if self.seconds is None else super().poll(timeout_s)

    def cancel(self, ids: Any) -> None:
        super().cancel(ids)
        self.seconds = 0.0


def interrupted(ranks: Ranks, *, place: str, after: str, seconds: float | None) -> Any:
    """Asks rank 0 to stop in a round of generation, right ``after`` its first call of a function of torch.distributed,
    or ("") half a second later; then all generate once more. The others take ``seconds`` for their first shares.
    Returns what the interrupt says, the sizes of the groups of the second round, and how many rounds were ended."""
    ended: list[str] = []

    @contextmanager
    def held() -> Iterator[None]:
        ranks.gather(None)  # as weights are gathered: in two parts
        yield
        dist.get_rank()  # called nowhere else
        ended.append("round")

    orders = Orders(ranks)
    if ranks.rank:
        _follow(orders, Late(seconds), held)
        return len(ended)
    prompts, how = [Prompt(f"p{i}", text="x") for i in range(2 * ranks.size)], Sampling(max_tokens=8)
    said = ""
    with Interrupts(grace_s=0.5 if place == "after_grace" else 20.0) as interrupts:
        dealt = DealtEngine(ScriptedEngine(), orders, held, interrupts.kept_out)
        if after:
            _stop_after(after)
        elif place == "after_grace":
            signal.raise_signal(signal.SIGTERM)  # the grace begins
        else:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            with getattr(interrupts, place)("here"):
                generate(dealt, prompts, n=2, sampling=how)
        except Interrupted as error:
            said = str(error)
        orders.check()
        groups = generate(dealt, prompts, n=2, sampling=how)
        orders.give("end")
    return {"said": said, "groups": [len(group.rollouts) for group in groups], "ended": len(ended)}


def _follow(orders: Orders, engine: Late, held: Held) -> None:
    """What a rank other than 0 does until the end."""
    while (order := orders.take())["order"] != "end":
        if order["order"] == "check":
            orders.ranks.gather(None)
        else:
            generate_share(engine, orders.ranks, order, held)
            engine.seconds = 0.0


def _stop_after(name: str) -> None:
    """Sends this process SIGTERM after the next call of a function of torch.distributed."""
    real = getattr(dist, name)

    def once(*args: Any) -> None:
        setattr(dist, name, real)
        real(*args)
        signal.raise_signal(signal.SIGTERM)

    setattr(dist, name, once)
