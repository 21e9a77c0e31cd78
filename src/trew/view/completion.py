"""One completion in full: its tokens with every value that was recorded of them, its turns, its conversation."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import RolloutConfig
from ..runs import changes
from ..runs.report.token_texts import pieces
from . import table
from .about_values import ABOUT
from .answers import NotHere
from .index import lengths
from .parameters import Parameters
from .pieces import Tokenizers
from .rows import KINDS, parsed, row
from .viewed import ViewedRun

VALUES = {
    "advantage": "advantages", "logprob": "logprobs", "sampling_logprob": "sampling_logprobs", "entropy": "entropies",
    "ratio": "final_ratios", "weight": "weights", "coefficient": "coefficients", "ref_logprob": "ref_logprobs",
    "teacher_logprob": "teacher_logprobs",
}  # fmt: skip
"""The values of a token, and their columns."""
GAPS = {"sampler_gap": ("logprob", "sampling_logprob"), "ref_gap": ("policy", "ref_logprob"),
        "teacher_gap": ("teacher_logprob", "policy")}  # fmt: skip
"""Differences of two values; ``policy``: the policy's log-probs at the temperature of the training."""

_CELLS = ("group", "trained_group", "uid", "sample", "prompt", "messages", "completion", "columns", "prompt_ids",
          "token_ids", "sampled", "turns", "versions", "score", "status", "parts", "statuses", "extracted",
          "finish_reason", "rollout_status", "rollout_error", "ending", "conversation", "policy_version",
          *VALUES.values())  # fmt: skip


def completion(run: ViewedRun, tokenizers: Tokenizers, p: Parameters) -> dict[str, Any]:
    """The completion that step, group and sample name."""
    step, eval = p.whole("step", least=0), bool(p.flag("eval"))
    cells, length = _cells(run, eval, step, p.whole("group", least=0), p.whole("sample", least=0))
    ids, sampled = cells["token_ids"] or [], cells["sampled"] or []
    text = str(cells["completion"] or "")
    tokenizer = tokenizers.of(run)
    own = pieces(tokenizer, ids, text + _said(cells))
    asked = pieces(
        tokenizer, cells.get("prompt_ids") or [], str(cells.get("prompt") or "") + str(cells.get("messages"))
    )
    values = _values(cells, sampled, of_policy=_in_training(run, step))
    return {
        "row": row(cells, eval=eval, step=step, length=length, given=run.given, whole=True),
        "messages": _messages(cells),
        "tokens": _tokens(ids, own, sampled),
        "pieces": {"prompt": _tokens(cells.get("prompt_ids") or [], asked, ()), "why": own.why},
        "values": values,
        "about": {name: ABOUT[name] for name in values},
        "turns": _turns(cells, len(ids)),
        "versions": cells.get("versions") or [],
    }


def _cells(run: ViewedRun, eval: bool, step: int, group: int, sample: int) -> tuple[dict[str, Any], int]:
    """The cells of a completion, and its number of sampled tokens."""
    name = f"completion {sample} of group {group} in {KINDS[eval]} of step {step}"
    try:
        found = table.read(run.folder, KINDS[eval], step, _CELLS)
        asked = zip(found["group"].to_pylist(), found["sample"].to_pylist(), strict=True)
        at = next((i for i, known in enumerate(asked) if known == (group, sample)), None)
        if at is None:
            raise NotHere(f"{run.name} has no {name}")
        one = found.slice(at, 1)
        # A damaged text shows as far as it goes; any other damaged column hides the completion.
        cells = {c: (table.texts if c in _TEXTS else table.values)(one[c])[0] for c in one.column_names}
        return cells, int(lengths(one["sampled"])[0])
    except table.Unreadable as error:
        raise NotHere(f"{run.name}: {name} cannot be shown: {error}") from None


_TEXTS = ("uid", "prompt", "messages", "completion", "columns", "status", "extracted", "finish_reason",
          "rollout_status", "rollout_error", "ending", "conversation")  # fmt: skip


def _tokens(ids: Sequence[int], found: Any, sampled: Sequence[bool]) -> list[dict[str, Any]]:
    """Tokens of a completion, or of a prompt, which has none that were sampled. Without texts only ids are known."""
    made = []
    for i, number in enumerate(ids):
        token: dict[str, Any] = {"text": found.texts[i] if found.texts else None, "id": number}
        if sampled:
            token["sampled"] = bool(sampled[i]) if i < len(sampled) else False
        if found.special and found.special[i]:
            token["special"] = True
        made.append(token)
    return made


def _in_training(run: ViewedRun, step: int) -> str:
    """The value that has the policy's log-probs at ``rollout.temperature``, as reference and teacher have theirs; empty
    if none has: what was cut from a distribution (top_p, top_k, min_p) changed the sampler's."""
    text = changes.settings_at(changes.read(run.text(changes.FILE)), step, now=run.text("config.toml"))
    try:
        found = RolloutConfig(**tomllib.loads(text).get("rollout", {}))
    except (tomllib.TOMLDecodeError, TypeError, AttributeError):  # damaged, or of another version
        return ""
    if found.temperature == 1:
        return "logprob"
    whole = RolloutConfig()
    cut = (found.top_p, found.top_k, found.min_p) != (whole.top_p, whole.top_k, whole.min_p)
    return "" if cut else "sampling_logprob"


def _values(cells: Mapping[str, Any], sampled: Sequence[bool], *, of_policy: str) -> dict[str, list[float | None]]:
    """Those that were recorded; null where the policy did not choose the token."""
    found = {}
    for name, column in VALUES.items():
        given = cells.get(column)
        # A column of another length contradicts the tokens, and is left out.
        if given is not None and len(given) == len(sampled):
            found[name] = [_known(v) if own else None for v, own in zip(given, sampled, strict=True)]
    for name, both in GAPS.items():
        one, other = (of_policy if value == "policy" else value for value in both)
        if one in found and other in found:
            found[name] = [
                None if a is None or b is None else a - b for a, b in zip(found[one], found[other], strict=True)
            ]
    return found


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _said(cells: Mapping[str, Any]) -> str:
    """All texts of an episode: any of them may have had secrets."""
    return "".join(f"{turn.get('text')}{turn.get('messages')}{turn.get('calls')}" for turn in cells.get("turns") or ())


def _messages(cells: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The conversation of an episode, or the messages of a chat prompt; None for plain text."""
    found = parsed(cells.get("conversation")) or parsed(cells.get("messages"))
    if not isinstance(found, list):
        return None
    return [message for message in found if isinstance(message, dict)]


def _turns(cells: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """What the policy and its environment said by turns, with the tokens of each; nothing where there is one turn."""
    made: list[dict[str, Any]] = []
    at = -len(cells.get("prompt_ids") or ())  # tokens count from the first one after the prompt
    # ``context``: tokens that the policy read before its own, of the first turn those of the prompt.
    for turn in cells.get("turns") or ():
        start = at + turn["context"]
        end = start + turn["sampled"]
        if not 0 <= start <= end <= count:
            return []  # they contradict the tokens: the table may come from anywhere
        said = parsed(turn["messages"])
        messages = [m for m in said if isinstance(m, dict)] if isinstance(said, list) else []
        made.append({
            "role": "environment", "start": max(at, 0), "end": start, "messages": messages,
            "text": "\n\n".join(str(m.get("content", "")) for m in messages), "reward": None, "finish_reason": None,
            "cut": False,
        })  # fmt: skip
        made.append({
            "role": "policy", "start": start, "end": end, "text": turn["text"], "reward": turn["reward"],
            "finish_reason": turn["finish_reason"], "tool_calls": parsed(turn["calls"]) or [],
            "cut": turn["finish_reason"] == "length", "state": turn["state"], "metrics": dict(turn["metrics"] or ()),
        })  # fmt: skip
        at = end
    return made
