"""Which recipes rounds can run: the policy must sample, and learn from the learned reward."""

from __future__ import annotations

from ..config import Config
from ..objective import Objective
from ..objective.advantage import PassAtK
from ..objective.capped import Tapered
from ..objective.component import Component
from ..objective.entropy_shares import EntropySequenceShares, EntropyTokenShares
from ..objective.imitation import CorrectOnly
from ..objective.likelihood import CorrectLikelihood

FROM_VERDICTS: tuple[type[Component], ...] = (
    CorrectOnly, PassAtK, EntropyTokenShares, EntropySequenceShares, Tapered, CorrectLikelihood,
)  # fmt: skip
"""Components that push a completion by whether it is correct, which in rounds is the verifier's verdict."""


def unfit(policy: Config) -> list[str]:
    """What a single training may do, and rounds cannot: one line for each such setting of a policy's recipe."""
    found = []
    if policy.demonstrates:
        found.append(
            f"data.task: got {policy.task!r}, but in every round the policy samples completions that the reward model "
            "scores; give prompts with a verifier, or train on these rows with trew sft"
        )
    if policy.rollout.replay:
        found.append(
            f"rollout.replay: got {policy.rollout.replay!r}, whose completions have their scores already, and every "
            "round scores new ones with its reward model; leave it out"
        )
    if policy.plays:
        found.append("environment: pairs for a reward model are made of single completions here; leave it out")
    if policy.curriculum.share:
        found.append(
            f"curriculum.share: got {policy.curriculum.share:g}, but every round draws its own prompts, and would "
            "forget the pass rates; leave it out"
        )
    if policy.lora.rank and policy.lora.base != "float32":
        found.append(
            f"lora.base: got {policy.lora.base!r}, accepts 'float32' here: each round begins with the model that the "
            "last one has left, and rounding it again would throw away most of what was learned"
        )
    if policy.eval.correct_reward:
        found.append(
            f"eval.correct_reward: got {policy.eval.correct_reward!r}, but here accuracy is the verifier's "
            "(iterate.verifier); leave it out"
        )
    return found


def objective_problems(objective: Objective, preset: str) -> list[str]:
    """Why an objective would not learn from the learned reward, or would learn from the verifier."""
    if not objective.advantage.judged:
        return [
            f"objective.preset: got {preset!r}, which reads no rewards: the learned one would have no effect; choose "
            "another, such as grpo, to which objective.distill adds a teacher"
        ]
    found = []
    if "step_rewards" in objective.needs:
        found.append(
            f"objective.preset: got {preset!r}, which learns from a reward for every step, and in rounds verifier and "
            "reward model judge whole completions; choose another, such as grpo"
        )
    for axis, component in objective.components():
        if not isinstance(component, FROM_VERDICTS):
            continue
        why = "learns from which completions are correct, and here that is the verifier's verdict, which only measures"
        if axis == "nll":
            found.append(f"objective.nll: got {objective.nll.coefficient:g}, accepts 0 here: it {why}")
        else:
            found.append(
                f"objective.preset: got {preset!r}, which {why} ({component.equation().partition('      ')[0]}); "
                "choose one that learns from the reward's value, such as grpo"
            )
    return found
