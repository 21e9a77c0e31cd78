"""Run folders for the browser: made by the writer of runs, with everything that a view can show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rollouts_help import rollout
from trew.runs import RunFolder
from trew.types import ScoredGroup
from view_help import CONFIG, episode, group, score, write_eval, write_step

HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>",
    "</span></bdi><style>body { display: none }</style><base href='http://elsewhere.example/'>",
    "javascript:window.pwned=1 \u202egnihtyreve sesrever\u202c\u2066 \u200bhidden\u200b \x00\x1b[31m \ufeff\u00ad",
    "{{7*7}} ${7*7} &lt;b&gt; \\u003cscript\\u003e 👩‍👩‍👧 أهلا وسهلا 日本語",
)


def sums(folder: Path, *, steps: int = 12, seed: int = 0, lr: float = 1e-3) -> Path:
    """A run that gets better, with two rewards, evaluations, a warning and a checkpoint."""
    with RunFolder.open(folder) as run:
        run.write_config(CONFIG.format(steps=steps, seed=seed, lr=lr))
        write_eval(run, 0, *(group(f"held-{i}", "no", scores=(0.0,)) for i in range(4)))
        for step in range(1, steps + 1):
            good = step / steps
            a = group(
                "a", f"six times seven is {30 + step}", "I do not know", "12\n\tis the answer", scores=(good, 0.0, None)
            )
            b = group("b", "first", "second", scores=(1 - good, 0.0), prompt="What is 2 + 2?\n" * 12)
            # From step 4 on a health rule warns: completions are cut off.
            extra = {"entropy": 2.0 - good + 0.01 * seed, "seconds": 60.0, "truncated_share": float(step > 3)}
            write_step(run, step, a, b, **extra)
        write_eval(run, steps, *(group(f"held-{i}", "yes", scores=(1.0,)) for i in range(4)))
        _summary(run, steps, seed)
        gib = 2**30
        parts = {"generating": {"weights": gib}, "training": {"weights": gib, "gradients": gib, "activations": gib}}
        planned = [{"who": f"rank {i}", "device": "cpu", "memory": parts, "peak_bytes": 3 * gib} for i in range(2)]
        phases = {"loading": gib, "generating": gib, "training": int(2.5 * gib)}
        measured = [{"who": "rank 0", "memory": phases, "peak_bytes": int(2.5 * gib)}]
        run.write_memory({"planned": {"processes": planned, "prompt_tokens": 5}, "measured": measured})
    return folder


def _summary(run: RunFolder, steps: int, seed: int) -> None:
    before, after = {"mean": 0.25, "low": 0.1, "high": 0.4}, {"mean": 0.8 + seed / 100, "low": 0.6, "high": 0.9}
    found = {"before": {"accuracy": before, "n": 4}, "after": {"accuracy": after, "n": 4}}
    run.write_summary({
        "task": "arithmetic", "model": "none", "steps": steps, "seed": seed, "seconds": 720.0, "n_eval": 4,
        "peak_memory_bytes": 3 * 2**30, "accuracy_before": before, "accuracy_after": after, **found,
    })  # fmt: skip


def _with_a_megabyte(scored: ScoredGroup) -> ScoredGroup:
    """One more answer: a line of a million characters in a hundred thousand tokens."""
    ids = np.full(100_000, 120)
    line = rollout(ids, text="x" * 1_000_000, logprobs=-1.0, policy_logprobs=-1.5, entropies=0.5)
    asked = replace(scored.group, rollouts=(*scored.group.rollouts, line))
    return replace(scored, group=asked, scores=(*scored.scores, score(0.0)))


def hostile(folder: Path) -> Path:
    """What a model could write to attack the page, a line of a megabyte, and a conversation with a tool."""
    with RunFolder.open(folder) as run:
        run.write_config(CONFIG.format(steps=2, seed=0, lr=1e-3))
        columns = {"answer": "<script>window.pwned = 1</script>"}
        write_step(
            run, 1, _with_a_megabyte(group("<script>window.pwned = 1</script>", *HOSTILE, prompt=HOSTILE[0], **columns))
        )
        write_step(run, 2, episode("talk"))
    return folder


def many(folder: Path, *, steps: int = 20, groups: int = 20) -> Path:
    """Enough completions to scroll far: 3 in each group."""
    with RunFolder.open(folder) as run:
        run.write_config(CONFIG.format(steps=steps, seed=0, lr=1e-3))
        for step in range(1, steps + 1):
            write_step(run, step, *(group(f"p{i}", f"answer {step} of {i}", "other", "third") for i in range(groups)))
    return folder


def grow(run: RunFolder, step: int) -> None:
    """One more step of a run that trains."""
    write_step(run, step, group("a", f"words of step {step}", "other", scores=(1.0, 0.0)))
