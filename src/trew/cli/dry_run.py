"""``trew train --dry-run``: runs every check that precedes loading weights, and prints what a run would do.

The first part is the resolved configuration as a complete recipe; comments after values say where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config, apply_overrides, dumps, read_table
from ..runs import redact_config
from .main import visible
from .mixture import mixture_lines

if TYPE_CHECKING:
    from ..rewards import RewardSet
    from ..training.planning import Plan
    from ..types import Prompt
    from ..utils.console import Display

SHOWN = 3  # prompts
LINES = 40  # lines of a prompt, before its middle is left out
REMARK = 44  # column of the comments after values


def origins(
    recipe: Path, overrides: Sequence[str] = (), *, out: bool = False, own: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Where a recipe's keys got their values, by dotted name; keys that are missing here have their defaults.

    ``own`` holds the settings of a run that is being resumed.
    """
    file = read_table(recipe)
    found = dict.fromkeys(_keys(file), recipe.name)
    # Of a resumed run everything but ``out`` comes from its own file.
    if own is not None:
        found = {key: "the run's config.toml" for key in _keys(own) if key != "out"} | {"out": recipe.name}
    # read_table has put this in where the recipe names none.
    if file["out"] == f"runs/{recipe.stem}":
        found["out"] = "the recipe's name"
    for text in overrides:
        given: dict[str, Any] = {}
        apply_overrides(given, [text])
        key = text.partition("=")[0].strip()
        found = {k: where for k, where in found.items() if not f"{k}.".startswith(f"{key}.")}  # replaced as a whole
        found |= dict.fromkeys(_keys(given), "--set")
    return found | ({"out": "--out"} if out else {})


def _keys(table: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            value = {str(i): v for i, v in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{where}{name}.")
        else:
            yield f"{where}{name}"


def _implied(config: Config) -> dict[str, str]:
    """Where values come from that another setting decides, unless the recipe gives them."""
    if not config.demonstrates:
        return {}
    return {"objective.preset": "by data.task"} | ({} if config.sft.epochs else {"sft.epochs": "as steps is given"})


def annotated(config: Config, given: Mapping[str, str], *, own_rewards: bool = False) -> list[str]:
    """The configuration as TOML, with a comment after each given value; ``own_rewards``: the rewards are the task's."""
    given = {**_implied(config), **given}
    lines, section, number = [], "", -1
    for line in redact_config(dumps(config)).rstrip().splitlines():
        if line.startswith("[["):
            name = line.strip("[]")
            # Counts the [[...]] tables of one name: 0 again at another name.
            number = number + 1 if section.startswith(f"{name}.") else 0
            section = f"{name}.{number}."
        elif line.startswith("["):
            section = f"{line.strip('[]')}."
        key, equals, _ = line.partition(" = ")
        # A setting of several keys (an inline table) may have several origins.
        froms = dict.fromkeys(where for k, where in given.items() if f"{k}.".startswith(f"{section}{key}."))
        if own_rewards and section.startswith("rewards.") and key in ("name", "args"):
            froms = {"the task's own": None}
        lines.append(f"{line:<{REMARK - 2}}  # {', '.join(froms)}" if equals and froms else line)
    return lines


def show(
    config: Config,
    *,
    given: Mapping[str, str],
    found: Sequence[str] = (),
    resume: bool = False,
    allow_changes: bool = False,
    edited: Sequence[str] = (),
) -> None:
    """Makes the checks of a run, raises the same ConfigError with every problem, and prints what would run.

    ``given`` comes from :func:`origins`; ``found`` are problems already known; ``resume`` and ``allow_changes`` are
    those of a run; ``edited`` are the parts of the recipe that a resumed run does not follow. Writes no file.
    """
    from ..data import prompt_order
    from ..training import planning
    from ..training.changes import FREE_IN_A_RUN, check_changes
    from ..utils.console import Display

    display = Display()
    # Raises for everything wrong, so that what follows is of a run that could start.
    plan = planning.plan(config, found=found, bar=display.bar)
    given_now = dumps(plan.config)
    # With --resume: changes that a run would refuse raise here, others are listed below.
    changes = check_changes(Path(plan.config.out), given_now, free=FREE_IN_A_RUN, allow=allow_changes) if resume else []
    # ---- the recipe
    display.line("# The resolved recipe. Values without a comment are defaults.")
    display.line("\n".join(annotated(plan.config, given, own_rewards=not config.rewards)))
    if changes or edited:
        _heading(display, "settings that have changed since the run began")
        for change in (*changes, *edited):
            display.line(change)
    # ---- what would be learned, and from what
    _heading(display, f"objective: {plan.objective.name}")
    display.line(f"{plan.objective.equation()}\n(trew explain {config.objective.preset} says more)")
    if plan.demonstrations is not None:
        _rows(display, plan)
    else:
        _data(display, plan)
        # In the order of the run, so that these are its first prompts.
        order = prompt_order(plan.config, plan.train)
        first = [plan.train[index] for index in order.take(0, min(SHOWN, len(plan.train)))]
        for number, (prompt, (text, count)) in enumerate(zip(first, _as_read(plan, first), strict=True), 1):
            _prompt(display, plan, prompt, text, f"prompt {number} of step 1: {prompt.uid}, {count} tokens")
        _ends(display, plan)
    # ---- what it would take
    _plan(display, plan)


def _rows(display: Display, plan: Plan) -> None:
    """Prints demonstrations, and which of their tokens are learned."""
    from . import dry_rows

    _heading(display, "data")
    for line in dry_rows.data_lines(plan):
        display.line(line)
    for heading, lines in dry_rows.row_lines(plan):
        _heading(display, heading)
        display.line("\n".join(lines))


def _heading(display: Display, text: str) -> None:
    display.line(f"\n── {text} {'─' * max(3, 76 - len(text))}")


def _data(display: Display, plan: Plan) -> None:
    """Prints the number and lengths of prompts, and what each reward finds in them."""
    _heading(display, "data and rewards")
    if plan.episodes is not None:  # what the model reads is not the row
        have = f"the openings that were tried have up to {plan.longest} tokens"
    else:
        have = f"training prompts have {spread(sorted(len(plan.renderer.encode(p)) for p in plan.train))}"
    display.line(f"data: {len(plan.train)} training and {len(plan.eval)} held-out prompts; {have}")
    for line in mixture_lines(plan.config, plan.train, plan.eval):
        display.line(line)
    for line in reward_lines(plan.rewards, [*plan.train, *plan.eval]):
        display.line(line)
    for note in plan.notes:
        display.line(f"note: {note}")


def spread(lengths: Sequence[int]) -> str:
    """Says how long sorted rows are.

    >>> spread([7, 7]), spread([3, 4, 9])
    ('7 tokens each', '3 to 9 tokens, half of them at most 4')
    """
    if lengths[0] == lengths[-1]:
        return f"{lengths[0]} tokens each"
    return f"{lengths[0]} to {lengths[-1]} tokens, half of them at most {lengths[(len(lengths) - 1) // 2]}"


def reward_lines(rewards: RewardSet, prompts: Sequence[Prompt]) -> list[str]:
    """One line per reward on what was checked with these prompts; wrong golds have already ended the checks."""
    from ..rewards.builtin.kinds import KINDS
    from ..rewards.gold_checks import applies

    lines = []
    for reward in rewards.rewards:
        weight = f"reward {reward.name}: weight {reward.weight:g}{', a gate' if reward.gate else ''}"
        if reward.model is not None:
            says = "a reward model; a run loads its weights when it starts"
        elif reward.function is not None:
            served = sum(applies(reward, prompt) for prompt in prompts)
            says = f"{reward.kind} applies to {served} of {len(prompts)} rows; trew rewards test tries it on answers"
        else:
            kind = KINDS[reward.kind]
            served = sum(applies(reward, prompt) for prompt in prompts)
            says = f"applies to {served} of {len(prompts)} rows"
            if kind.self_answer is not None:
                says += ", whose golds all score 1"
            elif kind.looks_for:
                says += ", whose golds are all readable"
        lines.append(f"{weight}; {says}")
    return lines


def _as_read(plan: Plan, prompts: Sequence[Prompt]) -> list[tuple[str, int]]:
    """Prompts as the model reads them, each with its number of tokens; with an environment, how episodes begin."""
    from ..training import episodes

    if plan.episodes is not None:
        return episodes.openings(plan.config, plan.episodes, prompts)
    return [(plan.renderer.render(prompt), len(plan.renderer.encode(prompt))) for prompt in prompts]


def _prompt(display: Display, plan: Plan, prompt: Prompt, text: str, heading: str) -> None:
    """Prints one prompt as the model reads it, ``text``, between marks that make trailing white space visible."""
    _heading(display, heading)
    lines = text.split("\n")
    if len(lines) > LINES:
        half = LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    display.line("\n".join(f"│ {visible(line)}" for line in lines))
    for name, value in prompt.columns.items():
        display.line(f"  {name} = {_short(repr(value))}")
    for line in gold_lines(plan.rewards, prompt):
        display.line(f"  {line}")


def gold_lines(rewards: RewardSet, prompt: Prompt) -> list[str]:
    """For each built-in reward, an answer to this prompt that is known to be correct, and its score."""
    from ..rewards.builtin.kinds import KINDS, graded
    from ..rewards.known_answers import known_answers

    lines = []
    for reward in rewards.rewards:
        # Functions and models of the user's own have no answers that are known to be right.
        if not reward.is_builtin or not reward.serves(prompt):
            continue
        kind = KINDS[reward.kind]
        right = next((p for p in known_answers(reward.kind, prompt.columns, reward.args) if p.family == "right"), None)
        found = kind.gold(prompt.columns)
        if right is None or found is None:
            continue
        verdict = graded(kind, right.text, found[0], {**reward.args, **found[1]})
        lines.append(f"the answer {_short(repr(right.text))} scores {verdict.score:g} with {reward.name}")
    return lines


def _ends(display: Display, plan: Plan) -> None:
    """Prints what ends a completion: wrong stop tokens are the usual cause where every completion is truncated."""
    renderer = plan.renderer
    _, strings = renderer.split_stop(renderer.stop)
    tokens = [f"{renderer.tokenizer.convert_ids_to_tokens(i)} ({i})" for i in sorted(renderer.stop_ids)]
    ends = [*tokens, *map(repr, strings)]
    most = plan.config.rollout.max_tokens
    what = "completion" if plan.episodes is None else "reply"
    display.line("\n" + visible(f"a {what} ends with {' or '.join(ends)}, or is cut off after {most} tokens"))


def _plan(display: Display, plan: Plan) -> None:
    """Prints memory, time, and the amount of work."""
    from ..estimate import Machine, estimate, knobs, table
    from ..estimate import cluster as clusters
    from ..models import loading

    c = plan.config
    _heading(display, "plan")
    # Figures need the model's files, which only a run downloads.
    if loading.is_here(c.model) and (c.cluster.learner != 1 or c.cluster.rollout == "vllm"):
        fleet = clusters.Fleet.here()
        found = clusters.cluster_map(
            c, objective=plan.objective, prompt=plan.longest, held_out=len(plan.eval), fleet=fleet
        )
        display.line("\n".join(clusters.table(found)))
    elif loading.is_here(c.model):
        machine = Machine.of(plan.device, adapters=c.lora.rank > 0)
        needs = estimate(c, machine=machine, objective=plan.objective, prompt=plan.longest, held_out=len(plan.eval))
        # Advice on what to change only where it does not fit; None means that this is not known.
        display.line("\n".join(table(needs, () if needs.fits is not False else knobs(needs))))
    else:
        display.line(f"memory and time are unknown until {c.model} is downloaded, which happens when a run starts")
    saves = f"every {c.checkpoint.every} steps" if c.checkpoint.every else "never"
    measured = f"before, after and every {c.eval.every} steps" if c.eval.every else "before and after"
    step, rows = f"{c.rollout.prompts} prompts x {c.rollout.completions} completions", "prompts"
    if c.demonstrates:
        rows = "pairs" if c.prefers else "rows"
        step = f"{c.sft.batch} {rows}"
    display.line(
        f"\n{c.steps} steps of {step}, {c.optimizer_steps} "
        f"optimizer steps, on {plan.device}; evaluated {measured} on {len(plan.eval)} {rows}; saved {saves}, to "
        f"{c.out}. Nothing was trained or written."
    )


def _short(text: str, limit: int = 100) -> str:
    text = visible(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
