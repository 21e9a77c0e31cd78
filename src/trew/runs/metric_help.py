"""One line about each metric, and the order in which the page of trew view shows them. docs/runs.md says more."""

from __future__ import annotations

import re
from collections.abc import Iterable

GROUPS: dict[str, tuple[str, ...]] = {
    "Reward": (
        "reward", "accuracy", "reward/[^/]+", "reward/.*", "baseline", "baseline/none", "unscored_share",
        "margin", "policy/reward", "policy/accuracy",
    ),
    "Policy": ("entropy", "kl", "kl_old", "kl_rollout", "kl_teacher", "nll_correct", "entropy_coefficient"),
    "Trust region": (
        "ratio", "ratio_q99", "ratio_q50", "ratio_q01", "weight", "clip_share", "clip_.*", "ess", "correction.*",
        "corrected_share",
    ),
    "Completions": (
        "completion_length", "truncated_share", "zero_signal_share", "advantage_share", "silent_share",
        "groups_sampled", "groups_trained", "shared_state_share", "monitor/.*",
    ),
    "Episodes": ("turns", "observation_share", "environment/.*", "tool_calls", "tool_errors", "malformed"),
    "Data": ("data/.*", "curriculum/.*"),
    "Critic": ("value", "return", "value_.*", "return_.*", "explained_variance", "critic_.*"),
    "Optimizer": ("loss", "grad_norm", "lr", "changed_share", "bad_steps", "skipped_steps", "learner_tokens", "epoch"),
    "Freshness": (
        "staleness", "age_mean", "age_max", "age/.*", "fresh_share", "canary_gap", "passed_over", "policy_version",
    ),
    "Speed": (
        "tokens_per_second", "seconds", "(rollouts|update|publish)/seconds", "seconds_waited", "waited_s", "idle_s",
    ),
    "Health": ("health",),
}  # fmt: skip
"""Titles, and patterns of names: the first group that matches a metric has it."""

HELP: dict[str, str] = {
    "seconds": "wall-clock seconds of the step, generation to update",
    "rollouts/seconds": "seconds of the step until its completions were there and scored",
    "update/seconds": "seconds of the step that its optimizer steps took, with all passes over its completions",
    "publish/seconds": "seconds of the step until what samples had the new weights",
    "reward": "mean of the weighted reward over the step's completions that have one",
    "reward/<name>": "mean of this reward alone, before its weight",
    "reward/no_answer": "share of completions without an answer",
    "reward/none": "share of completions without a value",
    "reward/<name>/timeout": "share of completions for which this reward has that status",
    "reward/<name>/seconds": "mean seconds of this reward per scored completion",
    "data/<name>/share": "this data set's share of the step's prompts",
    "data/<name>/reward": "mean reward of the completions of this data set's prompts",
    "data/<name>/pass_rate": "share of right answers among the judged completions of this data set's prompts",
    "curriculum/known": "share of all prompts that have a measured pass rate",
    "curriculum/in_target": "share of the prompts with a pass rate whose rate is inside the target",
    "curriculum/by_rate": "share of the draws since the step before that went by pass rate",
    "monitor/<name>": "a sign of reward hacking",
    "epoch": "passes over the rows of demonstrations so far",
    "accuracy": "share of the step's judged completions that are correct",
    "entropy": "mean entropy of the policy per sampled token, in nats, at temperature 1; where servers sample, at "
    "rollout.temperature, unless the objective reads entropies",
    "kl": "mean KL estimate per token in nats: to the reference model, or to the policy before the step",
    "kl_old": "the KL estimate to the policy before the step's first update; of older completions without a "
    "correction, to the one that sampled them",
    "kl_teacher": "mean log-prob of the sampling policy minus the teacher's, in nats per token: their reverse KL",
    "kl_rollout": "the KL estimate between the log-probs of learner and engine",
    "ratio": "importance ratio of current to old policy, mean over tokens",
    "ratio_q01": "importance ratio below which 1 % of tokens are",
    "ratio_q50": "median of the importance ratio over tokens",
    "ratio_q99": "importance ratio below which 99 % of tokens are",
    "clip_share": "share of tokens whose gradient the trust region removed entirely",
    "clip_high_positive": "share of tokens removed above ratio 1 with a positive advantage",
    "clip_high_negative": "share of tokens removed above ratio 1 with a negative advantage",
    "clip_low_positive": "share of tokens removed below ratio 1 with a positive advantage",
    "clip_low_negative": "share of tokens removed below ratio 1 with a negative advantage",
    "ess": "effective sample size of the importance weights, as a share of the tokens with an advantage",
    "correction": "mean factor of the correction of sampler to learner",
    "correction_zero_share": "share of tokens that the correction removes",
    "nll_correct": "mean of minus the log-prob of the tokens of correct completions, in nats",
    "preference_margin": "mean over pairs of dpo_beta times (the chosen answer's log-ratio to the reference minus the "
    "rejected one's)",
    "preference_accuracy": "share of pairs whose margin is above 0",
    "entropy_coefficient": "coefficient of the entropy bonus",
    "baseline": "mean reward of the greedy answers",
    "baseline/none": "share of prompts without a greedy answer's reward, which take no part",
    "completion_length": "mean length of completions in tokens",
    "truncated_share": "share of completions that reached max_tokens",
    "zero_signal_share": "share of groups whose rewards, summed, are all equal: comparing these sums teaches nothing",
    "shared_state_share": "share of turns that began in a state in which another turn of their group began",
    "turns": "turns per episode",
    "observation_share": "share of what was observed among the tokens behind the prompts",
    "environment/<name>": "share of episodes that ended so, or what the environment counts, mean over the episodes",
    "seconds_waited": "seconds in which nothing was generated, since all running episodes waited for an environment",
    "tool_calls": "calls of tools per episode",
    "tool_errors": "calls of tools per episode that gave an error",
    "malformed": "replies per episode whose calls of tools could not be read",
    "groups_sampled": "number of groups, including those that dynamic sampling replaced",
    "groups_trained": "number of groups that the step learned from: fewer than a step's where refills were used up",
    "unscored_share": "share of completions without a reward in the groups that were trained on",
    "weight": "mean weight w(r, A) of the trust region over tokens with an advantage",
    "silent_share": "share of completions that an optimizer step left out because they have no gradient",
    "skipped_steps": "share of the optimizer steps that were not taken, as no completion had a gradient",
    "learner_tokens": "tokens that one optimizer step feeds to the model for a gradient",
    "policy_version": "how often the weights have changed so far",
    "tokens_per_second": "completion tokens over the seconds of the step",
    "lr": "learning rate",
    "value_loss": "loss of the critic: how far its values are from the returns",
    "critic_lr": "learning rate of the critic",
    "critic_grad_norm": "gradient norm of the critic before clipping",
    "value": "the critic's mean value before the step's first update",
    "return": "mean return that the critic learns",
    "value_clipped": "share of tokens whose value has moved by more than critic.clip",
    "explained_variance": "1: a perfect critic, 0: one that knows nothing",
    "grad_norm": "gradient norm before clipping",
    "loss": "loss; its level means little, only its gradient does",
    "advantage_share": "of the completions that were trained on, the share with an advantage",
    "changed_share": "share of weights that the optimizer steps changed, among those with a gradient",
    "canary_gap": "mean difference in nats between the log-probs of sampler and learner at the same weights",
    "staleness": "number of updates by which the weights behind the oldest token were out of date",
    "age_mean": "versions between the oldest token of a group and the step's weights, mean over groups",
    "age_max": "versions between the oldest token of a group and the step's weights, maximum over groups",
    "age/0": "share of groups of this age in versions",
    "waited_s": "seconds for which the learner waited for completions",
    "idle_s": "seconds of this step's rollouts and the last update in which no server had a request",
    "passed_over": "number of groups still running that are older than the newest group of the step",
    "corrected_share": "share of tokens beyond the limits of the correction, before the first update",
    "fresh_share": "share of the tokens that were sampled from the current weights",
    "bad_steps": "consecutive steps that were not applied because of numbers that are not finite",
    "health": "number of warnings that apply",
}

EVALUATION = (
    "eval_accuracy", "eval_low", "eval_high", "eval_n", "eval_loss", "eval_loss_low", "eval_loss_high",
    "eval_perplexity", "eval_preference_margin", "eval_preference_accuracy",
)  # fmt: skip
"""Metrics of evaluations, which the page shows as curves of their own."""


def help_of(name: str) -> str:
    """The line about a metric; empty if there is none.

    >>> help_of("reward/gsm8k"), help_of("age/3")
    ('mean of this reward alone, before its weight', 'share of groups of this age in versions')
    """
    if name in HELP:
        return HELP[name]
    for pattern, key in _PATTERNS:
        if pattern.fullmatch(name):
            return HELP[key]
    return ""


def is_known(name: str, columns: Iterable[str]) -> bool:
    """Whether a run with these columns might have had this metric too: a row has it only where it says something.

    The names of rewards, data sets and monitors are the run's own, so that one that it does not have is none.

    >>> is_known("kl", []), is_known("eval_low", []), is_known("age/3", []), is_known("rewrd", ["reward"])
    (True, True, True, False)
    >>> is_known("reward/math/timeout", ["reward/math"]), is_known("reward/maths", ["reward/math"])
    (True, False)
    """
    above = name.rpartition("/")[0]
    if name in HELP or name in EVALUATION or above == "age":
        return True
    return "/" in above and bool(help_of(name)) and any(f"{column}/".startswith(f"{above}/") for column in columns)


_PATTERNS = (
    (re.compile("reward/.+/seconds"), "reward/<name>/seconds"),
    (re.compile("reward/.+/no_answer"), "reward/no_answer"),
    (re.compile("reward/.+/[a-z_]+"), "reward/<name>/timeout"),
    (re.compile("reward/.+"), "reward/<name>"),
    *((re.compile(f"data/.+/{name}"), f"data/<name>/{name}") for name in ("share", "reward", "pass_rate")),
    (re.compile("monitor/.+"), "monitor/<name>"),
    (re.compile("environment/.+"), "environment/<name>"),
    (re.compile("age/.+"), "age/0"),
)
