"""From run folders to the result of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...config.free import is_free
from ...errors import ConfigError, DataError
from ...eval import paired_difference
from ...eval.comparison import Comparison, GroupScores, compare
from ...eval.seeds import least_pairs
from .choices import Choices
from .groups import RunGroup, differences, find, grouped, of_data
from .members import Member, load_member
from .metrics import LastEvaluations, Metric, parse_metric
from .presets import default_differences
from .refusals import group_problems, problems, some
from .result import ComparedRuns


def compare_runs(folders: Sequence[Path], choices: Choices) -> ComparedRuns:
    """Reads, groups and compares the runs. Raises ConfigError or DataError with all reasons against a comparison."""
    # ---- runs
    metric = parse_metric(choices.metric)
    if len(folders) < 2:
        raise ConfigError("compare: give two run folders or more, for example: trew compare runs/a-* runs/b-*")
    waits = choices.unfinished == "leave-out"
    members, left_out = _counted([load_member(folder, leave_out=waits) for folder in folders], choices)
    # All reasons at once, before the metric is computed of any run.
    if found := problems(members, allow=choices.allow):
        raise ConfigError(found)
    # ---- groups
    groups, differing = grouped(members, by=choices.by, several_tasks="data" in choices.allow)
    if found := group_problems(groups):
        raise ConfigError(found)
    baseline = find(groups, choices.baseline) if choices.baseline else groups[0]
    # One call for all: some metrics depend on what every run has.
    scores = dict(zip((m.name for m in members), metric.scores(members), strict=True))
    comparison = compare([_scored(g, scores) for g in groups], baseline=baseline.name, better=metric.better)
    if len(groups) > 1 and not comparison.versus and "one-seed" not in choices.allow:
        raise DataError(_one_seed(baseline, groups, metric))
    # ---- what a reader must know
    notes = [
        *metric.notes(members), *default_differences(groups), *_budgets(groups), *_within(groups),
        *_starts(groups), *_condition(members), *_unpaired(comparison, groups),
    ]  # fmt: skip
    return ComparedRuns(metric, tuple(groups), scores, differing, comparison, tuple(notes), tuple(left_out))


def _counted(members: Sequence[Member], choices: Choices) -> tuple[list[Member], list[Member]]:
    """The runs that are counted, and those that are left out."""
    open_ = [m for m in members if not m.finished]
    if open_ and choices.unfinished == "refuse":
        steps = ", ".join(f"{m.name} (step {m.last_step} of {m.settings.get('steps')})" for m in open_[:5])
        raise DataError(
            f"compare: {len(open_)} of {len(members)} runs have not finished: {steps}; finish them (trew train "
            "--resume), or --unfinished leave-out for runs that still train, or --unfinished count for runs that "
            "failed: a failed run that is left out makes its group look better than it is"
        )
    if choices.unfinished == "count":
        return list(members), []
    kept = [m for m in members if m.finished]
    if len(kept) < 2:
        raise DataError(f"compare: {len(kept)} of {len(members)} runs have finished; there is nothing to compare")
    return kept, open_


def _scored(group: RunGroup, scores: dict[str, float]) -> GroupScores:
    return GroupScores(
        group.name, {pair: scores[m.name] for pair, m in zip(group.pairs, group.members, strict=True)}
    )  # fmt: skip


def _one_seed(baseline: RunGroup, groups: Sequence[RunGroup], metric: Metric) -> str:
    """Why groups cannot be compared that share fewer than two seeds, and what can be said instead."""
    seeds = "; ".join(f"{g.name}: {', '.join(str(seed) for _, seed in sorted(g.pairs))}" for g in groups)
    lines = [
        f"compare: no group shares two seeds with the baseline{_on_data(groups)} ({seeds}), and with one seed a "
        "difference between settings cannot be told from the difference between seeds"
    ]
    for group in groups:
        shared = sorted(set(group.pairs) & set(baseline.pairs))
        if group is not baseline and shared and metric == LastEvaluations(1):
            one, other = (g.members[g.pairs.index(shared[0])] for g in (baseline, group))
            lines.append(_about_two_models(one, other))
    need = least_pairs(len(groups) - 1)
    lines.append(
        f"train every group with the same seeds, {need} or more of them (--set seed=1 and so on): fewer cannot show "
        "any difference; --allow one-seed prints the scores without intervals"
    )
    return "\n".join(lines)


def _on_data(groups: Sequence[RunGroup]) -> str:
    """Said where seeds alone are no pairs: runs of one seed on other data are none."""
    return " on one data set" if len({task for group in groups for task in group.tasks}) > 1 else ""


def _about_two_models(one: Member, other: Member) -> str:
    """The difference between two trained models, with its uncertainty over prompts."""
    uids = sorted(one.prompt_accuracy.keys() & other.prompt_accuracy.keys())
    if not uids:
        return f"about {one.name} and {other.name} nothing can be said: their evaluations are not finished"
    before, after = ([m.prompt_accuracy[uid] for uid in uids] for m in (one, other))
    samples = int(one.settings.get("eval.samples") or 1)
    found = paired_difference(before, after, samples=samples)
    d = found.difference
    return (
        f"what can be said is about two models, not about settings: on {found.n} held-out prompts {other.name} minus "
        f"{one.name} is {d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] over prompts (p = {found.p_value:.2g})"
    )


# --------------------------------------------------------------------------------------------------------------- notes


def _budgets(groups: Sequence[RunGroup]) -> list[str]:
    """Whether groups sampled different numbers of completions, so that one had more to learn from."""
    counts = {g.name: round(sum(m.completions for m in g.members) / len(g.members)) for g in groups}
    if len(groups) < 2 or max(counts.values()) <= 1.02 * min(counts.values()):
        return []
    told = ", ".join(f"{count:,} in {name}" for name, count in counts.items())
    return [f"the groups did not sample the same number of completions per run: {told}"]


def _within(groups: Sequence[RunGroup]) -> list[str]:
    """Settings that differ between the runs of one group: those that do not change what is learned, or that ``--by``
    left out."""
    keys: dict[str, list[str]] = {}
    own = of_data([m for group in groups for m in group.members])
    for group in groups:
        several = len(set(group.tasks)) > 1
        for key in differences({m.name: m.settings for m in group.members}):
            if not (several and key in own):
                keys.setdefault(key, []).append(group.name)
    free = sorted(k for k in keys if is_free(k))
    found = [f"within groups, runs differ in {', '.join(free)}, which does not change what is learned"] if free else []
    found += [f"within {some(keys[k])}, runs differ in {k}: what they share is not one setting" for k in keys
              if not is_free(k)]  # fmt: skip
    return found


def _starts(groups: Sequence[RunGroup]) -> list[str]:
    """Pairs that did not start at the same accuracy: other weights, or an evaluation that draws its completions."""
    starts: dict[object, float] = {}
    other = []
    for group in groups:
        for pair, member in zip(group.pairs, group.members, strict=True):
            # Of step 0 only: later evaluations are of trained weights.
            step, accuracy = member.evals[0]
            if step == 0 and starts.setdefault(pair, accuracy) != accuracy:
                other.append(member.name)
    if not other:
        return []
    return [f"before training, {some(other)} had another accuracy than the first run with the same seed"]


def _condition(members: Sequence[Member]) -> list[str]:
    """What is wrong with single runs: damaged files, prompts without a verdict, failures."""
    # Notes have no full stop, which whoever shows them sets; a change is told in sentences.
    found = [f"{m.name}: {note.removesuffix('.')}" for m in members for note in (*m.data.notes, *m.data.changed)]
    found += [f"{m.name}: {m.unjudged} held-out prompts without a verdict do not count" for m in members if m.unjudged]
    if failed := [m.name for m in members if not m.finished]:
        found.append(f"{some(failed)} did not finish: counted with what was measured last")
    if uncertain := [m.version for m in members if m.version]:
        versions = sorted(set(uncertain))
        found += [f"runs of several versions of trew: {', '.join(versions)}"] if len(versions) > 1 else []
    return [*found, *_arithmetic(members)]


def _arithmetic(members: Sequence[Member]) -> list[str]:
    """Runs whose numbers were rounded differently, so that equal settings and seeds need not give equal runs."""
    names: dict[str, list[str]] = {}
    for member in members:
        if member.arithmetic:
            names.setdefault(member.arithmetic, []).append(member.name)
    if len(names) < 2:
        return []
    told = "; ".join(f"{how}: {some(those)}" for how, those in names.items())
    return [f"runs were not computed alike, so that equal settings and seeds need not give equal numbers: {told}"]


def _unpaired(comparison: Comparison, groups: Sequence[RunGroup]) -> list[str]:
    """Runs and groups that are shown but not compared."""
    found = []
    if comparison.unpaired:
        names = ", ".join(comparison.unpaired)
        found.append(
            f"not compared: {names}: fewer than two seeds in common with {comparison.baseline}{_on_data(groups)}, and "
            "with one seed a difference between settings cannot be told from the difference between seeds"
        )
    if comparison.unused:
        runs = [f"{name} seed {seed}" for name, (_, seed) in comparison.unused]
        found.append(f"not in the differences, because other groups lack their seed: {some(runs)}")
    if len(groups) == 1:
        found.append("all runs have the same settings: their spread is that between seeds, and nothing is compared")
    return found
