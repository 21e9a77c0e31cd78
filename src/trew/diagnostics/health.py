"""Health of a run: rules over its rows of metrics, equal while it trains, after a resume and in its report.

A rule reads the last rows, and some rules the first ones, and describes a problem with its figures; ``ADVICE`` suggests
what to do. Rules never change the training. docs/health.md lists them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import DEMONSTRATED, HealthConfig
from ..utils.metric_rows import is_evaluation

Row = Mapping[str, Any]

AGAIN = 3
"""Consecutive rows that must agree: a single row may exceed a limit by chance."""
BETTER = 0.02
"""The rise in accuracy from which a change of length counts as learning."""
COMPARED_WITH_OTHERS = frozenset({"remax", "reinforce-pp", "ppo", "vapo", "opd"})
"""Presets in which groups whose rewards are all equal teach too, whatever the rewards are."""
COMPARES_PARTS = frozenset({"gdpo", "grpo-process", "gigpo", "mt-grpo", "turn-returns"})
"""Presets that compare single rewards, steps or turns, which may differ where their sums are equal."""
DROPS_EQUAL = frozenset(
    {"dapo", "gtpo", "grpo-s", "two-sided", "scalerl", "prime-rl", "prime-rl-ipo", "aspo", "gpg", "high-entropy-tokens"}
)
"""Presets that drop groups without a signal, whatever else would learn from them."""
SHORT = 0.5
"""The share of a step's groups below which dynamic sampling does not find what it looks for."""
SOLVED = 0.9
"""The accuracy from which low entropy is not a collapse: there is little left to be uncertain about."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The configuration values that health rules read."""

    health: HealthConfig = field(default_factory=HealthConfig)
    prompts: int = 0
    completions: int = 2
    max_grad_norm: float = 1.0
    max_tokens: int = 0
    stale_steps: int = 0
    staleness: int = 0
    dtype: str = "float32"
    demonstrates: bool = False
    replays: bool = False
    compares: bool = True  # completions with their group, so that equal rewards teach nothing
    right_teaches: bool = False  # a group of right completions alone teaches as well

    @staticmethod
    def of(table: Mapping[str, Any]) -> Facts:
        """Reads the facts from a configuration of nested plain values, any of which may be missing or broken."""

        def known(section: str, wanted: Any) -> dict[str, Any]:
            """The settings of ``wanted`` that have the right type."""
            given = table.get(section)
            given = given if isinstance(given, Mapping) else {}
            return {
                # In the type of the default: 3 may be written where a float is meant.
                k: type(v)(given[k])
                for k, v in wanted.items()
                if (number := finite(given.get(k))) is not None and abs(number) < 2**53  # no more can be counted to
            }

        default = Facts()
        learner, rollout = table.get("learner"), table.get("rollout")
        half = isinstance(learner, Mapping) and learner.get("dtype") == "bfloat16"
        health = HealthConfig(**known("health", dataclasses.asdict(default.health)))
        return Facts(
            # The file may have been edited or damaged: the defaults, rather than no report.
            HealthConfig() if health.problems() else health,
            **known(
                "rollout", {k: getattr(default, k) for k in ("prompts", "completions", "max_tokens", "stale_steps")}
            ),
            **known("cluster", {"staleness": default.staleness}),
            **known("learner", {"max_grad_norm": default.max_grad_norm}),
            dtype="bfloat16" if half else default.dtype,
            demonstrates=_demonstrates(table.get("data")),
            replays=isinstance(rollout, Mapping) and bool(rollout.get("replay")),
            compares=_compares(_settings(table.get("objective"))),
            right_teaches=_right_teaches(_settings(table.get("objective"))),
        )


def _demonstrates(data: Any) -> bool:
    """Whether the data say what to answer, so that nothing is sampled."""
    sets = data if isinstance(data, list | tuple) else [data]
    return any(isinstance(one, Mapping) and one.get("task") in DEMONSTRATED for one in sets)


def _settings(objective: Any) -> dict[str, Any]:
    """The settings of an objective, its options among them; none if it is broken."""
    if not isinstance(objective, Mapping):
        return {}
    given = objective.get("args")
    return {**objective, **(given if isinstance(given, Mapping) else {})}


def _compares(objective: Mapping[str, Any]) -> bool:
    """Whether a group whose rewards are all equal may teach nothing."""
    if objective.get("preset") == "reinforce" and objective.get("baseline") == "batch":
        return False
    if finite(objective.get("distill")) or finite(objective.get("overlong_cache")):  # compares lengths as well
        return False
    return str(objective.get("preset")) not in COMPARED_WITH_OTHERS | COMPARES_PARTS


def _right_teaches(objective: Mapping[str, Any]) -> bool:
    """Whether a group whose completions are all right teaches, although one of wrong completions alone does not."""
    if objective.get("preset") == "reinforce":
        return objective.get("baseline", "none") == "none"
    dropped = str(objective.get("preset")) in DROPS_EQUAL or objective.get("dynamic_sampling") is True
    return objective.get("preset") == "online-rft" or (bool(finite(objective.get("nll"))) and not dropped)


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """A warning of a rule: the step, what the rule found, and what to do."""

    step: int
    rule: str
    text: str


# --------------------------------------------------------------------------------------------------------------------
# Rules: (history, facts) -> a description of the problem with its figures, empty if there is none


class History:
    """The first and the last ``window`` rows of a run's steps."""

    def __init__(self, config: HealthConfig) -> None:
        self.first: list[Row] = []
        # The longest look back of any rule.
        self.last: deque[Row] = deque(maxlen=max(config.window, config.no_signal, AGAIN))
        self.window = config.window

    def add(self, row: Row) -> None:
        if len(self.first) < self.window:
            self.first.append(row)
        self.last.append(row)

    def mean(self, name: str) -> float | None:
        """The mean over the last ``window`` rows; None for fewer rows, or if fewer than half of them have a value."""
        return self._mean(name, list(self.last)[-self.window :])

    def at_first(self, name: str) -> float | None:
        """The mean over the first ``window`` rows, in the same way."""
        return self._mean(name, self.first)

    def newest(self, name: str, count: int = AGAIN) -> list[float]:
        """The last ``count`` rows' values; empty unless all of them have one."""
        values = [finite(row.get(name)) for row in list(self.last)[-count:]]
        found = [v for v in values if v is not None]
        return found if len(found) == count else []

    def _mean(self, name: str, rows: Sequence[Row]) -> float | None:
        values = [v for row in rows if (v := finite(row.get(name))) is not None]
        if len(rows) < self.window or 2 * len(values) < len(rows):
            return None
        return sum(value / len(values) for value in values)  # the sum of the values themselves might be no float


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def finite(value: Any) -> float | None:
    """The value as a finite float; None if it is no number, or one that no float can hold (10**400)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def entropy(h: History, f: Facts) -> str:
    before, now, right = h.at_first("entropy"), h.mean("entropy"), h.mean("accuracy")
    if before is None or now is None or now >= f.health.entropy * before or (right is not None and right >= SOLVED):
        return ""
    return f"entropy fell from {before:.3g} to {now:.3g} nats per token"


def kl(h: History, f: Facts) -> str:
    values = h.newest("kl")
    # The mean over rows of data is no KL: the policy has not sampled them, and is to move there.
    if not values or min(values) < f.health.kl or f.demonstrates:
        return ""
    return f"the KL is {values[-1]:.3g} nats per token, {AGAIN} steps in a row above {f.health.kl:g}"


def kl_old(h: History, f: Facts) -> str:
    values = h.newest("kl_old")
    if not values or min(values) < f.health.kl_old:
        return ""
    if f.stale_steps or f.staleness or f.replays:  # without a correction, from the policy that sampled, steps ago
        return f"the policy is {values[-1]:.3g} nats per token from the one that its ratio is measured against"
    return (
        f"while one step is learned from, the policy is {values[-1]:.3g} nats per token from where it "
        "began, on average, without the last update"
    )


def ratio(h: History, f: Facts) -> str:
    high, low = h.newest("ratio_q99"), h.newest("ratio_q01")
    if high and min(high) >= f.health.ratio:
        return f"1 % of tokens have an importance ratio above {high[-1]:.3g}"
    if low and max(low) <= 1 / f.health.ratio:
        return f"1 % of tokens have an importance ratio below {low[-1]:.3g}"
    return ""


def no_signal(h: History, f: Facts) -> str:
    values = h.newest("advantage_share", f.health.no_signal)
    if not values or max(values) > 0:
        return ""
    right = h.newest("accuracy", f.health.no_signal)
    if f.right_teaches and right and max(right) > 0:  # by their likelihood, without an advantage
        return ""
    return f"{len(values)} steps in a row in which no completion had an advantage: nothing is being learned"


def zero_signal(h: History, f: Facts) -> str:
    now, right = h.mean("zero_signal_share"), h.mean("accuracy")
    if f.completions < 2 or not f.compares or now is None:
        return ""
    if f.right_teaches and right is not None:
        # At least so many are all wrong: no more than ``accuracy`` of all groups can be all right.
        wrong = now - right
        return f"in {wrong:.0%} of groups or more all completions are wrong" if wrong >= f.health.zero_signal else ""
    if now < f.health.zero_signal:
        return ""
    most = "" if right is None else f"; accuracy is {right:.2f}"
    return f"in {now:.0%} of groups all completions score the same{most}"


def short(h: History, f: Facts) -> str:
    now = h.mean("groups_trained")
    if now is None or f.replays or now >= SHORT * f.prompts:
        return ""
    return f"steps learn from {now:.3g} groups on average, not from rollout.prompts = {f.prompts}"


def truncated(h: History, f: Facts) -> str:
    now = h.mean("truncated_share")
    # Rows of data are cut where sft.overlong asks for it, and counted before the first step.
    if now is None or now < f.health.truncated or f.demonstrates:
        return ""
    limit = f" of rollout.max_tokens = {f.max_tokens}" if f.max_tokens else ""
    return f"{now:.0%} of completions are cut off at the limit{limit}"


def length(h: History, f: Facts) -> str:
    before, now = h.at_first("completion_length"), h.mean("completion_length")
    # None, or a mean of 0, which has no ratio.
    if not before or not now or 1 / f.health.length < now / before < f.health.length:
        return ""
    was, right = h.at_first("accuracy"), h.mean("accuracy")
    if was is None or right is None or right >= was + BETTER:
        return ""
    return f"completions went from {before:.3g} to {now:.3g} tokens, accuracy from {was:.2f} to {right:.2f}"


def stale(h: History, f: Facts) -> str:
    values = h.newest("staleness", 1)
    if not values or values[0] <= 0 or f.stale_steps or f.staleness or f.replays:  # asked for
        return ""
    return f"completions were made by weights that are {values[0]:g} updates old"


def unchanged(h: History, f: Facts) -> str:
    values, rates, norms = h.newest("changed_share"), h.newest("lr"), h.newest("grad_norm")
    if norms and min(norms) == 0:
        return ""  # without a gradient nothing was to change, whatever the learning rate: not rounding
    if not values or 1 - max(values) < f.health.unchanged:
        return ""
    rate = f" at a learning rate of {rates[-1]:.3g}" if rates else ""
    return f"updates leave {1 - values[-1]:.1%} of the weights as they are{rate}: they are lost in rounding"


def clipped(h: History, f: Facts) -> str:
    values = h.newest("grad_norm")
    if not values or min(values) < f.health.clipped * f.max_grad_norm:
        return ""
    return f"the gradient norm is {values[-1]:.3g}, cut down to learner.max_grad_norm = {f.max_grad_norm:g}"


def mismatch(h: History, f: Facts) -> str:
    values = h.newest("canary_gap")
    # The setting is meant for bfloat16; what float32 rounds is a hundredth of it.
    if not values or min(values) < f.health.mismatch * (1.0 if f.dtype == "bfloat16" else 0.01):
        return ""
    return f"log-probs of sampler and learner at the same weights differ by {values[-1]:.3g} nats, mean over tokens"


def corrected(h: History, f: Facts) -> str:
    values = h.newest("corrected_share")
    if not values or min(values) < f.health.corrected:
        return ""
    return f"{values[-1]:.0%} of tokens are beyond the limits of the correction, {AGAIN} steps in a row"


def waiting(h: History, f: Facts) -> str:
    waited, all_of = h.mean("waited_s"), h.mean("seconds")
    if not waited or not all_of or waited / all_of < f.health.waiting:
        return ""
    return f"the learner waits for completions {waited / all_of:.0%} of the time"


def idle(h: History, f: Facts) -> str:
    rest, all_of = h.mean("idle_s"), h.mean("seconds")
    if not rest or not all_of or rest / all_of < f.health.idle:
        return ""
    return f"servers have nothing to do {rest / all_of:.0%} of the time"


RULES: dict[str, Callable[[History, Facts], str]] = {
    "entropy": entropy, "kl": kl, "kl_old": kl_old, "ratio": ratio, "no_signal": no_signal, "zero_signal": zero_signal,
    "short": short, "truncated": truncated, "length": length, "stale": stale, "unchanged": unchanged,
    "clipped": clipped, "mismatch": mismatch, "corrected": corrected, "waiting": waiting, "idle": idle,
}  # fmt: skip

ADVICE = {
    "entropy": (
        "the policy may have collapsed onto one text, and what it no longer samples it cannot learn from. Lower "
        "learner.lr, raise rollout.temperature, or set objective.entropy_bonus or a larger objective.eps_high"
    ),
    "kl": (
        "the policy is far from where it began. Lower learner.lr, raise objective.beta, and look at completions in "
        "rollouts/: the text may have become unreadable"
    ),
    "kl_old": (
        "that is more than a trust region is made for. Lower learner.lr, learner.inner_updates, or the age of rollouts "
        "(cluster.staleness, rollout.stale_steps)"
    ),
    "ratio": (
        "updates move single tokens too far, or sampler and learner are not the same policy (canary_gap in the "
        "metrics). Lower learner.lr, or learner.inner_updates"
    ),
    "no_signal": (
        "what is compared with each other scores the same, or counts as right (eval.correct_at) throughout. Check the "
        "reward (trew rewards test), or try easier prompts, more completions per prompt, a higher temperature"
    ),
    "zero_signal": (
        "such groups teach nothing and cost as much. Where accuracy is low take easier prompts, where it is high "
        "harder ones; or raise rollout.completions; dynamic sampling (dapo) replaces such groups while refills last"
    ),
    "short": (
        "the refills of dynamic sampling run out before they find enough groups with both outcomes, and the gradient "
        "has more noise than the batch that was asked for. Raise rollout.refills or rollout.completions, or take "
        "prompts of another difficulty"
    ),
    "truncated": (
        "what is cut off has no answer, and its reward says nothing about what it would have been. Raise "
        'rollout.max_tokens, check that the model knows its end token, or shape lengths (a "soft_overlong" reward)'
    ),
    "length": (
        "length drifts without being of use. Look at the longest and shortest completions in rollouts/, and at what "
        "the objective's aggregate and the reward pay for; cosine or soft_overlong hold lengths"
    ),
    "stale": "training on them is off-policy by more than the objective knows. The engine must get every update",
    "unchanged": (
        "the run computes and learns nothing. Raise learner.lr (1e-6 is common for all weights, 1e-4 for adapters); "
        "look at learner.max_grad_norm and learner.adam_eps too"
    ),
    "clipped": (
        "gradients are out of proportion. Lower learner.lr, look at the rewards' scale, or at the longest completions; "
        "raise learner.max_grad_norm if this is how large they are here"
    ),
    "mismatch": (
        "ratios between them are noise of that size. Set learner.dtype = 'float32', or kernels = 'plain', or a "
        "correction (objective.correction)"
    ),
    "corrected": (
        "they count less than they should, or not at all. Lower learner.lr or cluster.staleness, so that the policy "
        "moves less while completions are made; look at canary_gap, which says how much of it is rounding"
    ),
    "waiting": (
        "generation is the bottleneck. Give it more servers (cluster.servers), or shorten rollout.max_tokens; where "
        "servers are idle as well, raise cluster.staleness"
    ),
    "idle": (
        "learning is the bottleneck. Use fewer servers and more ranks (cluster.learner); where the learner waits as "
        "well, raise cluster.staleness"
    ),
}


# --------------------------------------------------------------------------------------------------------------------


class Health:
    """Applies the rules to the steps of a run, row by row.

    A rule warns when it begins to hold, and again after ``health.cooldown`` steps if it still holds, or holds again.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.found: list[HealthWarning] = []
        self._history = History(facts.health)
        self.holding: tuple[str, ...] = ()  # the rules that held after the last row, with a warning or without
        self._told: dict[str, int] = {}

    def observe(self, row: Row) -> list[HealthWarning]:
        """Returns the warnings that are due after this row; ignores rows of evaluations."""
        if is_evaluation(row):
            return []
        # Only what rules read: the history is part of every checkpoint.
        self._history.add(_plain(row))
        config, step = self.facts.health, int(row["step"])
        # 0 switches a rule off; a rule without a setting of its name is always on.
        on = {name: rule for name, rule in RULES.items() if getattr(config, name, 1)}
        texts = {name: text for name, rule in on.items() if (text := rule(self._history, self.facts))}
        self.holding = tuple(texts)
        # A rule that stops holding and holds again is not told anew within the cooldown.
        due = [name for name in texts if name not in self._told or step - self._told[name] >= config.cooldown]
        self._told |= dict.fromkeys(due, step)
        found = [HealthWarning(step, name, f"{texts[name]}. {_sentence(ADVICE[name])}") for name in due]
        self.found += found
        return found

    def state(self) -> dict[str, Any]:
        """The state that later warnings depend on, as plain values."""
        h = self._history
        found = [dataclasses.asdict(f) for f in self.found]
        return {"first": list(h.first), "last": list(h.last), "told": dict(self._told), "found": found}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        self._history.first = list(state["first"])
        self._history.last.clear()
        self._history.last.extend(state["last"])
        self._told, self.found = dict(state["told"]), [HealthWarning(**f) for f in state["found"]]


READ = (
    "entropy", "accuracy", "kl", "kl_old", "ratio_q99", "ratio_q01", "advantage_share", "zero_signal_share",
    "groups_trained", "truncated_share", "completion_length", "staleness", "changed_share", "lr", "grad_norm",
    "canary_gap", "corrected_share", "waited_s", "idle_s", "seconds",
)  # fmt: skip
"""The columns that rules read."""


def _plain(row: Row) -> dict[str, float]:
    """The columns that rules read, as far as they are numbers."""
    return {name: value for name in READ if (value := finite(row.get(name))) is not None}


def findings(rows: Iterable[Row], table: Mapping[str, Any]) -> list[HealthWarning]:
    """All warnings of a run, from its rows and its configuration as nested plain values.

    >>> rows = [{"step": s, "truncated_share": 0.8} for s in range(1, 13)]
    >>> [(f.step, f.rule, f.text[:42]) for f in findings(rows, {})]
    [(10, 'truncated', '80% of completions are cut off at the limi')]
    """
    health = Health(Facts.of(table))
    for row in rows:
        health.observe(row)
    return health.found
