"""Checks that an objective fits a run: missing inputs, settings that teach nothing, options without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..config import Config, RolloutConfig
from ..distributed import launch
from ..objective import Objective, TokenBatch, preset, presets
from ..objective.advantage import PassAtK
from ..objective.batch import ReasoningSteps
from ..objective.component import Component
from ..objective.covariance import ClipCov
from ..objective.filter import UnevenGroups
from ..objective.imitation import DEMONSTRATED, CorrectDemonstrations, Demonstrated
from ..objective.preferred import PreferenceWeight, Preferred, PromptMeanTokenSum
from ..objective.ratio import NoRatio
from ..objective.shaping import SoftOverlong
from ..objective.turns import Turns
from ..runs.changes import notes_on

GIVEN = frozenset(
    {
        "rewards", "entropies", "score_norms", "truncated", "old_logprobs", "ref_logprobs", "rollout_logprobs",
        "baselines", "teacher_logprobs", "values",
    }
)  # fmt: skip
"""The optional batch fields that a run provides; ``rollout_logprobs`` only without top-p, top-k and min-p, and
``teacher_logprobs`` with a teacher (:mod:`.teaching`)."""

_MISSING = {
    "advantages": "whose advantages come from outside (a critic), and a run has rewards only",
    "step_rewards": "which needs a reward for every step of a completion (a reward model with args.step_mark, or a "
    "function that returns (end, value) lists), and this run has rewards of whole completions only",
    "baselines": "which compares with greedy answers, and the rollouts that are replayed have none",
    "turns": "which gives credit to the turns of an episode, and without an [environment] a completion is one turn",
    "states": "which compares turns that began in the same state, and the rollouts that are replayed name no states",
}
LORA_RATE = 1e-5
"""Learning rates below this get a note where only adapters are trained."""

_CUTS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def problems(
    objective: Objective, config: Config, *, given: frozenset[str] = GIVEN, departures: Sequence[str] = ()
) -> list[str]:
    """Says why this run cannot train this objective; empty if it can. ``given``: fields that the run provides.
    ``departures``: settings by which a replay departs from the run that it replays."""
    name = config.objective.preset
    # One reason is enough: what lacks turns lacks their states as well.
    lacking = [need for need in objective.needs if need not in given][:1]
    found = [
        f"objective.preset: got {name!r}, {_MISSING.get(need, f'which needs {need}')}; choose another preset, or call "
        f"trew.preset({name!r}).loss in a loop of your own"
        for need in lacking
    ]
    if isinstance(objective.advantage, DEMONSTRATED):
        given_rows = "preference pairs" if isinstance(objective.advantage, Preferred) else "demonstrations"
        found.append(
            f"objective.preset: got {name!r}, which learns from {given_rows}, and here the policy samples; "
            f"choose another preset, or call trew.preset({name!r}).loss in a loop of your own. online-rft "
            "learns from correct completions of the policy itself"
        )
    found += _cut_distributions(objective, config)
    if config.learner.reference_every and "ref_logprobs" not in objective.needs:
        found.append(
            f"learner.reference_every: got {config.learner.reference_every}, but {name} has no reference (beta = "
            f"{objective.beta:g}): set objective.beta above 0, or leave it out"
        )
    found += _critic(objective, config)
    found += _refills(objective, config)
    found += _numbers_that_do_not_fit(objective, config)
    found += _stale(objective, config, departures)
    # Tried last: an objective that does not fit may not run on the example.
    if not found and not teaches(objective, config):
        found.append(_nothing_to_learn(objective, config))
    return found


def demonstration_problems(objective: Objective, config: Config) -> list[str]:
    """Says why demonstrations cannot train this objective; empty if they can."""
    name = config.objective.preset
    if unfit := _unfit_for_rows(objective, config):
        return [unfit]
    found = [
        f"objective: {name} with {dict(config.objective.args)} needs {need}, which demonstrations do not have; change "
        "these options"
        for need in objective.needs
        if need not in ("rewards", "truncated", "ref_logprobs")
    ]
    if objective.nll.active:
        why = "compares completions alone" if config.prefers else "learns the likelihood of its completions already"
        found.append(f"objective.nll: got {objective.nll.coefficient:g}, accepts 0 here: {name} {why}")
    if isinstance(objective.weight, PreferenceWeight) and objective.beta:
        found.append(
            f"objective.beta: got {objective.beta:g}, accepts 0 for {name}: it is the coefficient of a KL term beside "
            f"the loss, and DPO's beta is objective.dpo_beta = {objective.weight.beta:g}; set that, and remove this"
        )
    if isinstance(objective.weight, PreferenceWeight) and not isinstance(objective.aggregate, PromptMeanTokenSum):
        found.append(
            f"objective.aggregate: got {config.objective.args.get('aggregate')!r}, accepts none beside {name}, whose "
            "loss is a mean over pairs: other shares of tokens would log and learn another one; leave it out"
        )
    kl = objective.reference
    if kl.active and kl.place != "loss":
        found.append(
            f"objective.kl_place: got {kl.place!r}, accepts 'loss' for {name}: elsewhere the KL is that of the policy "
            "that sampled, and nobody sampled these completions"
        )
    if objective.dynamic_sampling:
        found.append("objective.dynamic_sampling: got true, but demonstrations are not sampled; remove it")
    if config.learner.reference_every and "ref_logprobs" not in objective.needs:
        found.append(
            f"learner.reference_every: got {config.learner.reference_every}, but {name} has no reference (beta = "
            f"{objective.beta:g}): set objective.beta above 0, or leave it out"
        )
    found += _critic(objective, config)
    return found


def _unfit_for_rows(objective: Objective, config: Config) -> str:
    """Why an objective learns nothing from rows of this kind; empty if it does."""
    name, kind = config.objective.preset, Preferred if config.prefers else (Demonstrated, CorrectDemonstrations)
    if isinstance(objective.advantage, kind):
        return ""
    fit = " or ".join(n for n in presets() if isinstance(preset(n).advantage, kind))
    learns = "what a policy samples"
    if isinstance(objective.advantage, DEMONSTRATED):
        learns = "demonstrations" if config.prefers else "preference pairs"
    rows = "pairs" if config.prefers else "demonstrations"
    return f"objective.preset: got {name!r}, which learns from {learns}; accepts {fit} for {rows}"


def _cut_distributions(objective: Objective, config: Config) -> list[str]:
    """Refuses top-p, top-k and min-p if the objective reads the sampler's log-probs."""
    if "rollout_logprobs" not in objective.needs:
        return []
    rollout, name = config.rollout, config.objective.preset
    reading = [attribute for attribute, component in objective.components() if "rollout_logprobs" in component.needs]
    readers = ", ".join(dict.fromkeys(reading))
    return [
        f"rollout.{key}: got {getattr(rollout, key)!r}, accepts {off!r} here: {name} reads the sampler's log-probs "
        f"({readers}), and those of a cut distribution are not the policy's; set rollout.{key} = {off!r}, or take "
        "an objective that does not read them"
        for key, off in _CUTS.items()
        if getattr(rollout, key) != off
    ]


def _critic(objective: Objective, config: Config) -> list[str]:
    """Refuses settings of a critic that the objective does not have, and those under which a critic cannot work."""
    own, name = config.critic, config.objective.preset
    if "values" not in objective.needs:
        return [
            f"critic.{field.name}: got {getattr(own, field.name)!r}, but {name} has no critic; remove it, or choose an "
            "objective that has one, such as ppo"
            for field in dataclasses.fields(own)
            if getattr(own, field.name) != field.default
        ]
    cluster, found = config.cluster, []
    if cluster.learner != 1 and cluster.shard != "none":
        found.append(
            f"cluster.shard: got {cluster.shard!r}, accepts 'none' for {name}: every rank has all weights of its "
            "critic; set cluster.shard = 'none', or cluster.learner = 1"
        )
    if cluster.colocate:
        found.append(
            f"cluster.colocate: got true, accepts false for {name}: its critic does not leave the GPU while servers "
            "use it; give servers GPUs of their own"
        )
    return found


def _refills(objective: Objective, config: Config) -> list[str]:
    """Refuses a number of refills where no group is replaced."""
    usual, rollout = RolloutConfig().refills, config.rollout
    # A replay samples nothing at all, and has this setting from the run that it replays.
    if objective.dynamic_sampling or rollout.replay or rollout.refills == usual:
        return []
    return [
        f"rollout.refills: got {rollout.refills}, accepts {usual} (the default) here: {config.objective.preset} has no "
        "dynamic sampling, which replaces groups without signal; remove it, or set objective.dynamic_sampling = true"
    ]


def _stale(objective: Objective, config: Config, departures: Sequence[str]) -> list[str]:
    """Refuses rollouts of older weights if no part of the objective accounts for them."""
    stale, bound, name = config.rollout.stale_steps, config.cluster.staleness, config.objective.preset
    corrected = any(correction.mismatch for correction in objective.correction)
    add = 'with\n  [objective]\n  correction = "tis"\nor take a preset'
    # In one process an importance ratio is enough: `frozen` measures it against the sampler's log-probs. Those of a
    # server differ from the learner's also at equal weights, so there the objective must account for the sampler.
    if stale or departures:
        got = f"rollout.stale_steps: got {stale}, accepts 0 here"
        if departures:
            got = f"rollout.replay: {', '.join(departures)} differ from the recorded run, whose weights this one leaves"
        if isinstance(objective.ratio, NoRatio) and not corrected:
            return [
                f"{got}: {name} takes every completion for one of the current weights; correct for the difference "
                f"{add} with an importance ratio, such as grpo"
            ]
    elif bound:
        got = f"cluster.staleness: got {bound}, accepts 0 here"
        if objective.ratio.anchor != "rollout" and not corrected:
            return [
                f"{got}: {name} does not account for the weights that a completion was sampled from, nor for servers "
                f"that compute log-probs in their own way; correct for both {add} whose ratio is measured against the "
                "sampler, such as aipo or dppo-tv"
            ]
    else:
        return []
    return [
        f"{got}: rollout.{key} = {getattr(config.rollout, key)!r} cuts the sampling distribution, whose log-probs "
        f"cannot be compared with the policy's; set rollout.{key} = {off!r}"
        for key, off in _CUTS.items()
        if getattr(config.rollout, key) != off
    ]


def _numbers_that_do_not_fit(objective: Objective, config: Config) -> list[str]:
    """Refuses numbers of the objective that are too large for the rollouts."""
    rollout, advantage = config.rollout, objective.advantage
    found = [
        problem
        for shape in objective.shape
        if isinstance(shape, SoftOverlong) and (problem := _overlong(shape.cache, config))
    ]
    if isinstance(advantage, PassAtK) and advantage.k >= rollout.completions:
        found.append(
            f"objective.k: got {advantage.k}, accepts less than rollout.completions = {rollout.completions}: whether "
            "one of all completions is right says nothing about any single one; lower it, or raise rollout.completions"
        )
    return found


def _overlong(cache: int, config: Config) -> str:
    """What is wrong with punishing the last ``cache`` tokens before the limit; empty if nothing is."""
    if config.plays and config.environment.turns > 1:
        return (
            f"objective.overlong_cache: got {cache}, accepts 0 with episodes of {config.environment.turns} turns: a "
            "reply that is cut off ends its episode early, far from the limit of all turns together, and would come "
            "out ahead of episodes that went on; set environment.turns = 1, or remove it"
        )
    if cache > config.rollout.max_tokens:
        return (
            f"objective.overlong_cache: got {cache}, accepts at most rollout.max_tokens = {config.rollout.max_tokens}: "
            "from there on every completion would be punished; lower it"
        )
    return ""


def notes(objective: Objective, config: Config, *, departs: bool = False) -> list[str]:
    """Lists settings that have no effect in this run, or are probably unintended. ``departs``: it replays rollouts of
    a run that it does not follow."""
    said = _low_rate(config) + launch.unwatched(config)
    older = departs or bool(config.rollout.stale_steps or config.cluster.staleness)
    idle = _idle_in_one_step(objective, config, older=older)
    if idle and config.optimizer_steps == config.steps:
        exactly = "exactly 1" if objective.ratio.anchor == "old" else "1 but for rounding"
        said.append(
            f"{objective.name}: one optimizer step per set of rollouts, so that the ratio is {exactly} and nothing is "
            f"done by {' and '.join(idle)}; learner.inner_updates or learner.minibatch_prompts would make more steps"
        )
    return said + _idle_options(objective, config) + _blind_filter(objective)


def _blind_filter(objective: Objective) -> list[str]:
    if not objective.shape or not any(isinstance(keep, UnevenGroups) for keep in objective.keep):
        return []
    return [
        f"objective.overlong_cache: {objective.name} leaves out groups whose rewards are equal before lengths count, "
        "so that the punishment acts in the other groups alone"
    ]


def demonstration_notes(objective: Objective, config: Config) -> list[str]:
    """The same for demonstrations and pairs."""
    said = _low_rate(config) + launch.unwatched(config) + _idle_options(objective, config)
    said += [note for one in config.sets if one.task == "rollouts" for note in notes_on(one.train)]
    # Completions that a policy sampled may have been cut off when they were.
    cut = config.sft.overlong == "truncate" or any(one.task == "rollouts" for one in config.sets)
    if "overlong_filtering" in config.objective.args and not cut:
        said.append("objective.overlong_filtering: does nothing, as no row is cut off (sft.overlong = 'truncate')")
    return said


def _low_rate(config: Config) -> list[str]:
    if not config.lora.rank or config.learner.lr >= LORA_RATE:
        return []
    return [
        f"learner.lr: {config.learner.lr:g} is low for LoRA, whose best rate is about ten times that of training "
        f"all weights: {LORA_RATE:g} to 2e-4 is common"
    ]


def _idle_options(objective: Objective, config: Config) -> list[str]:
    idle_options = {
        "kl": objective.beta == 0, "kl_place": objective.beta == 0,
        "entropy_step": not objective.entropy_bonus.target,
    }  # fmt: skip
    others = {"kl": "beta", "kl_place": "beta", "entropy_step": "entropy_target"}
    return [
        f"objective.{key}: does nothing while {others[key]} = 0"
        for key, idle in idle_options.items()
        if idle and key in config.objective.args
    ]


def teaches(objective: Objective, config: Config) -> bool:
    """Whether any completion could have an advantage, tried on a step with one right answer per prompt."""
    # Tried instead of derived from the settings: presets, shaping and filters combine in too many ways for rules.
    prompts, completions = config.rollout.prompts, config.rollout.completions
    batch = objective.prepare(_example(prompts=prompts, completions=completions, max_length=config.sampled_tokens))
    assert batch.advantages is not None
    return bool(batch.advantages.any())


def _nothing_to_learn(objective: Objective, config: Config) -> str:
    name, completions = objective.name, config.rollout.completions
    if completions > 1:
        return (
            f"objective: got {name} with {dict(config.objective.args)}, which gives every completion the advantage 0: "
            f"nothing would be learned; change {', '.join(config.objective.args) or 'the preset'}"
        )
    unfit, given = (PassAtK, *DEMONSTRATED), GIVEN - {"teacher_logprobs"}  # there may be no teacher
    # Presets that could be trained here: with what a run gives, and not by pairs or demonstrations.
    others = [n for n in presets() if set((o := preset(n)).needs) <= given and not isinstance(o.advantage, unfit)]
    others = [n for n in others if teaches(preset(n), config)]
    return (
        f"rollout.completions: got 1, accepts at least 2 for {name}: it compares the completions of a prompt with each "
        f"other, and there nothing would be learned; raise it, or choose {' or '.join(others)} as objective.preset"
    )


def _idle_in_one_step(objective: Objective, config: Config, *, older: bool) -> list[str]:
    """Lists components without effect in the first optimizer step on a set of rollouts, but with some once the policy
    has moved. ``older``: other weights than the policy's may have sampled them."""
    # still: the policy is the one that the ratio is measured against; moved: it is far from it.
    still = objective.prepare(_example(prompts=8, completions=8, max_length=config.sampled_tokens))
    # Log-ratios of +-6: far outside the usual clip ranges and trust regions, in both directions.
    shift = torch.where(still.sequence_ids % 3 == 0, 6.0, -6.0)
    moved = still.replace(old_logprobs=still.logprobs + shift, rollout_logprobs=still.logprobs + shift)
    if older:
        # As in .frozen: beside a correction, which accounts for the sampler, the ratio begins at 1 all the same.
        corrected = any(correction.mismatch for correction in objective.correction)
        still = moved.replace(old_logprobs=still.logprobs) if corrected else moved
    idle: list[tuple[str, Component]] = []
    if _is_idle_weight(objective, still, moved):
        idle.append(("its trust region", objective.weight))
    # Idle: 1 everywhere while the policy stands still, and not once it has moved.
    idle += [("its correction", c) for c in objective.correction if (c(still) == 1).all() and (c(moved) != 1).any()]
    idle += [
        ("its pull back", term)
        for term in objective.divergence
        if term.active and not term.derivative(still).any() and term.derivative(moved).any()
    ]
    return [f"{what} ({component.equation().partition('      ')[0]})" for what, component in idle]


def _is_idle_weight(objective: Objective, still: TokenBatch, moved: TokenBatch) -> bool:
    # Drawn at random over the step: one example does not show whether it has an effect.
    if isinstance(objective.weight, ClipCov):
        return False
    assert still.advantages is not None
    # A trust region that does nothing on policy gives every token the weight 1.
    w = [objective.weight(objective.ratio(b), advantages=still.advantages, batch=b) for b in (still, moved)]
    return bool((w[0] == 1).all() and (w[1] != 1).any())


def _example(*, prompts: int, completions: int, max_length: int) -> TokenBatch:
    """A step of two-token completions. The first of each prompt is right; with one completion per prompt, the one of
    every second prompt."""
    size = prompts * completions
    number = torch.arange(size)
    # Sample 0 of every prompt is right; with one completion a prompt, every second prompt.
    right = number % (completions if completions > 1 else 2) == 0
    # Fractional multiples of the golden ratio: distinct, evenly spread over [0, 1), without a random generator.
    spread = torch.arange(2 * size) * 0.618034 % 1
    logprobs = -6 * spread
    return TokenBatch(
        logprobs=logprobs,
        mask=torch.ones(2 * size, dtype=torch.bool),
        sequence_ids=number.repeat_interleave(2),
        group_ids=number // completions,
        rewards=right.to(torch.float32),
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        ref_logprobs=logprobs,
        # Not the policy's own, from which distillation would learn nothing.
        teacher_logprobs=logprobs - 0.5 - spread,
        entropies=0.1 + spread,
        score_norms=0.1 + spread,
        correct=right,
        truncated=torch.zeros(size, dtype=torch.bool),
        baselines=torch.zeros(size),
        values=torch.zeros(2 * size),
        step_rewards=ReasoningSteps(right.to(torch.float64), number, torch.full((size,), 2)),
        turns=Turns(right.to(torch.float64), number, torch.full((size,), 2), torch.zeros_like(number)),
        max_length=max_length,
    )
