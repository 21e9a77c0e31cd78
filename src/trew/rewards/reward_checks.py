"""Tries one reward on data: known answers, hostile ones, repeats, threads, processes, time (``trew rewards test``)."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..config import RewardConfig
from ..errors import RewardError
from ..types import Group, Prompt, Score, ScoredGroup, single_turn
from .columns import first_column
from .known_answers import FORMS, Family, KnownAnswer, changed, hostile, known_answers
from .numbers import parse_gold
from .reward_set import RewardSet
from .user.process import Process
from .user.returned import short

REPEATS = 3
ALONE = 20  # prompts that are scored by themselves, in a thread and in another process as well
HOSTILE_ROWS = 2  # prompts that hostile texts are tried on
HOSTILE_SECONDS = 20.0  # one of them may take: the limits of the kinds, and some for a busy machine
SLOW_ENOUGH = 2  # hostile texts that a function may be slow on before the rest is spared
FAMILIES: dict[Family, str] = {
    "right": "right answers score 1",
    "mutation": "answers with one thing changed score what they must",
    "wrapper": "wrappers do not matter",
    "hostile": "hostile texts score 0 in bounded time",
}


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: whether it holds, figures, and examples of failures."""

    what: str
    holds: bool
    numbers: str
    examples: tuple[str, ...] = ()


def try_reward(rewards: RewardSet, prompts: Sequence[Prompt], *, limit: int = 200) -> list[Check]:
    """All checks of :func:`checks`, when the last one is done."""
    return list(checks(rewards, prompts, limit=limit))


def checks(rewards: RewardSet, prompts: Sequence[Prompt], *, limit: int = 200) -> Iterator[Check]:
    """Every check of a set of one reward, as it is done. Golds are checked in all ``prompts``, answers are made for the
    first ``limit``.

    A built-in must give known answers their known score. Only the author of a user's function knows the right
    values; they must differ between answers, repeat, and not depend on which prompts share the batch.
    """
    bad = rewards.check_golds(prompts)
    golds = Check(
        "golds are readable and score 1", not bad, _count(bad, "problem", of=f"{len(prompts)} rows"), tuple(bad)
    )
    yield golds
    if not bad:
        reward = rewards.rewards[0]
        trial = _try_builtin if reward.is_builtin else _try_function
        yield from trial(rewards, prompts[:limit])


def text_group(
    prompt: Prompt,
    texts: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    token_ids: Sequence[Sequence[int]] | None = None,
) -> Group:
    """A group of completions that no model sampled: they have text and, where given, a length in tokens (all of them
    token 0) or tokens; no more."""
    tokens = token_ids or [[0] * n for n in lengths or [0] * len(texts)]
    made = []
    for text, ids in zip(texts, tokens, strict=True):
        none = np.zeros(len(ids), np.float32)
        made.append(
            single_turn(
                np.zeros(0, np.int64), np.asarray(ids, np.int64), logprobs=none, policy_logprobs=None, entropies=None,
                version=0, text=text, finish_reason="stop",
            )
        )  # fmt: skip
    return Group(prompt, tuple(made))


def scored_texts(texts: Sequence[str], values: Sequence[float | None]) -> ScoredGroup:
    """A scored group that no model sampled; completions are as many tokens long as they have characters."""
    group = text_group(Prompt("made", text=""), texts, lengths=[len(text) for text in texts])
    return ScoredGroup(group, tuple(Score(value, "scored" if value is not None else "timeout") for value in values))


Made = list[tuple[Prompt, KnownAnswer]]


def _try_builtin(rewards: RewardSet, prompts: Sequence[Prompt]) -> list[Check]:
    """Scores known answers of every family, repeats that, and scores some of them in another thread and process."""
    [spec] = rewards.rewards
    made: Made = [(p, x) for p in prompts for x in known_answers(spec.kind, p.columns, spec.args)]
    groups = [text_group(prompt, [probe.text], lengths=[probe.tokens]) for prompt, probe in made]
    got, seconds = _repeat(rewards, groups)
    labels = [f"{prompt.uid}: {probe.what}" for prompt, probe in made]
    # Another thread and another process take seconds to start and score: the answers to a few prompts are enough.
    first = {prompt.uid for prompt in prompts[:ALONE]}
    some = [i for i, (prompt, _) in enumerate(made) if prompt.uid in first]
    expected = [got[i][0] for i in some]
    return [
        *_families(made, [values[0] for values in got], reads_programs=spec.kind in ("code_stdin", "code_func")),
        *_attacked(rewards, prompts[:HOSTILE_ROWS]),
        _same(got, labels),
        *_elsewhere(rewards, [groups[i] for i in some], expected, [labels[i] for i in some]),
        _time(seconds),
    ]


def _families(made: Made, values: Sequence[float | None], *, reads_programs: bool) -> list[Check]:
    """A check for each family of answers; one failing check if there are no answers at all."""
    if not made:
        # silence would read as a pass: nothing was shown to be right
        nothing = "no answers could be made for these rows"
        return [Check(FAMILIES["right"], False, nothing, (nothing,))]
    checks = [_family(family, made, values) for family in FAMILIES if family != "hostile"]
    found = [check for check in checks if check is not None]
    # Some kinds have no right answer; of programs, one is known where a row has its own.
    if reads_programs and checks[0] is None:
        found.insert(0, Check(FAMILIES["right"], True, "not tried, as no row has a reference program"))
    return found


def _attacked(rewards: RewardSet, prompts: Sequence[Prompt]) -> list[Check]:
    """The check of hostile texts; none for a kind that does not read text."""
    [spec] = rewards.rewards
    attacks: Made = [(p, x) for p in prompts for x in hostile(spec.kind, p.columns, spec.args)]
    return [_hostile(rewards, attacks)] if attacks else []


def _family(family: Family, made: Made, values: Sequence[float | None]) -> Check | None:
    """Whether the answers of one family got the score they must get; None if there are none."""
    pairs = [(prompt, probe, value) for (prompt, probe), value in zip(made, values, strict=True)
             if probe.family == family]  # fmt: skip
    wrong = [
        f"{prompt.uid}: {probe.what} ({short(probe.text)}) must score {probe.score:g}, got {value}"
        for prompt, probe, value in pairs
        if value is None or abs(value - probe.score) > 1e-9
    ]
    numbers = f"{len(wrong) or 'none'} wrong of {len(pairs)}"
    return Check(FAMILIES[family], not wrong, numbers, tuple(wrong)) if pairs else None


def _hostile(rewards: RewardSet, attacks: Made) -> Check:
    """Each attack by itself, so that one is to blame for the time."""
    values, slow, longest = [], [], 0.0
    for prompt, probe in attacks:
        start = time.monotonic()
        values += values_of(rewards.score([text_group(prompt, [probe.text])]))
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        if seconds > HOSTILE_SECONDS:
            slow.append(f"{prompt.uid}: {probe.what} ({short(probe.text)}) took {seconds:.1f} s")
    check = _family("hostile", attacks, values)
    assert check is not None
    numbers = f"{check.numbers}, at most {longest:.2f} s each"
    return Check(check.what, check.holds and not slow, numbers, (*check.examples, *slow))


def _elsewhere(
    rewards: RewardSet, groups: Sequence[Group], expected: Sequence[float | None], labels: Sequence[str]
) -> list[Check]:
    """Whether another thread, and another process with other hashes, judge as this thread did."""
    found: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: found.append(values_of(rewards.score(groups))))
    thread.start()
    thread.join()
    reward = rewards.rewards[0]
    checks = [_equal("another thread gives the same", expected, found[0] if found else [], labels, rewards)]
    if reward.model is not None:
        return checks
    # Another hash seed: sets of strings have another order there.
    other = Process(hash_seed=1)
    try:
        config = RewardConfig(name=reward.kind, args=reward.args, calls=reward.calls, timeout_s=reward.timeout_s)
        # A function is loaded there anew; a built-in has nothing to load.
        again = RewardSet.from_config([config], host=other)
        values = values_of(again.score(groups)) if reward.function else again.scores_in(other, groups)
    finally:
        other.close()
    return [*checks, _equal("another process gives the same", expected, values, labels, rewards)]


def _equal(
    what: str,
    expected: Sequence[float | None],
    values: Sequence[float | None],
    labels: Sequence[str],
    rewards: RewardSet,
) -> Check:
    if len(values) != len(expected):
        return Check(what, False, "it failed", ("no values came back",))
    pairs = zip(labels, expected, values, strict=True)
    differ = [f"{name}: {a} here, {b} there" for name, a, b in pairs if _apart(a, b, rewards)]
    return Check(what, not differ, _count(differ, "difference", of=f"{len(expected)} answers"), tuple(differ))


def _apart(a: float | None, b: float | None, rewards: RewardSet) -> bool:
    """Whether two scores of one text differ; a model's by more than rounding, as other texts were in its batch."""
    reward = rewards.rewards[0]
    if reward.model is None or a is None or b is None:
        return a != b
    slack = 0.05 if reward.args.get("dtype") == "bfloat16" else 1e-4
    return not math.isclose(a, b, rel_tol=slack, abs_tol=slack)


def _try_function(rewards: RewardSet, prompts: Sequence[Prompt]) -> Iterator[Check]:
    # As many tokens as characters: without any, a function of lengths would see equal answers.
    answers = [_answers(prompt) for prompt in prompts]
    groups = [text_group(p, texts, lengths=[*map(len, texts)]) for p, texts in zip(prompts, answers, strict=True)]
    got, seconds = _repeat(rewards, groups)
    labels = [f"{g.prompt.uid}: {short(c.text)}" for g in groups for c in g.rollouts]
    yield _differing(got, groups)
    yield (same := _same(got, labels))
    yield (batch := _batch(rewards, groups, got))
    if same.holds and batch.holds:  # else the next ones would only say so again
        about_golds = (_reachable, _credit) if _reads_rows(rewards, prompts) else ()
        yield from (check for trial in about_golds if (check := trial(rewards, prompts)) is not None)
        some = sum(len(group.rollouts) for group in groups[:ALONE])
        yield from _elsewhere(rewards, groups[:ALONE], [values[0] for values in got[:some]], labels[:some])
    yield _withstands(rewards, prompts[:HOSTILE_ROWS])
    yield _time(seconds)


def _differing(got: Sequence[Sequence[float | None]], groups: Sequence[Group]) -> Check:
    """Checks that there is more than one value; if not, shows what the function received."""
    values = sorted({repeats[0] for repeats in got if repeats[0] is not None})
    spread = f"{len(values)} different, from {values[0]:g} to {values[-1]:g}" if values else "no numbers"
    why = _received(groups[0]) if len(values) < 2 and groups else ()
    return Check("values differ between answers", len(values) > 1, spread, why)


def _received(group: Group) -> tuple[str, ...]:
    gold = first_column(group.prompt.columns)
    chat = "completions were lists of messages, as for chat prompts: [{'role': 'assistant', 'content': ...}]"
    text = "completions were strings, as for text prompts"
    return (
        f"columns there are: {', '.join(group.prompt.columns) or 'none'}",
        f"the gold, as it was found there: {'none' if gold is None else short(str(gold))}",
        text if group.prompt.messages is None else chat,
        "completion_ids were as many zeros as an answer has characters",
        f"answers tried, for instance: {', '.join(short(c.text) for c in group.rollouts if c.text)}",
    )


def _batch(rewards: RewardSet, groups: Sequence[Group], got: Sequence[Sequence[float | None]]) -> Check:
    differs, at = [], 0
    for group in groups[:ALONE]:
        alone = values_of(rewards.score([group]))
        together = [values[0] for values in got[at : at + len(alone)]]
        at += len(alone)
        if any(_apart(a, b, rewards) for a, b in zip(alone, together, strict=True)):
            differs.append(f"{group.prompt.uid}: {alone} alone, {together} with the other prompts")
    numbers = _count(differs, "difference", of=f"{min(len(groups), ALONE)} prompts")
    return Check("values do not depend on the batch", not differs, numbers, tuple(differs))


def _reads_rows(rewards: RewardSet, prompts: Sequence[Prompt]) -> bool:
    """Whether some answer scores otherwise beside the columns of a row with another gold. Else the function asks for no
    right answer, as one for lengths does, which likes a longer gold more than a shorter wrong answer by chance."""
    rows = [(prompt, gold) for prompt in prompts if (gold := first_column(prompt.columns)) is not None]
    others = [prompt for prompt, gold in rows if gold != rows[0][1]][:1]
    if not others:  # it cannot be told
        return True
    groups = []
    for prompt, gold in rows:
        texts = [form.format(text) for form in FORMS for text in _gold_plain_and_wrong(gold)]
        other = others[0] if gold == rows[0][1] else rows[0][0]
        groups += [text_group(prompt, texts), text_group(replace(prompt, columns=other.columns), texts)]
    try:
        scored = rewards.score(groups)
    except RewardError:  # it looks at both, and minds
        return True
    pairs = zip(values_of(scored[::2]), values_of(scored[1::2]), strict=True)
    return any(_apart(beside_own, beside_other, rewards) for beside_own, beside_other in pairs)


def _reachable(rewards: RewardSet, prompts: Sequence[Prompt]) -> Check | None:
    """Checks that every row's gold, as it is or as a plain number, can score more than a wrong answer in some form.

    A row whose gold cannot (a comma that the function does not read) trains nothing. None if no row's gold can: then
    the function does not care for it.
    """
    rows = [(prompt, gold) for prompt in prompts if (gold := first_column(prompt.columns)) is not None]
    groups = []
    for prompt, gold in rows:
        texts = _gold_plain_and_wrong(gold)
        groups.append(text_group(prompt, [form.format(text) for form in FORMS for text in texts]))
    silent = []
    for (prompt, gold), scored in zip(rows, rewards.score(groups), strict=True):
        # In the order in which the texts were made: three for each form.
        values = iter([score.value for score in scored.scores])
        if not any(_above(next(values), next(values), next(values)) for _ in FORMS):
            silent.append(f"{prompt.uid}: the gold is {short(str(gold))}")
    if len(silent) == len(rows):
        return None
    how_many = f"the gold scores no higher than a wrong answer in {len(silent)} rows of {len(rows)}"
    return Check("the gold can score", not silent, how_many if silent else "in every row", tuple(silent))


def _gold_plain_and_wrong(gold: Any) -> tuple[str, str, str]:
    """The gold as it stands in the row, the same as a plain number where it is one, and a wrong answer."""
    value = parse_gold(gold)
    if value is None:
        return str(gold), str(gold), "no idea"
    plain, wrong, *_ = changed(value, form="{}")
    return str(gold), plain, wrong


def _above(right: float | None, plain: float | None, wrong: float | None) -> bool:
    known = [value for value in (right, plain) if value is not None]
    return wrong is not None and bool(known) and max(known) > wrong


def _credit(rewards: RewardSet, prompts: Sequence[Prompt]) -> Check | None:
    """Whether answers with one thing changed score less than the gold, in the form that the function likes best.

    None if that cannot be decided: golds that are no numbers, and functions that do not care for the answer (the gold
    and the gold plus one score the same in every form).
    """
    wrong, count = [], 0
    for prompt, texts, values in _in_every_form(rewards, prompts):
        form = _liked(values)
        if form is None:
            continue
        count += len(texts[form]) - 1
        wrong += [f"{prompt.uid}: {line}" for line in _credited(texts[form], values[form])]
    what = "answers with one thing changed score less than the gold"
    return Check(what, not wrong, f"{len(wrong) or 'none'} wrong of {count}", tuple(wrong)) if count else None


def _in_every_form(
    rewards: RewardSet, prompts: Sequence[Prompt]
) -> Iterator[tuple[Prompt, dict[str, list[str]], dict[str, list[float | None]]]]:
    """By form, the gold and its changes and what they score; only of the prompts whose gold is a number."""
    rows = [(p, value) for p in prompts if (value := parse_gold(first_column(p.columns))) is not None]
    tried: list[tuple[Prompt, dict[str, list[str]]]] = [(p, {f: changed(v, form=f) for f in FORMS}) for p, v in rows]
    # One call for all forms of all prompts, as a function may be slow to call; then the values are dealt out again.
    groups = [text_group(p, [text for texts in forms.values() for text in texts]) for p, forms in tried]
    for (prompt, forms), scored in zip(tried, rewards.score(groups), strict=True):
        values = iter([score.value for score in scored.scores])
        yield prompt, forms, {form: [next(values) for _ in texts] for form, texts in forms.items()}


def _liked(by_form: Mapping[str, Sequence[float | None]]) -> str | None:
    """The form in which the gold scores highest, of those in which it scores more than the gold plus one; None where
    there is none such: the function does not read the form, or does not care for the answer."""
    golds: dict[str, float] = {}
    for form, (gold, plus_one, *_) in by_form.items():
        if gold is not None and plus_one is not None and gold > plus_one:
            golds[form] = gold
    return max(golds, key=lambda form: golds[form], default=None)


def _credited(texts: Sequence[str], values: Sequence[float | None]) -> list[str]:
    """The changed answers that score at least as much as the gold, which comes first."""
    gold = values[0]
    assert gold is not None, "the form was chosen by the gold's score"
    return [
        f"{short(text)} scores {value:g}, and the gold ({short(texts[0])}) {gold:g}"
        for text, value in zip(texts[1:], values[1:], strict=True)
        if value is not None and value >= gold
    ]


def _withstands(rewards: RewardSet, prompts: Sequence[Prompt]) -> Check:
    """Whether a function gives numbers (or None) for hostile texts, in bounded time."""
    what = "hostile texts get a number in bounded time"
    wrong, longest, slow = [], 0.0, 0
    # A function with a shorter limit is ended there, and counts as slow once it reaches it.
    limit = min(HOSTILE_SECONDS, rewards.rewards[0].timeout_s or HOSTILE_SECONDS)
    # The texts for ``format``, a kind that applies to every row.
    attacks = [(prompt, probe) for prompt in prompts for probe in hostile("format", prompt.columns, {})]
    count = 0
    for prompt, probe in attacks:
        count += 1
        start = time.monotonic()
        try:
            rewards.score([text_group(prompt, [probe.text])])
        except RewardError as error:
            wrong.append(f"{prompt.uid}: {probe.what}: {short(str(error))}")
        seconds = time.monotonic() - start
        longest, slow = max(longest, seconds), slow + (seconds >= limit)
        if seconds > HOSTILE_SECONDS:
            wrong.append(f"{prompt.uid}: {probe.what} took {seconds:.1f} s")
        if slow == SLOW_ENOUGH:
            break
    numbers = f"{len(wrong) or 'none'} wrong of {count}, at most {longest:.2f} s each"
    if count < len(attacks):
        numbers += f"; {len(attacks) - count} not tried after {slow} took all of their {limit:g} s"
    return Check(what, not wrong, numbers, tuple(wrong))


def _answers(prompt: Prompt) -> list[str]:
    """What a function of unknown taste is tried with: nothing, words, a layout, and the gold in usual wrappings."""
    gold = first_column(prompt.columns)
    about = [] if gold is None else [f"{gold}", f"#### {gold}", f"\\boxed{{{gold}}}", f"<answer>{gold}</answer>"]
    return ["", "I do not know.", "<think>so</think>\n<answer>1</answer>", *about]


def _repeat(rewards: RewardSet, groups: Sequence[Group]) -> tuple[list[list[float | None]], list[float]]:
    """Per completion its values in every repeat; and the seconds of every completion in every repeat."""
    runs = [rewards.score(groups) for _ in range(REPEATS)]
    seconds = [score.seconds for run in runs for group in run for score in group.scores]
    return [list(values) for values in zip(*map(values_of, runs), strict=True)], seconds


def values_of(scored: Sequence[ScoredGroup]) -> list[float | None]:
    """Every completion's value, flat."""
    return [score.value for group in scored for score in group.scores]


def _same(got: Sequence[Sequence[float | None]], labels: Sequence[str]) -> Check:
    differ = [f"{label}: {list(values)}" for values, label in zip(got, labels, strict=True) if len(set(values)) > 1]
    numbers = _count(differ, "difference", of=f"{len(got)} answers")
    return Check(f"{REPEATS} repeats give the same", not differ, numbers, tuple(differ))


def _time(seconds: Sequence[float]) -> Check:
    if len(seconds) < 2:
        return Check("time per completion", True, "too few to say")
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    cost = f"{statistics.fmean(seconds) * 1000:.3g} s per 1,000 completions"
    return Check("time per completion", True, f"p50 {cuts[49] * 1e3:.3f} ms, p99 {cuts[98] * 1e3:.3f} ms; {cost}")


def _count(found: Sequence[str], noun: str, *, of: str) -> str:
    return f"{len(found) or 'no'} {noun}{'' if len(found) == 1 else 's'} in {of}"
