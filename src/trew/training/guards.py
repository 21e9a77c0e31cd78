"""Handles steps whose numbers are not finite, and memory that runs out. Whether the numbers come from the current
weights is checked in :mod:`.frozen`."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import MemoryShortage, NumericsError
from ..objective import TokenBatch
from ..runs.rollouts import plain_prompt
from ..types import ScoredGroup

if TYPE_CHECKING:
    from .attempt import Attempt
    from .policy_program import PolicyProgram

SHOWN = 32
"""Limit of completions in the file of a bad step; rollouts/ has all of them."""

_NO_MEMORY = re.compile(  # messages of torch's allocators, the C++ library and oneDNN: plain RuntimeErrors
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|could not create a (memory|primitive)(?! desc)"
)


# --------------------------------------------------------------------------------------------------------------------
# Finite


def check_given(batch: TokenBatch) -> None:
    """Raises NumericsError if a reward or a log-prob of the sampler is not finite; NaN as a reward means "none"."""
    for name, values in (("reward", batch.rewards), ("baseline", batch.baselines)):
        if values is not None and (wrong := values.isinf()).any():
            # (S,) or (S, K): a sample is wrong if any of its rewards is.
            where = wrong.reshape(len(wrong), -1).any(1).nonzero().flatten().tolist()
            raise NumericsError(
                f"a {name} is larger than float32 can hold", names=_positions(where), quantity=name, samples=where
            )
    _check_tokens(batch, batch.rollout_logprobs, "the sampler's log-probs are not finite", "rollout_logprobs")
    _check_tokens(batch, batch.entropies, "the sampler's entropies are not finite", "entropy")


def check_advantages(batch: TokenBatch) -> None:
    """Raises NumericsError if an advantage of a prepared batch is not finite."""
    _check_tokens(batch, batch.advantages, "advantages are not finite", "advantages")


def _check_tokens(batch: TokenBatch, values: Tensor | None, cause: str, quantity: str) -> None:
    # Masked tokens may hold anything: they carry no loss.
    if values is None or (fine := values.isfinite() | ~batch.mask).all():
        return
    where = batch.sequence_ids[~fine].unique().tolist()
    found = {i: values[batch.sequence_ids == i].tolist() for i in where}
    raise NumericsError(cause, names=_positions(where), quantity=quantity, samples=where, values=found)


def _positions(where: Sequence[int]) -> str:
    return ", ".join(map(str, where[:8])) + (f" and {len(where) - 8} more" if len(where) > 8 else "")


def bad_row(error: NumericsError) -> dict[str, float]:
    """The metrics of a step that was not applied: NaN, and not an average over the values that were finite."""
    return {"loss": math.nan, "grad_norm": math.nan, error.quantity: math.nan}


def keep_evidence(program: PolicyProgram, attempt: Attempt, error: NumericsError) -> str:
    """Saves the evidence of a bad step in the run's folder, warns, and returns the message."""
    step, rows = attempt.step, list(error.evidence)
    if attempt.rollouts is not None and attempt.batch is not None:
        rows += _evidence(error, attempt.rollouts.trained_on, attempt.batch)
    whole = {"step": step, "error": error.cause, "quantity": error.quantity, "policy_version": program.policy.version}
    path = program.folder.write_bad_step(step, {**whole, "completions": rows[:SHOWN], "completions_in_all": len(rows)})
    names = ", ".join(f"{r['uid']!r} sample {r['sample']}" for r in rows[:4]) + (", …" if len(rows) > 4 else "")
    text = f"{error.cause}{f' (prompt {names})' if error.samples and names else ''}; saved in {path}"
    count = f"{program.state.bad_steps + 1} of {program.config.learner.bad_steps} in a row that end the run"
    applied = "not applied in full" if attempt.updates or attempt.critic_updates else "not applied"
    said = f"step {step} was {applied}: {text}. {_what_stays(attempt)}; {count}"
    program.display.warn(said)
    program.folder.event(said)
    return text


def _what_stays(attempt: Attempt) -> str:
    """What the updates before the error have changed."""
    done = {"the policy": len(attempt.updates), "the critic": len(attempt.critic_updates)}
    stay = [f"{count} of {whose}" for whose, count in done.items() if count]
    return f"Its earlier updates stay: {', '.join(stay)}" if stay else "Weights and optimizer are as before"


def _evidence(error: NumericsError, groups: Sequence[ScoredGroup], batch: TokenBatch) -> Iterator[dict[str, Any]]:
    """The completions at fault, with all known values of their tokens."""
    completions = [
        (group.group.prompt, number, completion, score)
        for group in groups
        for number, (completion, score) in enumerate(zip(group.group.rollouts, group.scores, strict=True))
    ]
    for i in error.samples:
        prompt, number, completion, score = completions[i]
        tokens = batch.sequence_ids == i
        known = {
            name: getattr(batch, name) for name in ("advantages", "old_logprobs", "ref_logprobs", "teacher_logprobs")
        }
        row = {
            "uid": prompt.uid, "sample": number, "prompt": plain_prompt(prompt), "completion": completion.text,
            "reward": score.value, "parts": dict(score.parts), "status": score.status,
            "finish_reason": completion.finish_reason, "policy_version": completion.oldest_version,
            "token_ids": completion.token_ids.tolist(),
            "sampling_logprobs": completion.logprobs.tolist(),
            "entropies": None if completion.entropies is None else completion.entropies.tolist(),
        }  # fmt: skip
        row |= {name: values[tokens].tolist() for name, values in known.items() if values is not None}
        yield row | ({error.quantity: error.values[i]} if i in error.values else {})


def end_if_broken(program: PolicyProgram, error: NumericsError, text: str) -> None:
    """Raises NumericsError after ``learner.bad_steps`` steps in a row whose numbers were not finite."""
    state, limit = program.state, program.config.learner.bad_steps
    if state.bad_steps < limit:
        return
    good = state.step - state.bad_steps  # the last step that was applied
    # A step that was saved again has a counter (000020.1); other names are checkpoints that are being written.
    names = [path.name.partition(".")[0] for path in program.folder.checkpoints.glob("*")]
    saved = [int(name) for name in names if name.isdecimal()]
    kept = sorted(step for step in saved if step <= good)
    where = f"The checkpoint of step {kept[-1]} is from before" if kept else "No checkpoint is from before"
    steps = "1 step" if limit == 1 else f"{limit} steps in a row"
    raise NumericsError(
        f"{steps} with numbers that are not finite (learner.bad_steps = {limit}); the last: {text}. {where}. Lower "
        "learner.lr, set learner.dtype = 'float32', or look at the completions in that file",
        quantity=error.quantity,
    ) from error


# --------------------------------------------------------------------------------------------------------------------
# Within the available memory

_KNOBS = {
    "generating": ("rollout.batch", "rollout.batch (completions decoded at once), rollout.max_tokens, or {length}"),
    "evaluating": ("rollout.batch", "rollout.batch (completions decoded at once), eval.max_tokens, or {length}"),
    "learning": (
        "learner.microbatch_tokens",
        "learner.microbatch_tokens, set learner.gradient_checkpointing = true, or, in a new run, train adapters "
        "(lora.rank = 16)",
    ),
    "evaluating rows": ("learner.microbatch_tokens", "learner.microbatch_tokens, or sft.max_tokens"),
}
"""What takes less memory, by activity: the setting that a resumed run may change as it is, and all of them."""


@contextlib.contextmanager
def memory(program: PolicyProgram, phase: Callable[[], str]) -> Iterator[None]:
    """Raises MemoryShortage, with settings that need less, if memory runs out inside the block.

    ``phase`` returns the activity: generating, learning or evaluating.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        # RuntimeErrors of other kinds pass unchanged; CPU allocators raise plain ones, known by their text only.
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not _NO_MEMORY.search(text):
            raise
        detail = (text.strip().splitlines() or [type(error).__name__])[0][:200]
        where = "the GPU" if program.plan.device.startswith("cuda") else "the machine"
        doing = phase()  # asked only now: a step passes from generating to learning inside one block
        when = f"after step {program.state.step}" if doing == "evaluating" else f"in step {program.state.step + 1}"
        # Rows of data are evaluated by the learner's forward pass: nothing is sampled.
        rows = doing == "evaluating" and program.config.demonstrates
        free, knobs = _KNOBS["evaluating rows" if rows else doing]
        raise MemoryShortage(
            f"{where} ran out of memory while {doing} {when} ({detail}). Lower "
            f"{knobs.format(length=program.config.length_key)}; trew plan says what takes how much. The last "
            f"checkpoint is complete: continue with --resume --set {free}=..., or with --allow-changes and others"
        ) from error
