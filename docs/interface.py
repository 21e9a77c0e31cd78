"""Writes docs/python.md, the page of the Python interface, from docstrings. ``generate.py`` calls it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import trew
from trew import config, rewards
from trew.config import Config
from trew.objective import LossOutput, Objective, TokenBatch
from trew.rewards import RewardSet
from trew.runs.notebook import Picture
from trew.runs.report import RunData
from trew.view.notebook import view

INTRODUCTION = """\
# trew from Python

Everything that the commands do is in the package. This page is generated from its docstrings by `make docs`; names that
are not on it may change without notice. Nothing heavy is imported before it is used.

<!-- file: first.py -->

```python
import trew

recipe = {
    "model": "smollm2-135m-instruct",
    "steps": 20,
    "out": "runs/first",
    "data": {"train": "rows.jsonl"},
    "rewards": [{"name": "my_reward.py:largest"}],
    "rollout": {"prompts": 12, "completions": 8, "max_tokens": 12},
    "objective": {"preset": "grpo", "beta": 0.0},
    "learner": {"lr": 2e-5, "minibatch_prompts": 3},
    "eval": {"size": 100},
}


def every_step(row):
    if row.get("reward") is not None:
        print(row["step"], round(row["reward"], 3))


if __name__ == "__main__":
    summary = trew.train(recipe, on_row=every_step)
    print(summary["accuracy_before"], summary["accuracy_after"])
    trew.curves("runs/first").save("curves.svg")
```

```sh
python first.py
```

[quickstart.md](quickstart.md) has the two files that this reads.
[`examples/quickstart.ipynb`](../examples/quickstart.ipynb) is the same as a notebook, where progress and curves appear
below the cell. Reward functions run in a process of their own, which loads their file; a notebook writes it with
`%%writefile`.
"""

SECTIONS: dict[str, Sequence[tuple[str, Any, Sequence[str]]]] = {
    "Training": [("trew.train", trew.train, ())],
    "Recipes": [
        ("trew.Config", Config, ()),  # its keys are in configuration.md
        ("trew.config.load", config.load, ()),
        ("trew.config.parse", config.parse, ()),
        ("trew.config.dumps", config.dumps, ()),
    ],
    "Looking at runs": [
        ("trew.load_run", trew.load_run, ()),
        ("trew.report.RunData", RunData, ("column", "completions", "metric_names")),
        ("trew.curves", trew.curves, ()),
        ("trew.runs.notebook.Picture", Picture, ("save",)),
        ("trew.view", view, ()),
        ("trew.report.write_report", trew.report.write_report, ()),
    ],
    "Rewards": [
        ("trew.rewards.grade", rewards.grade, ()),
        ("trew.rewards.RewardSet", RewardSet, ("from_config", "score", "close")),
    ],
    "Objectives, in any trainer": [
        ("trew.preset", trew.preset, ()),
        ("trew.Objective", Objective, ("loss", "prepare", "equation")),
        ("trew.TokenBatch", TokenBatch, ("from_padded",)),
        ("trew.LossOutput", LossOutput, ()),
    ],
}
"""What the page has: (name, object, methods) by heading."""


def page(prose: Callable[[str], str]) -> str:
    """The whole page; ``prose`` makes Markdown of a docstring's paragraph."""
    parts = [INTRODUCTION]
    for heading, entries in SECTIONS.items():
        parts.append(f"## {heading}\n")
        for name, target, methods in entries:
            parts += entry(name, target, prose)
            for method in methods:
                parts += entry(f"{name.rpartition('.')[2]}.{method}", getattr(target, method), prose)
    return "\n".join(parts)


def entry(name: str, target: Any, prose: Callable[[str], str]) -> list[str]:
    """One name: its heading, signature and docstring."""
    parts = [f"### `{name}`\n"]
    if callable(target) and not inspect.isclass(target):
        parts.append(f"```python\n{signature(name, target)}\n```\n")
    return [*parts, *docstring(inspect.getdoc(target) or "", prose)]


def signature(name: str, target: Any) -> str:
    """The call with its arguments, a line each where it is long."""
    found = inspect.signature(target)
    own = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(found.replace(parameters=own)))  # annotations are texts
    whole = f"{name}{text}"
    if len(whole) <= 100:
        return whole
    body, _, returns = text.rpartition(" -> ")
    lines = [f"    {argument}," for argument in split(body.strip("()"))]
    return "\n".join([f"{name}(", *lines, f") -> {returns}"])


def split(arguments: str) -> list[str]:
    """Splits at commas outside brackets.

    >>> split("a: dict[str, int], *, b=1")
    ['a: dict[str, int]', '*', 'b=1']
    """
    parts, depth = [""], 0
    for c in arguments:
        depth += (c in "[(") - (c in "])")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def docstring(text: str, prose: Callable[[str], str]) -> list[str]:
    """A docstring as Markdown: paragraphs, indented code, doctests, and a list of arguments."""
    parts = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith(">>>"):
            parts.append(f"```python\n{block}\n```\n")
        elif block.startswith("    "):
            parts.append(f"```python\n{textwrap.dedent(block)}\n```\n")
        elif block.startswith("Args:\n"):
            parts.append(arguments(textwrap.dedent(block.partition("\n")[2]), prose))
        elif block.startswith("* "):
            items = [" ".join(item.split()) for item in re.split(r"^\* ", block, flags=re.M) if item]
            parts.append("".join(f"* {prose(item)}\n" for item in items))
        else:
            parts.append(prose(" ".join(block.split())) + "\n")
    return parts


def arguments(text: str, prose: Callable[[str], str]) -> str:
    """The part below ``Args:`` as a list."""
    found = re.findall(r"^(\w+): (.*(?:\n +.*)*)", text, re.M)
    return "".join(f"* `{name}`: {prose(' '.join(says.split()))}\n" for name, says in found)
