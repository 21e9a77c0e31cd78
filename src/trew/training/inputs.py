"""What a run reads besides its data and must find unchanged where it resumes: the user's code, and models that stay as
they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..models import loading
from ..models.files import digest_of_sample
from .planning import Plan, objective_files


def inputs_of(plan: Plan) -> dict[str, str]:
    """Digests by name; of models that are here."""
    here = {name: folder for name, model in _models(plan) if (folder := loading.folder(model)) is not None}
    models = {name: digest_of_sample(folder) for name, folder in here.items()}
    return {**_code(plan), **models, **_tokenizer(plan.renderer.tokenizer)}


def needs_reference(plan: Plan) -> bool:
    """Whether the reference is a model of its own. With adapters it is the same model with them switched off."""
    return "ref_logprobs" in plan.objective.needs and not plan.config.lora.rank


def _code(plan: Plan) -> dict[str, str]:
    """SHA-256 of files whose functions a run calls, by what they are for: of rewards and an objective with the modules
    beside them that they have imported, of the environment and its tools alone."""
    found = {
        f"{reward.name}: {name}": digest
        for reward in plan.rewards.rewards
        if reward.function is not None
        for name, digest in reward.function.sources.items()
    }
    found |= {f"objective: {name}": digest for name, digest in objective_files(plan.config).items()}
    for spec in (plan.config.environment.name, *plan.config.environment.tools):
        # In trl:file.py:Class the package stands in front.
        file = Path(spec.removeprefix("trl:").rpartition(":")[0])
        if file.suffix == ".py" and file.is_file():
            found[f"environment: {file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


_PROBE = "The 12 cats' naïve café…\n\tif x == 3.14: return [x]  # 日本 "
"""Words, numbers, spaces, code and other scripts: normalisers and splits of tokenizers differ in these."""


def _tokenizer(tokenizer: Any) -> dict[str, str]:
    """Digests of a tokenizer and its chat template: they are read again from the model's folder, and other ones would
    make other prompts of the same data. By what it does and not by its files, which versions write differently."""
    ids = tokenizer(_PROBE, add_special_tokens=True)["input_ids"]
    known = [sorted(tokenizer.get_vocab().items()), tokenizer.bos_token_id, tokenizer.eos_token_id, ids]
    found = {"tokenizer": known, "chat template": tokenizer.chat_template}
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in found.items()}


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
