"""Reward models: learned scores. Checks a model's files before a run, loads it with the run, and scores in batches.

A recipe names one as ``[[rewards]] model = "folder or hub id"``: any sequence classifier with one label, or, with
``step_mark``, a model that scores each step of a completion (a process reward model). torch is imported when a model
is loaded, not before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, DataError, RewardError, TrewError, nearest
from ...models import files, loading
from ...types import Group, Prompt
from ..steps import Decode, mean_of_steps, split_steps, token_ends
from ..verdict import Verdict, shown

if TYPE_CHECKING:
    from .scorer import Encoder, Scorer

DEFAULTS: dict[str, Any] = {
    "tokenizer": "",  # empty = the model's
    "chat_template": "",  # empty = the tokenizer's; "plain", or a .jinja file
    "device": "",  # empty = where the policy is
    "dtype": "float32",  # of weights and computation
    "batch_tokens": 16384,  # most tokens that are scored at once, padding included
    "where": {},  # column -> value or list of values: the rows that are served; empty = all
    "step_mark": "",  # what ends a step in a completion's text; empty = one score for the whole
    "step_token": "",  # what the model reads behind each step; empty = step_mark
}
"""What ``args`` of a reward model accepts, and what it is unless given."""

NOT_SERVED = Verdict(None, "not_applicable")


def argument_problems(args: Mapping[str, Any]) -> list[str]:
    """Everything wrong with the ``args`` of a reward model, one line each."""
    found = [
        f"args.{key}: unknown argument{nearest(key, DEFAULTS)}; accepts {', '.join(DEFAULTS)}"
        for key in args
        if key not in DEFAULTS
    ]

    def need(key: str, fine: bool, accepts: str) -> None:
        if not fine:
            found.append(f"args.{key}: got {args.get(key)!r}, accepts {accepts}")

    for key in ("tokenizer", "chat_template", "device", "step_mark", "step_token"):
        need(key, isinstance(args.get(key, ""), str), "text")
    need("dtype", args.get("dtype", "float32") in ("float32", "bfloat16"), "'float32' or 'bfloat16'")
    budget = args.get("batch_tokens", 1)
    need("batch_tokens", isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1,
         "a whole number of at least 1")  # fmt: skip
    need("where", isinstance(args.get("where", {}), Mapping), "a table: column = value, or a list of values")
    if args.get("step_token") and not args.get("step_mark"):
        found.append(
            f"args.step_token: got {args['step_token']!r}, but without step_mark there are no steps to put it behind; "
            'set step_mark too, for example step_mark = "\\n\\n"'
        )
    return found


@dataclass
class ModelReward:
    """One reward model of a run: ``args`` are those of :data:`DEFAULTS`, checked."""

    name: str
    source: str
    args: Mapping[str, Any]
    decode: Decode | None = None  # the policy's tokens as text: where steps end in them
    _encoder: Encoder | None = field(default=None, repr=False)
    _scorer: Scorer | None = field(default=None, repr=False)

    @classmethod
    def open(cls, source: str, args: Mapping[str, Any], *, name: str = "") -> ModelReward:
        """Checks arguments, files, labels, vocabulary and template; loads the tokenizer but no weights.

        Raises ConfigError with every problem.
        """
        problems = argument_problems(args)
        if problems:
            raise ConfigError(problems)
        full = {**DEFAULTS, **args}
        problems += loading.check(
            source, tokenizer=full["tokenizer"], chat_template=full["chat_template"], kind=files.scorer_problems
        )
        if problems:
            raise ConfigError(problems)
        reward = cls(name or default_name(source), source, full)
        if full["device"]:
            loading.resolve_device(full["device"])
        if not reward.gives_steps and (head := reward._head()) == "token":
            raise ConfigError(
                f"model {source} scores tokens ({head} classifier), so it needs args.step_mark, the text that ends a "
                'step, for example step_mark = "\\n\\n"'
            )
        # Loaded for its errors, which belong to the checks before a run.
        _ = reward.encoder
        return reward

    @property
    def who(self) -> str:
        return f"reward model {self.name!r} ({self.source})"

    @property
    def gives_steps(self) -> bool:
        """Whether it scores every step of a completion."""
        return bool(self.args["step_mark"])

    @property
    def encoder(self) -> Encoder:
        if self._encoder is None:
            from .scorer import Encoder

            self._encoder = Encoder.load(
                self.source, tokenizer=self.args["tokenizer"], chat_template=self.args["chat_template"]
            )
        return self._encoder

    def load(self, *, device: str = "", decode: Decode | None = None) -> Scorer:
        """Loads the weights, once: on ``args.device``, or ``device``, or the best there is. Raises ModelError."""
        from .scorer import Scorer

        self.decode = decode or self.decode
        if self._scorer is None:
            place = loading.resolve_device(self.args["device"] or device or "auto")
            model = loading.load_scorer(self.source, device=place, dtype=self.args["dtype"])
            loading.check_vocab(model, self.encoder.tokenizer)
            self._scorer = Scorer(model, self.encoder, budget=self.args["batch_tokens"])
        return self._scorer

    # ---- which rows

    def applies(self, prompt: Prompt) -> bool:
        """Whether the row is one of those in ``args.where``.

        >>> reward = ModelReward("r", "m", {**DEFAULTS, "where": {"task": ["chat", "code"]}})
        >>> reward.applies(Prompt("1", "?", columns={"task": "chat"})), reward.applies(Prompt("2", "?"))
        (True, False)
        """
        return all(
            column in prompt.columns
            and prompt.columns[column] in (value if isinstance(value, (list, tuple)) else (value,))
            for column, value in self.args["where"].items()
        )

    def prompt_problems(self, prompts: Iterable[Prompt]) -> list[str]:
        """What keeps it from scoring these prompts: it serves none, its template refuses one, or one fills it."""
        served, columns = 0, set()
        limit = loading.positions(self.source)
        for prompt in prompts:
            columns.update(prompt.columns)
            if not self.applies(prompt):
                continue
            served += 1
            try:
                # With one character as the completion, the shortest there is.
                length = len(self.encoder.whole(prompt, "."))
            except DataError as error:
                return [f"{self.who}: {error}"]
            if limit is not None and length >= limit:
                return [
                    f"{self.who}: prompt {prompt.uid!r}: got {length} of its tokens, accepts less than its {limit} "
                    "positions; take the row out of the data, leave it to other rewards (args.where), or take a model "
                    "with a longer context"
                ]
        if served:
            return []
        have = ", ".join(sorted(columns)) or "none"
        return [f"{self.who} applies to no row: it looks for {dict(self.args['where'])}; columns: {have}"]

    # ---- scores

    def score(self, groups: Sequence[Group]) -> list[list[Verdict]]:
        """A verdict for every completion of every group; None for rows that are not served, and for texts that are
        longer than the model can see. Raises RewardError if a score is not finite, and for episodes."""
        if any(rollout.ending for group in groups for rollout in group.rollouts):
            raise RewardError(
                f"{self.who}: got an episode, accepts completions of one turn: of an episode it would read the prompt "
                "and the last reply alone; score episodes by a function, whose completions are whole conversations"
            )
        start = time.perf_counter()
        scorer = self.load()
        asked = [(g, i) for g, group in enumerate(groups) if self.applies(group.prompt)
                 for i in range(len(group.rollouts))]  # fmt: skip
        out = [[NOT_SERVED] * len(group.rollouts) for group in groups]
        try:
            judge = self._by_step if self.gives_steps else self._whole
            verdicts = judge([(groups[g].prompt, groups[g].rollouts[i]) for g, i in asked], scorer)
        except DataError as error:
            raise RewardError(f"{self.who}: {error}") from None
        # All are scored together: each counts for an equal share of the time.
        each = (time.perf_counter() - start) / max(len(asked), 1)
        for (g, i), (value, steps, detail) in zip(asked, verdicts, strict=True):
            status = "not_applicable" if value is None else "scored"
            out[g][i] = Verdict(value, status, detail=detail, seconds=each, steps=steps)
        return out

    def _whole(self, pairs: Sequence[tuple[Prompt, Any]], scorer: Scorer) -> list[_Judged]:
        """One score per completion."""
        rows = [scorer.encoder.whole(prompt, completion.text) for prompt, completion in pairs]
        fits = _fitting(map(len, rows), scorer.limit)
        values = self._finite(scorer.score([rows[i] for i in fits]), [pairs[i] for i in fits])
        by_row = dict(zip(fits, values, strict=True))
        return [
            (by_row[i], (), "") if i in by_row else (None, (), _too_long(len(row), scorer.limit))
            for i, row in enumerate(rows)
        ]

    def _by_step(self, pairs: Sequence[tuple[Prompt, Any]], scorer: Scorer) -> list[_Judged]:
        """One score per step: at the mark behind each, or of the prompt and all up to the step's end."""
        ends = [split_steps(completion.text, self.args["step_mark"]) for _, completion in pairs]
        score_steps = self._score_marks if scorer.per_token else self._score_prefixes
        lengths, by_row = score_steps(pairs, ends, scorer)
        return [
            self._judged(pair, stops, by_row[i]) if i in by_row else (None, (), _too_long(lengths[i], scorer.limit))
            for i, (pair, stops) in enumerate(zip(pairs, ends, strict=True))
        ]

    def _score_marks(
        self, pairs: Sequence[tuple[Prompt, Any]], ends: Sequence[Sequence[int]], scorer: Scorer
    ) -> _Steps:
        """Scores a completion in one pass: the model's value at the mark that is put behind each step."""
        mark = self.args["step_mark"]
        read_behind = self.args["step_token"] or mark
        encoded = [
            scorer.encoder.stepwise(prompt, _pieces(completion.text, stops, mark), mark=read_behind)
            for (prompt, completion), stops in zip(pairs, ends, strict=True)
        ]
        lengths = [len(ids) for ids, _ in encoded]
        fits = _fitting(lengths, scorer.limit)
        scored = scorer.score_at([encoded[i][0] for i in fits], [encoded[i][1] for i in fits])
        return lengths, dict(zip(fits, scored, strict=True))

    def _score_prefixes(
        self, pairs: Sequence[tuple[Prompt, Any]], ends: Sequence[Sequence[int]], scorer: Scorer
    ) -> _Steps:
        """Scores a completion in one pass per step, since the model gives one value for all that it reads."""
        rows = [
            [scorer.encoder.whole(prompt, completion.text[:end]) for end in stops]
            for (prompt, completion), stops in zip(pairs, ends, strict=True)
        ]
        lengths = [max(map(len, prefixes)) for prefixes in rows]
        fits = _fitting(lengths, scorer.limit)
        # the prefixes of all completions in one call, so that the scorer can fill its batches across completions
        flat = iter(scorer.score([row for i in fits for row in rows[i]]))
        return lengths, {i: [next(flat) for _ in rows[i]] for i in fits}

    def _judged(self, pair: tuple[Prompt, Any], stops: Sequence[int], scored: Sequence[float]) -> _Judged:
        """Takes the mean of a completion's step scores, and places each at the token that ends its step."""
        values = self._finite(scored, [pair] * len(stops))
        steps = _placed(values, stops, pair[1].token_ids, self.decode)
        return mean_of_steps([(0, v) for v in values]), steps, f"{len(stops)} steps"

    def _finite(self, values: Sequence[float], pairs: Sequence[tuple[Prompt, Any]]) -> list[float]:
        for value, (prompt, completion) in zip(values, pairs, strict=True):
            if not math.isfinite(value):
                raise RewardError(
                    f"{self.who} gave {value} for prompt {prompt.uid!r}, completion {shown(completion.text)!r}; its "
                    "weights are broken, or its dtype is too narrow (args.dtype = 'float32')"
                )
        return list(values)

    def _head(self) -> str:
        """``sequence`` or ``token``, by the configuration; an error of loading is reported when weights are."""
        try:
            return loading.head(self.source)
        except TrewError:
            return ""


_Judged = tuple[float | None, tuple[tuple[int, float], ...], str]
"""A completion's value, its steps' values by token, and a remark."""
_Steps = tuple[list[int], dict[int, list[float]]]
"""Tokens that each completion takes, and the step scores of those that fit, by their place."""


def default_name(source: str) -> str:
    """
    >>> default_name("runs/rm/final/"), default_name("org/nice-rm")
    ('final', 'nice-rm')
    """
    return source.rstrip("/").rpartition("/")[2] or source


def _fitting(lengths: Iterable[int], limit: int | None) -> list[int]:
    """The places of the rows that the model has positions for."""
    return [i for i, length in enumerate(lengths) if limit is None or length <= limit]


def _too_long(length: int, limit: int | None) -> str:
    return f"{length} tokens, the reward model has {limit} positions"


def _pieces(text: str, ends: Sequence[int], mark: str) -> list[str]:
    """The steps themselves, without the marks around them."""
    starts = [0, *ends[:-1]]
    return [_without(text[start:end], mark) for start, end in zip(starts, ends, strict=True)]


def _without(step: str, mark: str) -> str:
    while step.startswith(mark):
        step = step[len(mark) :]
    while step.endswith(mark):
        step = step[: -len(mark)]
    return step


def _placed(
    values: Sequence[float], char_ends: Sequence[int], token_ids: Any, decode: Decode | None
) -> tuple[tuple[int, float], ...]:
    """Step scores at the completion's tokens. Steps that end with the same token (a short one inside of it) become one
    with the sum of the values; without ``decode`` or tokens it is not known where they end, and there are none."""
    if decode is None or not len(token_ids):
        return ()
    placed: dict[int, float] = {}
    for end, value in zip(token_ends(char_ends, token_ids=token_ids, decode=decode), values, strict=True):
        placed[max(end, 1)] = placed.get(max(end, 1), 0.0) + value
    return tuple(placed.items())
