"""Assembles a run: the only module that knows which implementation is behind which protocol."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import Config, to_table
from ..data import prompt_order
from ..diagnostics.health import Facts, Health
from ..diagnostics.monitors import Monitors
from ..distributed import Ranks
from ..distributed.orders import BroadcastRollouts, DealtEngine, Held, Orders
from ..estimate.planned import planned
from ..learner import Learner, Solo
from ..learner.critic import Critic
from ..learner.placement import Placement
from ..learner.teacher import LocalTeacher, Teacher
from ..models import backends, loading
from ..models.backend import Backend
from ..models.lora import Adapters
from ..rollout import Engine, RolloutSource
from ..rollout.asynchronous import AsyncRollouts
from ..rollout.endings import ModelFacts, facts_of
from ..rollout.given import GivenRollouts
from ..rollout.replay import ReplayRollouts
from ..rollout.shared import SharedEngine
from ..rollout.stale import StaleRollouts
from ..rollout.sync import SyncRollouts
from ..rollout.torch_engine import TorchEngine
from ..runs import RunFolder, Trackers, checkpoint_files
from ..runs.journal import Journal
from ..runs.writer import Writer
from ..utils import ray_cluster, secrets
from ..utils.console import Display
from ..utils.memory import Peaks, return_large_blocks
from ..utils.signals import Interrupts
from ..weights import InPlace, WeightSync
from . import planning, teaching
from .inputs import inputs_of, needs_reference
from .memory_record import MemoryRecord
from .planning import Plan
from .policy_program import PolicyProgram
from .policy_state import PolicyState
from .program import Timetable
from .sft_program import SftProgram, SftState
from .team import Team, Together

if TYPE_CHECKING:
    from ..rollout.vllm.ray_servers import RayServers
    from ..rollout.vllm.server import Servers


@dataclass(frozen=True, slots=True)
class Parts:
    """What every rank of a run has."""

    model: Any
    adapters: Adapters | None
    learner: Learner
    backend: Backend | None
    held: Held  # makes sharded weights whole on every rank
    placement: Placement  # where the learner's tensors are
    critic: Critic | None = None

    def engine(self, plan: Plan) -> TorchEngine:
        """An embedded engine on this rank's model."""
        config = plan.config
        autocast = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
        return TorchEngine(
            self.model, plan.renderer, batch=config.rollout.batch, autocast=autocast, backend=self.backend
        )


def parts(plan: Plan, ranks: Ranks | None = None) -> Parts:
    """Loads the model and makes a learner of it; with ``ranks``, this rank's."""
    config = plan.config
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = backends.of(config, plan.device)
    if backend is not None:
        backend.start()
    if ranks is not None and sharded(config):
        model, adapters, reference, teacher = _sharded(plan, ranks)
        held: Held = functools.partial(_gathered, model)
    else:
        model, adapters = planning.load(plan)
        reference = planning.load_reference(plan, backend) if needs_reference(plan) else None
        teacher = planning.load_teacher(plan, backend) if config.teacher.model else None
        held = nullcontext
    learner = Learner(
        model, config=config.learner, objective=plan.objective, optimizer_steps=config.policy_steps,
        temperature=config.rollout.temperature, reference=reference, adapters=adapters,
        fused=config.kernels == "auto", backend=backend, parallel=ranks,
        offloaded=config.cluster.offload == "optimizer",
    )  # fmt: skip
    learner.reference_version = learner.version  # both are the model that the run begins with
    if teacher is not None:
        learner.teacher = LocalTeacher(teacher, settings=learner.settings, backend=backend, parallel=ranks or Solo())
    elif config.teacher.endpoint:
        learner.teacher = _teacher_on_server(config, ranks)
    learner.measure_entropy = plan.sampler.engine == "vllm"  # servers do not report entropies
    placement = Placement(learner)
    if config.cluster.colocate:
        placement.leave()  # servers start on the same GPUs
        if ranks is not None:
            ranks.gather(None)  # on every rank
    return Parts(model, adapters, learner, backend, held, placement, _critic(plan, ranks))


def _teacher_on_server(config: Config, ranks: Ranks | None) -> Teacher:
    from ..rollout.vllm.teacher import EndpointTeacher

    return EndpointTeacher(
        teaching.endpoint_of(config), request_timeout_s=config.cluster.request_timeout_s, wait_s=config.teacher.wait_s,
        parallel=ranks or Solo(),
    )  # fmt: skip


def _critic(plan: Plan, ranks: Ranks | None) -> Critic | None:
    """The critic of an objective that needs one. Every rank has all of its weights."""
    if "values" not in plan.objective.needs:
        return None
    config = plan.config
    return Critic(
        planning.load_critic(plan), config=config.critic, learner=config.learner,
        optimizer_steps=config.optimizer_steps, parallel=ranks,
    )  # fmt: skip


def sharded(config: Config) -> bool:
    """Whether several ranks share the weights, rather than each having all of them."""
    return config.cluster.learner > 1 and config.cluster.shard != "none"


def _sharded(plan: Plan, ranks: Ranks) -> tuple[Any, Adapters | None, Any, Any]:
    """The model of which this rank holds some rows, its adapters, and likewise the reference and the teacher. Rank 0
    alone reads the files."""
    from ..distributed import sharding  # imports FSDP, which takes long

    if ranks.device.type == "cpu":  # a GPU's memory is torch's own affair
        return_large_blocks()
    how = plan.config.cluster.shard
    if how == "auto":
        how = "hsdp" if ranks.place.nodes > 1 else "fsdp"
    over = sharding.mesh(ranks.place, str(ranks.device), how)
    offload = plan.config.cluster.offload == "all"
    low = torch.bfloat16 if plan.config.learner.dtype == "bfloat16" else None
    memory = sharding.shared_memory(over)
    if ranks.device.type == "cpu":
        ranks.exchange = "shared memory" if memory else "gloo"
    # The other ranks make tensors without values, which rank 0 fills.
    device = "meta" if ranks.rank else "cpu"

    def placed(model: Any) -> Any:
        # Before the model is sharded: afterwards it holds this rank's rows.
        source = None if ranks.rank else sharding.tensors_of(model)
        sharding.shard(model, over, offload=offload, low=low, memory=memory)
        sharding.distribute(model, source, ranks)
        return model

    model, adapters = planning.load(plan, device=device)
    if adapters is not None:  # the fingerprint of frozen weights that only rank 0 has seen
        adapters = dataclasses.replace(adapters, base=ranks.gather(adapters.base)[0])
    placed(model)
    reference = placed(planning.load_reference(plan, device=device)) if needs_reference(plan) else None
    teacher = placed(planning.load_teacher(plan, device=device)) if plan.config.teacher.model else None
    return model, adapters, reference, teacher


def _gathered(model: Any) -> AbstractContextManager[None]:
    from ..distributed import sharding

    return sharding.gathered(model)


def build(
    plan: Plan,
    folder: RunFolder,
    trackers: Trackers,
    display: Display,
    interrupts: Interrupts,
    ending: contextlib.ExitStack,
    orders: Orders | None = None,
) -> PolicyProgram:
    """Loads the model and assembles the training of a policy; with ``orders``, that of rank 0 of several. ``ending``
    gets what must be closed however it ends."""
    # Order matters throughout: memory is measured from the beginning, servers start when the learner has its place, and
    # what ends is registered as it begins.
    config = plan.config
    memory = MemoryRecord(folder, _planned(plan), Peaks(plan.device))  # before anything is loaded
    if not folder.resumed:  # a refused resume must leave everything as it was
        memory.begin()
    made = parts(plan, None if orders is None else orders.ranks)
    # Before servers start, which take what is left of a GPU that they share.
    plan.rewards.load(device=plan.device, decode=plan.renderer.decode)
    if config.teacher.endpoint:
        teaching.meet(made.learner.teacher, plan.renderer.tokenizer, folder, display, ending)
    # ---- what generates, and how it gets weights
    engine, weights = _sampler(plan, made, folder, display, ending, orders, interrupts)
    if config.cluster.staleness:
        engine, weights, rollouts = _asynchronous(plan, engine, weights, folder, ending)
        # Evaluations ask through the view that is not generating ahead.
        player = rollouts.engine
    else:
        # Those of an engine on servers say how much room these have.
        player = _player(plan, engine, getattr(engine, "facts", facts_of(made.model)), ending)
        rollouts = _rollouts(plan, player, made)
    if orders is not None and not isinstance(weights, InPlace):
        weights = Together(weights, orders)
    # ---- what the loop runs
    writer = Writer(display.line, background=config.checkpoint.background)
    # The writer saves the live tensors in the background, so an update must wait until it has read them.
    made.learner.before_update, made.learner.tell = writer.release, display.line
    if made.critic is not None:
        made.critic.before_update = writer.release
    of_kind, state = (SftProgram, SftState()) if config.demonstrates else (PolicyProgram, PolicyState())
    program = of_kind(
        plan=plan, model=made.model, engine=engine, policy=made.learner, adapters=made.adapters, rollouts=rollouts,
        critic=made.critic,
        source=_source(rollouts, engine, made, orders),
        monitors=Monitors(plan.rewards.rewards, shuffled=in_random_order(config)),
        health=Health(Facts.of(to_table(config))),
        timetable=Timetable(config.steps, config.eval.every, config.checkpoint.every, config.checkpoint.keep),
        device=plan.device, fingerprint=plan.fingerprint, inputs=inputs_of(plan), folder=folder, trackers=trackers,
        display=display, interrupts=interrupts, memory=memory, writer=writer, weights=weights, backend=made.backend,
        team=Team(orders, sharded=sharded(config)), player=player, state=state,
    )  # fmt: skip
    # Only now, because what an interrupt says depends on the program.
    rollouts.interruptible = lambda: interrupts.after_grace(program.saved())
    return program


def _planned(plan: Plan) -> dict[str, Any]:
    return planned(
        plan.config, objective=plan.objective, prompt=plan.longest, held_out=len(plan.eval), device=plan.device
    )


def in_random_order(config: Config) -> bool:
    """Whether chance alone decides which prompt of a step is before which."""
    return not config.set_names and config.curriculum.share == 0 and all(one.shuffle for one in config.sets)


def _of_plan(plan: Plan) -> dict[str, Any]:
    """What every source of rollouts needs."""
    return {
        "config": plan.config, "objective": plan.objective, "prompts": plan.train, "rewards": plan.rewards,
        "correct": plan.right,
    }  # fmt: skip


def _player(plan: Plan, engine: Engine, facts: ModelFacts, ending: contextlib.ExitStack) -> Engine:
    """What generates rollouts: the engine, or episodes that are played with it."""
    return plan.episodes.play(engine, facts, ending) if plan.episodes else engine


def _asynchronous(
    plan: Plan, engine: Engine, weights: WeightSync, folder: RunFolder, ending: contextlib.ExitStack
) -> tuple[Engine, WeightSync, AsyncRollouts]:
    """Rollouts that are generated while the learner computes, and the engine for what is asked beside them."""
    from ..rollout.vllm.engine import VllmEngine
    from ..weights.publisher import Publisher
    from ..weights.shared import PublishedAlone

    assert isinstance(engine, VllmEngine)
    assert isinstance(weights, Publisher)
    shared = SharedEngine(engine)
    # ending runs backwards: the rollouts are closed before the engine that they use.
    ending.callback(shared.close)
    # The learner waits for evaluations and baselines: not for all groups that were asked for before them, too.
    beside = shared.view("beside", first=True)
    # Each caller has episodes of its own: they are played in its thread.
    ahead = _player(plan, shared.view("ahead"), engine.facts, ending)
    own = _player(plan, beside, engine.facts, ending)
    rollouts = AsyncRollouts(
        own, ahead=ahead, keeper=Journal(folder.folder), idle=lambda: shared.idle_s,
        covered=lambda: checkpoint_files.newest_step(folder.checkpoints), **_of_plan(plan),
    )  # fmt: skip
    rollouts.gather_in_background()
    ending.callback(rollouts.close)
    return beside, PublishedAlone(weights, shared), rollouts


def _rollouts(plan: Plan, engine: Engine, made: Parts) -> SyncRollouts | ReplayRollouts | GivenRollouts:
    """What generates the rollouts, or reads those of an earlier run, or demonstrations."""
    config, replay = plan.config, plan.replay
    if plan.demonstrations is not None:
        return GivenRollouts(plan.demonstrations, order=prompt_order(config, plan.train), config=config)
    if replay is not None:
        return ReplayRollouts(
            replay.recorded, follows=replay.follows, config=config, objective=plan.objective, correct=plan.right,
            facts=facts_of(made.model),
        )  # fmt: skip
    return (StaleRollouts if config.rollout.stale_steps else SyncRollouts)(engine, **_of_plan(plan))


def _source(
    rollouts: SyncRollouts | ReplayRollouts | GivenRollouts, engine: Engine, made: Parts, orders: Orders | None
) -> RolloutSource:
    """The source of the loop's rollouts."""
    source: RolloutSource = rollouts
    if rollouts.config.cluster.colocate:
        from ..rollout.vllm.engine import VllmEngine
        from .turns import TurnsOfSource

        assert isinstance(engine, VllmEngine)
        source = TurnsOfSource(source, made.placement, engine)
    return source if orders is None else BroadcastRollouts(source, orders)


def _sampler(
    plan: Plan,
    made: Parts,
    folder: RunFolder,
    display: Display,
    ending: contextlib.ExitStack,
    orders: Orders | None,
    interrupts: Interrupts,
) -> tuple[Engine, WeightSync]:
    """The engine, and how it gets the policy's weights. ``ending`` ends what must not outlive the run."""
    if plan.config.cluster.rollout == "vllm":
        return _on_servers(plan, made, folder, display, ending, orders)
    own = made.engine(plan)
    return own if orders is None else DealtEngine(own, orders, made.held, interrupts.kept_out), InPlace()


def _started_servers(plan: Plan, folder: Path, display: Display) -> Servers | RayServers:
    """The servers that the run starts: here, or on Ray, where this process was started there."""
    from ..rollout.vllm import launch, ray_servers

    files = loading.folder(plan.config.model)
    assert files is not None, "the model was loaded from there"
    if ray_cluster.INSIDE in os.environ:
        return ray_servers.servers(plan.config, model=files, folder=folder, tell=display.line)
    return launch.servers(plan.config, model=files, device=plan.device, folder=folder)


def _on_servers(
    plan: Plan, made: Parts, folder: RunFolder, display: Display, ending: contextlib.ExitStack, orders: Orders | None
) -> tuple[Engine, WeightSync]:
    """An engine on vLLM servers: those of the recipe, or those that are started here."""
    from ..rollout.vllm import handshake, remote
    from ..rollout.vllm.endpoint import Endpoint
    from ..rollout.vllm.engine import VllmEngine
    from ..weights import choose

    cluster, facts = plan.config.cluster, facts_of(made.model)
    token = secrets.token("TREW_SERVER_TOKEN")
    endpoints = tuple(Endpoint.parse(address, token) for address in cluster.endpoints)
    restart = stop = None
    lives: list[str | None] = []
    backend = handshake.ENGINES[cluster.sync]
    # ---- the recipe's servers, or servers that are started here
    if endpoints:
        # None for servers without trew serve, which nobody starts again.
        waited = [remote.wait_for(endpoint, tell=display.line) for endpoint in endpoints]
        lives = [None if found is None else found.life for found in waited]
        restart = remote.Returns(endpoints, lives) if any(lives) else None
    else:
        servers = ending.enter_context(_started_servers(plan, folder.folder / "servers", display))
        display.line(
            f"note: starting {cluster.servers} vLLM server{'s' * (cluster.servers > 1)}; logs are in "
            f"{folder.folder / 'servers'}"
        )
        servers.start()
        endpoints, restart, stop = servers.endpoints, servers.restart, servers.stop
        backend = servers.backend
    expected = handshake.Expected(
        plan.config.learner.dtype, facts.vocabulary, planning.most_tokens(plan, positions=facts.positions),
        sleeps=cluster.colocate, backend=backend, plays=plan.config.plays, started=not cluster.endpoints,
        keeps=cluster.staleness > 0 and cluster.in_flight == "keep",
    )  # fmt: skip
    # A server that does not fit ends the run here, before it has been asked for anything.
    for endpoint, life in itertools.zip_longest(endpoints, lives):
        own = dataclasses.replace(expected, served=life is not None)
        handshake.check(endpoint, own, root=choose.folder_of(backend, folder.folder))
    # Episodes end there, too: a server refuses what is longer each time that it is asked.
    rooms = [] if plan.episodes is None else [facts.positions, *map(handshake.room, endpoints)]
    limited = dataclasses.replace(facts, positions=min((n for n in rooms if n), default=facts.positions))

    def tell(text: str) -> None:
        display.warn(text)
        folder.event(text)

    engine = VllmEngine(
        endpoints, plan.renderer, facts=limited, request_timeout_s=cluster.request_timeout_s,
        sync_timeout_s=cluster.sync_timeout_s, in_flight=cluster.in_flight, restart=restart, stop=stop, tell=tell,
    )  # fmt: skip
    weights = choose.publisher(
        plan.config, device=plan.device, model=made.model.config, facts=facts, run=folder.folder, endpoints=endpoints,
        backend=backend, tell=tell,
    )  # fmt: skip
    ending.callback(weights.close)
    if not cluster.colocate:
        return engine, weights
    from .turns import TurnsOfWeights

    # With several ranks: none may go on before all have left the GPUs (see turns).
    meet = (lambda: None) if orders is None else functools.partial(orders.ranks.gather, None)
    return engine, TurnsOfWeights(weights, made.placement, meet)
