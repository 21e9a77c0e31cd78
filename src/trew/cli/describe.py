"""Describes presets for ``trew explain`` and the documentation, from the code itself.

A preset's docstring consists of paragraphs: a line that ends with the paper; an equation; explanations; ``Use it ...``;
``Deviations: ...``. Numbers come from signatures, ``Options`` and ``equation()``.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..objective import Objective
from ..objective.advantage import BaselineAdvantage
from ..objective.options import Options
from ..objective.presets import PRESETS, doc, meant, preset, settings
from ..objective.scale import NoScaling
from ..utils.user_files import is_file_spec, short_name

AXES = {
    "keep": "which completions count at all",
    "shape": "changes to the reward before completions are compared",
    "advantage": "A: what a reward is compared with, and what the difference is divided by",
    "adjust": "changes to A after the comparison",
    "prune": "which completions carry loss after the comparison",
    "select": "which tokens are pushed",
    "ratio": "r: how far the policy has moved since it sampled",
    "weight": "w(r, A), the trust region: how much of a push is let through",
    "correction": "c, for a sampler that disagrees with the trainer about the same weights",
    "aggregate": "share_t, the token weight: how tokens are averaged into one loss",
    "divergence": "d, the pull towards another policy",
    "entropy": "a push towards more entropy, in addition to C_t",
    "nll": "the log-likelihood of correct completions, whatever their advantage",
}
"""What each line of ``Objective.equation`` decides."""

SCOPES = {
    "token": "each token alone; a prepared step may be cut into micro-batches of whole completions",
    "sequence": "whole completions; a prepared step may be cut into micro-batches of them",
    "group": "the whole step at once; a part of it is refused",
    "batch": "the whole step at once; a part of it is refused",
}
"""What ``Objective.loss`` must see together."""

FIELDS = {
    "old_logprobs": "log-probs at sampling time (not given: the policy has not moved)",
    "rollout_logprobs": "log-probs as the sampler reported them",
    "ref_logprobs": "log-probs of the reference policy",
    "teacher_logprobs": "log-probs of the teacher",
    "score_norms": "1 - 2 pi + sum of squared probabilities at each token",
    "entropies": "entropy of the next-token distribution at each token",
    "advantages": "advantages instead of rewards (a critic's, for instance)",
    "values": "a critic's value of the state in which each token was chosen",
    "step_rewards": "rewards of reasoning steps, with their ends",
    "turns": "turns of multi-turn episodes: their ends and rewards",
    "states": "the state in which each turn began, whatever compares equal if it is the same",
    "baselines": "reward of the greedy answer to each prompt",
    "correct": "whether each answer counts as correct (not given: reward above 0)",
    "truncated": "whether each completion was cut off",
    "max_length": "longest completion allowed",
    "rewards": "one reward per completion, or several",
}
"""The fields of ``TokenBatch`` that objectives may need."""

OPTIONS = {
    "beta": "coefficient of the KL to the reference policy; 0: no reference model is needed",
    "kl": "its estimator: `k1`, `k2`, `k3` or `k3-corrected`",
    "kl_place": "where it acts: `loss`, `reward` or `to-go`",
    "distill": "coefficient of on-policy distillation, which adds a teacher's log-probs minus the policy's to the "
    "advantages; 0: no teacher is needed",
    "aggregate": "how tokens are averaged: `seq-mean-token-mean`, `token-mean`, `seq-mean-token-sum`, "
    "`prompt-mean-token-mean` or `constant`",
    "correction": "for a sampler that disagrees with the trainer: `none`, or those below",
    "correction_low": "lower bound of the correction",
    "correction_high": "upper bound of the correction",
    "opsm_delta": "threshold of `opsm`, in nats per token",
    "dynamic_sampling": "replace groups that are all right or all wrong by fresh ones",
    "overlong_filtering": "completions that were cut off carry no loss",
    "overlong_cache": "number of tokens before the limit over which the soft punishment grows; 0: none",
    "entropy_bonus": "coefficient of an entropy bonus in the loss",
    "entropy_target": "the bonus acts, and grows, while the mean entropy (nats per token) is at most this; 0: always",
    "entropy_step": "by how much an adaptive bonus grows or shrinks after each optimizer step",
    "nll": "coefficient of the log-likelihood of correct completions, averaged over their tokens and added to the "
    "objective; 0: none",
}
"""Options that every preset accepts in addition to its own settings."""

NONE = "–"
ANCHORED = {"rollout": "/ mu", "old": "/ old", "ref": "/ ref"}
UNSAID = ("ddof", "std_eps", "seed", "normalize", "rarity", "h_max")
"""Fields that a table leaves out where they have their defaults."""


@dataclass(frozen=True, slots=True)
class Description:
    """Everything there is to say about one preset with given settings."""

    name: str  # as it is chosen; of a file, its last part
    objective: Objective
    summary: str
    equation: str  # in the paper's own form
    about: tuple[str, ...]  # paragraphs
    use: str
    deviations: str
    papers: tuple[str, ...]  # links to the source; empty if it has no address
    settings: Mapping[str, tuple[Any, Any]]  # name -> (value, default)
    options: Mapping[str, tuple[Any, Any]]  # common options that differ from what most presets have, likewise

    def axes(self) -> list[tuple[str, str]]:
        """(axis, equation) of each choice."""
        return [(axis, component.equation()) for axis, component in self.objective.components()]


def describe(name: str, /, **overrides: Any) -> Description:
    """Describes ``preset(name, **overrides)``; raises the ConfigError of ``preset``."""
    objective = preset(name, **overrides)
    summary, equation, paragraphs = parse(doc(name))
    use = [p for p in paragraphs if p.startswith("Use it")]
    deviations = [p for p in paragraphs if p.startswith("Deviations:")]
    own = settings(name)
    return Description(
        name=short_name(name),
        objective=objective,
        summary=summary,
        equation=equation,
        about=tuple(p for p in paragraphs if p not in use and p not in deviations),
        use=" ".join(use),
        deviations=" ".join(p.removeprefix("Deviations:").strip() for p in deviations),
        papers=links(summary),
        settings={k: (overrides.get(k, default), default) for k, default in own.items()},
        options={k: pair for k, pair in _options(name, objective).items() if k not in own},
    )


def _options(name: str, objective: Objective) -> dict[str, tuple[Any, Any]]:
    """Options that the preset or the objective sets: the objective's value and the preset's."""
    plain, usual, chosen = (dataclasses.asdict(o) for o in (Options(), Options.of(preset(name)), Options.of(objective)))
    plain["aggregate"] = "own"  # a preset's own average is listed with its other choices
    return {k: (chosen[k], usual[k]) for k in plain if {chosen[k], usual[k]} != {plain[k]}}


def parse(doc: str) -> tuple[str, str, list[str]]:
    r"""Splits a docstring into summary, equation and other paragraphs. The equation is the paragraph after the summary
    if it starts like one.

    >>> parse("First, arXiv 1.\n\nJ = r A,\nr = 1\n\nAbout\nit.\n\nDeviations: none.")
    ('First, arXiv 1.', 'J = r A, r = 1', ['About it.', 'Deviations: none.'])
    """
    # Line breaks inside a paragraph become blanks.
    summary, *paragraphs = (re.sub(r"\s*\n\s*", " ", p) for p in inspect.cleandoc(doc).split("\n\n"))
    equation = paragraphs.pop(0) if paragraphs and re.match(r"[A-Z]\w*[+-]? = |w = ", paragraphs[0]) else ""
    return summary, equation.replace("``", ""), paragraphs


def links(text: str) -> tuple[str, ...]:
    """The addresses of the papers named in ``text``, in order, without repeats.

    >>> links("GRPO, arXiv 2402.03300; cf. arXiv 2402.03300 and https://example.org/x.")
    ('https://arxiv.org/abs/2402.03300', 'https://example.org/x')
    """
    found = re.findall(r"arXiv[: ](\d{4}\.\d{4,5})|(https?://[^\s)>\]]+)", text)
    return tuple(
        dict.fromkeys(f"https://arxiv.org/abs/{number}" if number else url.rstrip(".,;") for number, url in found)
    )


def value(x: Any) -> str:
    """A setting as TOML writes it.

    >>> value(True), value("k3"), value(1e-3), value(float("inf"))
    ('true', '"k3"', '0.001', 'inf')
    """
    if isinstance(x, bool):
        return str(x).lower()
    return f'"{x}"' if isinstance(x, str) else "unset" if x is None else repr(x)


def setting(name: str, x: Any, default: Any) -> str:
    """``name = x``, with the default where it differs."""
    return f"{name} = {value(x)}" + ("" if x == default else f" (default {value(default)})")


# ------------------------------------------------------------------------------------------------------ as plain text


def text(d: Description, *, width: int = 100) -> str:
    """The description for a terminal of ``width`` columns."""
    # The first line is the coefficient C_t; the lines below are its axes, which are wrapped here.
    head, *_ = d.objective.equation().splitlines()
    blocks = [d.name, *(["\n".join(_wrapped(d.summary, width))] if d.summary else [])]
    blocks += [_hanging("    ", d.equation, width)] if d.equation else []
    blocks += ["\n".join(_wrapped(p.replace("``", ""), width)) for p in d.about]
    blocks.append("\n".join([head, *(_hanging(f"  {axis:<11} ", eq, width) for axis, eq in d.axes())]))
    blocks.append("\n".join(["What the lines decide", *(f"  {axis:<11} {says}" for axis, says in _decided(d))]))
    blocks.append("\n".join(_hanging(f"{label:<11} ", said, width) for label, said in _facts(d) if said))
    return "\n\n".join(blocks)


def _decided(d: Description) -> list[tuple[str, str]]:
    return [(axis, AXES[axis]) for axis in dict.fromkeys(axis for axis, _ in d.axes())]


def _facts(d: Description) -> Iterator[tuple[str, str]]:
    yield "Settings", ", ".join(setting(k, *v) for k, v in d.settings.items()) or "none of its own"
    yield "Options", ", ".join(setting(k, *v) for k, v in d.options.items())
    yield "Also takes", ", ".join(k for k in OPTIONS if k not in d.options and k not in d.settings)
    yield "Needs", needs(d.objective)
    yield "Scope", SCOPES[d.objective.scope]
    yield "Note", "; ".join(d.objective.notes)
    yield "Paper", " ".join(d.papers)
    yield "Deviations", d.deviations.replace("``", "")
    yield "Use it", d.use.removeprefix("Use it ").replace("``", "")


def needs(objective: Objective) -> str:
    """The fields of a batch that the objective reads in addition to log-probs, mask and group ids."""
    return ", ".join(f"{name} ({FIELDS[name]})" if name in FIELDS else name for name in objective.needs)


def _hanging(label: str, said: str, width: int) -> str:
    """``label``, then ``said`` wrapped and indented by the label's width; notes after six spaces stay notes."""
    return "\n".join(_wrapped(said, width, label=label))


def _wrapped(said: str, width: int, *, label: str = "") -> list[str]:
    """Wraps to lines of at most ``width``; never splits words, so that they can be searched and copied."""
    return textwrap.wrap(
        said, width, initial_indent=label, subsequent_indent=" " * len(label), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- as a row

COLUMNS = ("preset", "filter, shape", "advantage", "ratio", "weight, correction", "average", "further terms", "paper")
BRIEF = ("preset", "advantage", "ratio", "weight", "average", "terms", "paper")


def row(d: Description) -> tuple[str, ...]:
    """All choices of a preset in a word or two each, in the order of ``COLUMNS``."""
    return (
        d.name,
        _all_of(d, "keep", "shape", "prune", "select"),
        _all_of(d, "advantage", "adjust"),
        _all_of(d, "ratio"),
        _all_of(d, "weight", "correction"),
        _average(d),
        _all_of(d, "divergence", "entropy"),
        d.papers[0] if d.papers else NONE,
    )


def brief(d: Description) -> tuple[str, ...]:
    """The same without numbers and filters, in the order of ``BRIEF``: for a terminal."""
    axes = (("advantage", "adjust"), ("ratio",), ("weight",), ("aggregate",), ("divergence", "entropy"))
    advantage, ratio, weight, average, terms = (_plain(_all_of(d, *names)) for names in axes)
    correction = Options.of(d.objective).correction
    return (
        d.name,
        advantage.replace("group ", ""),
        ratio,
        weight.partition(",")[0] + ("" if correction == "none" else f", {correction}"),
        re.sub("(sequence|prompt) mean token (mean|sum)", lambda m: f"{m[1]} {m[2]}", average),
        terms,
        d.papers[0].rpartition("/")[2] if d.papers else NONE,
    )


def _plain(text: str) -> str:
    return re.sub(r" [\d.]+(e-\d+)?\b", "", text)


def _all_of(d: Description, *axes: str) -> str:
    return ", ".join(short(component) for axis, component in d.objective.components() if axis in axes) or NONE


def _average(d: Description) -> str:
    option = Options.of(d.objective).aggregate
    return _all_of(d, "aggregate") if option == "own" else option


def short(component: Any) -> str:
    """Describes a choice in a few words: its class, its numbers, and the choices that it consists of.

    >>> from trew.objective.advantage import GroupMean, GroupStd, BaselineAdvantage
    >>> from trew.objective.weight import Clip
    >>> short(Clip(0.2, 0.28)), short(BaselineAdvantage(GroupMean(), GroupStd()))
    ('clip 0.2 0.28', 'group mean, group std')
    """
    inner: list[str] = []
    # "Ratio" says nothing in the column of ratios; NoRatio becomes "none".
    name = re.sub("^No(?=Ratio)|Ratio$", "", type(component).__name__).removesuffix("Ratio") or "none"
    words = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower()]
    for f in dataclasses.fields(component):
        if f.name == "behaviour":  # follows from the ratio's anchor and the corrections
            continue
        x = getattr(component, f.name)
        if dataclasses.is_dataclass(x):
            inner += [] if isinstance(x, NoScaling) else [short(x)]
        # Left out: defaults that nobody asks about, switches that are off, no limit, and the usual place.
        elif (f.name in UNSAID and x == f.default) or x is False or x in (math.inf, "loss"):
            continue
        elif f.name == "anchor":
            words += [] if x == f.default else [ANCHORED[x]]
        elif x is True:
            words.append(f.name)
        else:
            words.append(f"{x:g}" if isinstance(x, (int, float)) else str(x))
    # A baseline advantage is named by its parts: "group mean, group std".
    own = [] if isinstance(component, BaselineAdvantage) else [" ".join(words)]
    return ", ".join(own + inner)


def table(rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Aligns columns. With ``width``, cuts the widest columns except the first until the lines fit.

    >>> print(table([("a", "bbbbbb"), ("aa", "b")], width=8))
    a   bbb…
    aa  b
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # One column narrower at a time, always the widest; never below 4 characters.
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths[1:], default=0) > 4:
        widths[widths.index(max(widths[1:]), 1)] -= 1
    cut = [[c if len(c) <= w else f"{c[: w - 1]}…" for c, w in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cut)


def listed(names: Sequence[str] | None = None, *, width: int | None = None) -> str:
    """The table of ``names``, by default of all presets."""
    return table([BRIEF, *(brief(describe(n)) for n in names or PRESETS)], width=width)


def known(names: Sequence[str]) -> list[str]:
    """Returns ``names`` if all are presets or in files; raises ConfigError naming those that are not."""
    wrong = [n for n in names if n not in PRESETS and not is_file_spec(n)]
    if wrong:
        hint = "trew explain --list shows all; path/to/file.py:name is one of your own"
        raise ConfigError([f"{n!r} is not an objective{meant(n)}; {hint}" for n in wrong])
    return list(names)
