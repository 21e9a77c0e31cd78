"""What a run reads besides its data and must find unchanged where it resumes: the user's code, and models that stay as
they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ..models import loading
from ..models.files import digest_of_sample
from .planning import Plan


def inputs_of(plan: Plan) -> dict[str, str]:
    """Digests by name; of models that are here."""
    here = {name: folder for name, model in _models(plan) if (folder := loading.folder(model)) is not None}
    return {**_code(plan), **{name: digest_of_sample(folder) for name, folder in here.items()}}


def needs_reference(plan: Plan) -> bool:
    """Whether the reference is a model of its own. With adapters it is the same model with them switched off."""
    return "ref_logprobs" in plan.objective.needs and not plan.config.lora.rank


def _code(plan: Plan) -> dict[str, str]:
    """SHA-256 of files whose functions a run calls, by what they are for: of rewards with the modules beside them that
    they have imported, of the environment and its tools alone."""
    found = {
        f"{reward.name}: {name}": digest
        for reward in plan.rewards.rewards
        if reward.function is not None
        for name, digest in reward.function.sources.items()
    }
    for spec in (plan.config.environment.name, *plan.config.environment.tools):
        # In trl:file.py:Class the package stands in front.
        file = Path(spec.removeprefix("trl:").rpartition(":")[0])
        if file.suffix == ".py" and file.is_file():
            found[f"environment: {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _models(plan: Plan) -> Iterator[tuple[str, str]]:
    """Models that judge or are compared with: checkpoints do not hold them, so that they are read again."""
    for reward in plan.rewards.rewards:
        if reward.model is not None:
            yield f"reward model {reward.model.source}", reward.model.source
    # One that follows the policy is in the checkpoints.
    if needs_reference(plan) and not plan.config.learner.reference_every:
        yield f"reference {plan.config.model}", plan.config.model
    if plan.config.teacher.model:
        yield f"teacher {plan.config.teacher.model}", plan.config.teacher.model
