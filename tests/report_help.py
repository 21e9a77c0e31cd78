"""Completions that try to be more than text, a run of them, and a page taken apart into its elements."""

import json
from html.parser import HTMLParser

from rollouts_help import answers
from trew.runs import RunFolder
from trew.types import Prompt, Score, ScoredGroup

HOSTILE = [
    "<script>alert(1)</script>",
    "</td></tr></table></pre></section></body>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "-->",
    "]]>",
    "</style><style>*{display:none}",
    "</title><base href=//evil>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "{{ 7 * 7 }}{% for x in y %}",
    "&lt;script&gt;&amp;",
    "\x1b]8;;http://evil\x07click\x1b]8;;\x07",
    "\u202egnp.exe\u2066\u200b\ufeff\U000e0041",
    "[red]markup[/red]",
    "\x00\x08\x7f\x9b31m",
]


class Elements(HTMLParser):
    """Counts elements and attributes, and keeps the text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.seen, self.text, self.attributes = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, *a) for a in attrs]

    def handle_comment(self, data):
        self.seen.append("comment")

    def handle_data(self, data):
        self.text.append(data)


def scored(i, text, value=1.0, *, gold="4"):
    prompt = Prompt(str(i), text=f"question {text}", columns={"gold": gold})
    return ScoredGroup(answers(prompt, text, tokens=2), (Score(value, parts={"a": value, "b": None}, extracted=text),))


def make(folder, texts=("hello",) * 16, *, evals=True, finished=True, steps=4):
    with RunFolder.open(folder, overwrite=True) as run:
        run.write_config(f"model = {json.dumps(texts[0])}\nsteps = {steps}\n[data]\ntask = 'arithmetic'\n")
        run.log({"step": 0, "eval_accuracy": 0.1, "eval_low": 0.05, "eval_high": 0.2, "eval_n": 200})
        for step in range(1, steps + 1):
            run.log({"step": step, "reward": step / 10, "accuracy": step / 10, "kl": 0.001, f"reward/{texts[1]}": 0.5})
        run.log({"step": steps, "eval_accuracy": 0.8, "eval_low": 0.7, "eval_high": 0.9, "eval_n": 200})
        groups = [scored(i, t, i % 2) for i, t in enumerate(texts)]
        run.write_rollouts(steps, groups)
        if evals:
            run.write_eval(0, groups)
            run.write_eval(steps, groups)
        if finished:
            run.write_summary(
                {"task": texts[2], "model": texts[3], "objective": "grpo", "seed": 0, "steps": steps, "seconds": 75.0,
                 "n_eval": 200, "accuracy_before": {"mean": 0.1, "low": 0.05, "high": 0.2},
                 "accuracy_after": {"mean": 0.8, "low": 0.7, "high": 0.9}, "device": texts[4],
                 "versions": {"trew": texts[5]}}
            )  # fmt: skip
    return folder
