"""Checks everything that can be checked before a model is loaded; ``plan`` reports all problems at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config, EvalConfig, RewardConfig, limits, validate
from ..config import load as read_recipe
from ..data import Dataset, fitting, prompt_order
from ..errors import ConfigError, ModelError, Problems
from ..eval.evaluate import Correct
from ..learner.machine import machine_notes, machine_problems
from ..learner.reference import in_bfloat16, teacher_in_bfloat16
from ..learner.value_runner import with_score_as_value, with_value_head
from ..models import decodable, files, loading, lora, positions
from ..models.backend import Backend
from ..models.lora import Adapters
from ..objective import Objective, preset
from ..objective.own import sources
from ..rewards import RewardSet
from ..rewards.gold_checks import Bar
from ..rollout.chat import Lengths, Renderer
from ..rollout.given import Demonstrations, encode
from ..runs.rollouts import Sampler
from ..types import Prompt
from ..utils.user_files import is_file_spec
from ..weights import stored_names
from . import compatibility, episodes, replaying, right, teaching
from .episodes import TRIED, EpisodePlan
from .epochs import with_steps
from .replaying import Replay

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start: checked configuration, objective, data, rewards and tokenizer; no weights yet."""

    config: Config
    objective: Objective
    train: Sequence[Prompt]
    eval: list[Prompt]
    rewards: RewardSet
    renderer: Renderer
    device: str
    fingerprint: str  # of the data
    longest: int  # tokens of the longest prompt
    notes: tuple[str, ...]
    correct: Correct  # whether a score counts as correct in accuracies
    sampler: Sampler  # of the rollouts that are trained on
    replay: Replay | None = None
    episodes: EpisodePlan | None = None
    demonstrations: Demonstrations | None = None

    @property
    def right(self) -> Correct:
        """Whether a completion counts as right in training, not in accuracies: see :func:`.right.right_of`."""
        return right.right_of(self.correct, self.rewards)


def plan(config: Config, *, found: Sequence[str] = (), bar: Bar | None = None) -> Plan:
    """Checks and loads everything but the weights; raises ConfigError with every problem found.

    ``found``: problems that are known already (with the run folder, for example), to be reported together with the
    rest. ``bar`` shows progress where checking takes long.
    """
    limits.refuse(config, found=found)  # absurd sizes first: the checks below would fill the memory
    problems = Problems(_with_invalid(config, found))
    of_model: list[str] = []

    # ---- each of these may fail by itself: all their problems are reported together
    objective = problems.attempt(lambda: preset(config.objective.preset, **config.objective.args))
    replay = replaying.prepare(config, objective, problems)
    problems += _objective_problems(objective, config, replay)
    problems += teaching.problems(config, objective)
    device = _device(config, problems)
    tokenizer = _tokenizer(config, problems, notes=of_model)
    problems += teaching.vocabulary_problems(config, tokenizer)
    data = problems.attempt(lambda: episodes.dataset(config))
    if config.demonstrates:
        return _of_demonstrations(config, objective, tokenizer, data, device, problems, of_model)
    specs, rewards = _rewards(config, data, problems)
    # A missing part has left its problem in the list; the checks below need all parts.
    if tokenizer is None or data is None or rewards is None or objective is None or device is None:
        raise ConfigError(problems)

    # ---- the rest needs prompts, and a tokenizer and rewards to check them with
    renderer = Renderer(tokenizer, stop=config.rollout.stop, eos_ids=files.end_ids(loading.folder(config.model)))
    prompts = [*data.train, *data.eval]
    rendered = [] if config.plays else prompts  # what an episode begins with is its environment's affair
    lengths = Lengths(renderer)
    problems += renderer.check(rendered, measured=lengths.add)
    problems += _replay_problems(replay, renderer, rewards, one_by_one=objective.advantage.per_reward)
    problems += rewards.check_golds(prompts, bar=bar, sets=config.set_names)
    if problems:
        raise ConfigError(problems)
    played, train, eval_, of_lengths, longest = _fitting(config, data, lengths)
    notes = [
        *of_model,
        *machine_notes(config, device),
        *data.notes,
        *(replay.notes if replay else ()),
        *of_lengths,
        *renderer.notes(rendered),
        *(episodes.notes(config) if config.plays else ()),
        *rewards.column_notes(prompts),
        *right.note(config, rewards),
        *(rewards.thought_notes() if renderer.opens_thought(rendered) else ()),
        *rewards.code,
        *compatibility.notes(objective, config, departs=replay is not None and not replay.follows),
    ]
    made = Plan(
        # With the rewards that the data name, so that config.toml says what judged.
        dataclasses.replace(config, rewards=specs), objective, train, eval_, rewards, renderer, device,
        data.fingerprint, longest, tuple(notes),
        right.correct_of(config, rewards),
        replay.sampler if replay else Sampler(config.cluster.rollout, config.learner.dtype), replay, played,
    )  # fmt: skip
    # Lengths are known now: do teacher and critic have the positions?
    most = most_tokens(made, training=True)
    teaching.refuse_short(config, most)
    if config.teacher.endpoint:
        made = dataclasses.replace(made, notes=(*made.notes, teaching.served_note(config, tokenizer, most)))
    return made


def _of_demonstrations(
    config: Config, objective: Objective | None, tokenizer: PreTrainedTokenizerBase | None, data: Dataset | None,
    device: str | None, problems: Problems, notes: Sequence[str],
) -> Plan:  # fmt: skip
    """The plan of a training on demonstrations: its rows as tokens. Raises ConfigError with every problem."""
    if tokenizer is None or data is None or objective is None or device is None:
        raise ConfigError(problems)
    renderer = Renderer(tokenizer)
    # What else could go wrong with a template shows in its first prompts, under a limit of time and memory.
    rendered = [p for p in (*data.train, *data.eval) if "token_ids" not in p.columns]  # others are tokens already
    problems += renderer.check(rendered[:TRIED], answered=True)
    limit = problems.attempt(lambda: loading.positions(config.model))
    problems += problems.attempt(lambda: _target_problems(config)) or []
    if problems:
        raise ConfigError(problems)
    parts = [
        problems.attempt(lambda rows=rows, what=what: encode(rows, renderer, config, limit=limit, what=what))
        for rows, what in ((data.train, "training"), (data.eval, "held-out"))
    ]
    if problems:
        raise ConfigError(problems)
    (train, of_train), (held, of_held) = (part for part in parts if part is not None)
    made = Demonstrations(train, held)
    config, of_steps = with_steps(config, [row.group.prompt for row in train])
    said = [*of_steps, *machine_notes(config, device), *renderer.notes(rendered)]
    said += compatibility.demonstration_notes(objective, config)
    return Plan(
        config, objective, [row.group.prompt for row in train], [row.group.prompt for row in held], RewardSet(()),
        renderer, device, data.fingerprint, made.longest, (*notes, *data.notes, *of_train, *of_held, *said),
        _right(config), Sampler(config.cluster.rollout, config.learner.dtype), demonstrations=made,
    )  # fmt: skip


def _right(config: Config) -> Correct:
    """Whether a given completion is to be learned: all are, but the rejected one of a pair."""
    return (lambda score: bool(score.value)) if config.prefers else (lambda score: True)


def _with_invalid(config: Config, found: Sequence[str]) -> list[str]:
    """The problems ``found`` and those of values, one line per key: reading a recipe may have found a key's already."""
    # The key stands in front of the colon.
    reported = {problem.partition(":")[0] for problem in found}
    return [*found, *(problem for problem in validate(config) if problem.partition(":")[0] not in reported)]


def _replay_problems(replay: Replay | None, renderer: Renderer, rewards: RewardSet, *, one_by_one: bool) -> list[str]:
    """Why the rollouts of an earlier run do not fit this one's tokenizer and rewards."""
    if replay is None:
        return []
    scored = replaying.reward_problems(replay, rewards, one_by_one=one_by_one)
    return replaying.token_problems(replay, renderer) + scored


def _tokenizer(config: Config, problems: Problems, *, notes: list[str]) -> PreTrainedTokenizerBase | None:
    """Checks the model's files, and loads the tokenizer if they have no problem."""
    own: dict[str, Any] = {"tokenizer": config.tokenizer, "chat_template": config.chat_template}
    found = problems.attempt(lambda: loading.check(config.model, notes=notes, **own))
    problems += (found or []) if config.model else []  # a missing model is reported as a problem of the recipe
    if found == [] and loading.is_here(config.model):
        notes += positions.notes(loading.load_config(config.model).get_text_config().to_dict())
        notes += lora.notes(config.model, config.lora)
        problems += decodable.problems(config)
        if config.cluster.rollout == "vllm":
            problems += stored_names.problems(config.model)
    # Only an empty list says that the files are right; None says that the check itself failed.
    return problems.attempt(lambda: loading.load_tokenizer(config.model, **own)) if found == [] else None


def objective_files(config: Config) -> dict[str, str]:
    """SHA-256 of the files of a user's own objective, by path below their folder, as this process has loaded them."""
    return sources(config.objective.preset) if is_file_spec(config.objective.preset) else {}


def follow(config: Config, sampler: Sampler, *, device: str, files_there: Mapping[str, str]) -> Plan:
    """The plan of a rank that follows another one: ``config`` was checked there, and prompts come from there.
    ``files_there``: what :func:`objective_files` is there. Raises ConfigError if it is something else here."""
    rewards = RewardSet(()) if config.demonstrates else RewardSet.from_config(config.rewards)
    own: dict[str, Any] = {"tokenizer": config.tokenizer, "chat_template": config.chat_template}
    renderer = Renderer(loading.load_tokenizer(config.model, **own), stop=config.rollout.stop)
    objective = preset(config.objective.preset, **config.objective.args)
    if objective_files(config) != files_there:
        raise ConfigError(
            f"objective.preset: {config.objective.preset}: another file lies there for this rank than for rank 0, so "
            "that they would train different objectives; copy the file, and what it imports, to all nodes"
        )
    return Plan(
        config, objective, (), [], rewards, renderer, device, "", 0, (),
        _right(config) if config.demonstrates else right.correct_of(config, rewards),
        sampler,
    )  # fmt: skip


def _objective_problems(objective: Objective | None, config: Config, replay: Replay | None) -> list[str]:
    """Why the objective does not fit the run."""
    # The check tries the objective on an example of these sizes; sizes below 1 are reported by validate().
    if objective is None or min(config.rollout.prompts, config.rollout.completions, config.rollout.max_tokens) < 1:
        return []
    given, departures = compatibility.GIVEN | step_rewards(config), ()
    if config.plays:
        given |= {"turns", "states"}
    if replay is not None:
        given, departures = given - replay.lacking, replay.departures
    if config.demonstrates:
        return compatibility.demonstration_problems(objective, config)
    problems = Problems()
    found = problems.attempt(lambda: compatibility.problems(objective, config, given=given, departures=departures))
    return [*problems, *(found or ())]


def _device(config: Config, problems: Problems) -> str | None:
    """Resolves the device of a recipe, and checks that it has what the recipe needs."""
    # A wrong name was reported by validate(): resolving it would report it again.
    if any(p.startswith("device:") for p in problems):
        return None
    device = problems.attempt(lambda: loading.resolve_device(config.device))
    if device:
        problems += machine_problems(config, device)
    return device


def _rewards(
    config: Config, data: Dataset | None, problems: Problems
) -> tuple[tuple[RewardConfig, ...], RewardSet | None]:
    """The recipe's rewards or, without any, those that the data name; both as settings and loaded."""
    specs = episodes.rewards_of(config, data.default_rewards if data else ())
    specs = tuple(spec for spec in specs if spec.name or spec.model)  # one without a name is a known problem
    if data and specs:
        problems += _unjudged_sets(config, specs)
    elif data:
        problems.append(
            "rewards: none given and the data name none of their own; add a [[rewards]] table with a built-in name "
            "or path/to/file.py:function"
        )
    rewards = problems.attempt(lambda: RewardSet.from_config(specs)) if specs else None
    if rewards is not None:
        _use_rewards(config, rewards, specs, problems)
    return specs, rewards


def _unjudged_sets(config: Config, specs: Sequence[RewardConfig]) -> list[str]:
    """The data sets, of several, that have no reward."""
    # A reward without sets judges all of them.
    judged = {name for spec in specs for name in spec.sets or config.set_names}
    return [
        f"rewards: none judges data set {name!r}, whose data name none of their own; name it in rewards.sets, or add a "
        "[[rewards]] table"
        for name in config.set_names
        if name not in judged
    ]


def _use_rewards(config: Config, rewards: RewardSet, specs: Sequence[RewardConfig], problems: Problems) -> None:
    """Connects loaded rewards with the settings that name them: the machines that compute them, and the one that
    accuracy is read from."""
    if config.cluster.reward_hosts:
        problems.attempt(lambda: rewards.use_hosts(config.cluster.reward_hosts, specs))
    verifier = config.eval.correct_reward
    judging = next((reward for reward in rewards.rewards if reward.name == verifier), None)
    problems += _curriculum_problems(config, rewards)
    if verifier and judging is None:
        problems.append(f"eval.correct_reward: got {verifier!r}, accepts {', '.join(rewards.names)}")
    if judging and (left := [name for name in config.set_names if judging.sets and name not in judging.sets]):
        problems.append(
            f"eval.correct_reward: got {verifier!r}, which does not judge data set {', '.join(left)}; leave it out: "
            "each set is judged by its first reward then"
        )


def _curriculum_problems(config: Config, rewards: RewardSet) -> list[str]:
    """Data sets whose completions neither pass nor fail."""
    if config.curriculum.share == 0 or config.eval.correct_at != EvalConfig().correct_at:
        return []
    found = []
    for name in config.set_names or ("",):
        judging = [r for r in rewards.rewards if not r.sets or name in r.sets]
        named = [r for r in judging if r.name == config.eval.correct_reward] or judging
        if named and all(r.model is not None for r in named):
            of_set = f" of {name}" if name else ""
            found.append(
                f"curriculum.share: got {config.curriculum.share:g}, but the scores of reward model {named[0].name!r} "
                f"do not say which completions{of_set} pass; set eval.correct_at to the score from which they do, or "
                "add a reward that verifies them"
            )
    return found


def _fitting(
    config: Config, data: Dataset, lengths: Lengths
) -> tuple[EpisodePlan | None, Sequence[Prompt], list[Prompt], list[str], int]:
    """The episodes of an environment, the prompts for training and evaluation that are short enough, notes on the
    others, and the length of the longest. Raises ConfigError if too few are left, or if a prompt leaves no room for a
    completion."""
    problems = Problems()
    # What is rendered of a row is its environment's affair.
    fitted = (data.train, data.eval, []) if config.plays else problems.attempt(lambda: _fit(config, data, lengths))
    if fitted is None:
        raise ConfigError(problems)
    train, eval_, notes = fitted
    if too_few := _too_few(config, train):
        raise ConfigError([*problems, *too_few])
    limit = problems.attempt(lambda: loading.positions(config.model))
    played = None
    if config.plays:
        tried = [*episodes.tried(config, train), *episodes.tried(config, eval_)]
        played = problems.attempt(lambda: episodes.prepare(config, tried, lengths.renderer, positions=limit))
        longest = played.opening if played else 0
    else:
        longest = max(map(lengths, [*train, *eval_]), default=0)
        problems += length_problems(_most_tokens(config), longest=longest, limit=limit)
    problems += problems.attempt(lambda: _target_problems(config)) or []
    if problems:
        raise ConfigError(problems)
    return played, train, eval_, notes, longest


def _too_few(config: Config, train: Sequence[Prompt]) -> list[str]:
    """Data sets that have fewer prompts than a step draws of them."""
    wanted = config.rollout.prompts
    if not config.set_names:
        if len(train) >= wanted:
            return []
        return [
            f"rollout.prompts: got {wanted} per step, but only {len(train)} training prompts are there; lower "
            "rollout.prompts or give more data"
        ]
    order = prompt_order(config, train)
    return [
        f"rollout.prompts: got {wanted} per step, of which data set {name!r} has up to {most} by its weight, but only "
        f"{size} training prompts; lower rollout.prompts or its weight, or give more data"
        for name, size, share in zip(order.names, order.sizes, order.schedule.shares, strict=True)
        if size < (most := math.ceil(wanted * share))
    ]


def _target_problems(config: Config) -> list[str]:
    """Lists problems of ``lora.targets``; none for a model that is not downloaded yet, whose layers are unknown."""
    if not config.lora.rank or not loading.is_here(config.model):
        return []
    return lora.target_problems(loading.skeleton(loading.load_config(config.model)), config.lora.targets)


def step_rewards(config: Config) -> frozenset[str]:
    """``step_rewards`` if a reward may return them: a process reward model, or a function (known once it runs)."""
    may = bool(config.environment.name)
    may |= any(r.args.get("step_mark") if r.model else is_file_spec(r.name) for r in config.rewards)
    return frozenset({"step_rewards"} if may else ())


def _fit(config: Config, data: Dataset, count: Callable[[Prompt], int]) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """The prompts for training and evaluation that fit ``data.max_prompt_tokens``, after ``data.overlong``."""
    out, notes = [], []
    for name, prompts in (("training", data.train), ("evaluation", data.eval)):
        short, found = fitting(config, prompts, count=count, what=name)
        out.append(short)
        notes += found
    return out[0], out[1], notes


def most_tokens(plan: Plan, *, training: bool = False, positions: int | None = None) -> int:
    """The most tokens that a prompt and its completion take together; those that are trained on, or any. Episodes end
    at the model's ``positions``."""
    most = plan.config.rollout.max_tokens if training else max(_most_tokens(plan.config).values())
    return plan.longest + (plan.episodes.most_tokens(most, positions) if plan.episodes else most)


def _most_tokens(config: Config) -> dict[str, int]:
    return {"rollout.max_tokens": config.rollout.max_tokens, "eval.max_tokens": config.eval.max_tokens}


def length_problems(tokens: Mapping[str, int], *, longest: int, limit: int | None) -> list[str]:
    """The settings that let a prompt of ``longest`` tokens and its completion exceed the model's ``limit`` positions.
    ``tokens``: the limit of a completion's tokens by the setting's name, 0 if it is not set."""
    found = []
    for key, most in tokens.items():
        if not limit or not most or longest + most <= limit:
            continue
        lower = f"lower it to {limit - longest}" if limit > longest else ""
        shorter = f'set data.max_prompt_tokens = {limit - most} and data.overlong = "drop" or "truncate"'
        ways = [way for way in (lower, shorter if limit > most else "", "take a model with more positions") if way]
        found.append(
            f"{key}: got {most} after prompts of up to {longest} tokens, more than the {limit} positions of the model; "
            + ", or ".join(ways)
        )
    return found


def read(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads the configuration of a recipe, :func:`checked`."""
    return checked(lambda: read_recipe(recipe, overrides))


def checked(reading: Callable[[], Config]) -> Config:
    """The configuration that ``reading`` returns. If it has problems, checks data, model and rewards as well, so that
    one ConfigError reports everything."""
    try:
        return reading()
    except ConfigError as error:
        if error.config is not None:
            plan(error.config, found=error.problems)
        raise


def load(plan: Plan, *, device: str = "") -> tuple[Any, Adapters | None]:
    """The model of a plan on its device, its vocabulary checked against the tokenizer, and the adapters inside it if
    the plan has some. ``device``: another one; ``meta`` for weights whose values come from elsewhere
    (:func:`.loading.allocate`)."""
    c, device = plan.config, device or plan.device
    if c.lora.rank:
        model = lora.load_base(c.model, c.lora, device=device, dtype=c.learner.dtype)
    else:
        model = loading.load_model(c.model, device=device)
    # On meta nothing was read: memory for values that come from rank 0.
    if device == "meta":
        loading.allocate(model)
    loading.check_vocab(model, plan.renderer.tokenizer)
    limit = positions.positions_of(model.config.get_text_config().to_dict())
    if plan.demonstrations and limit and plan.longest > limit:
        raise ModelError(f"sft.max_tokens: rows have up to {plan.longest} tokens, and the model {limit} positions")
    if not (plan.episodes or plan.demonstrations) and (
        problems := length_problems(_most_tokens(plan.config), longest=plan.longest, limit=limit)
    ):
        raise ModelError("\n".join(problems))  # plan() reports it, except for a model not downloaded by then
    return model, lora.attach(model, c.lora, name=c.model, seed=c.seed) if c.lora.rank else None


def load_teacher(plan: Plan, backend: Backend | None = None, *, device: str = "") -> Any:
    """The teacher of a plan, its linear weights in the type that ``teacher.dtype`` means. ``device`` as in
    :func:`load`."""
    c, device = plan.config, device or plan.device
    name = c.teacher.model
    low = teacher_in_bfloat16(c, stored=files.stored_types(loading.folder(name)), backend=backend)
    model = lora.load_bfloat16(name, device=device, biases=False) if low else loading.load_model(name, device=device)
    if device == "meta":
        loading.allocate(model)
    return model


def load_critic(plan: Plan) -> Any:
    """A plan's critic on its device: a reward model, or a language model with a new head of one output."""
    c = plan.config
    if c.critic.model and loading.scores(c.critic.model):
        model = with_score_as_value(loading.load_scorer(c.critic.model, device=plan.device))
    else:
        model = loading.load_model(c.critic.model or c.model, device=plan.device)
        model = with_value_head(model, std=c.critic.head_std, seed=c.seed)
    loading.check_vocab(model, plan.renderer.tokenizer)
    return model


def load_reference(plan: Plan, backend: Backend | None = None, *, device: str = "") -> Any:
    """A second copy of a plan's model as the frozen reference, its linear weights in bfloat16 where that changes
    nothing and needs less memory. ``device`` as in :func:`load`."""
    c, device = plan.config, device or plan.device
    if in_bfloat16(c, stored=files.stored_types(loading.folder(c.model)), backend=backend):
        model = lora.load_bfloat16(c.model, device=device, biases=False)
    else:
        model = loading.load_model(c.model, device=device)
    if device == "meta":
        loading.allocate(model)
    return model
