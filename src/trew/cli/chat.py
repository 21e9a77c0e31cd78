"""``trew chat``: talks with a model, or with the model of a run, in the terminal or for one question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..errors import ConfigError, Problems

if TYPE_CHECKING:
    from ..rollout.conversation import Voice
    from ..types import Sampling
    from .chosen_model import Chosen


def chat(
    model: Annotated[str, tyro.conf.Positional],
    question: Annotated[str, tyro.conf.Positional] = "",
    /,
    *,
    before: bool = False,
    base: str = "",
    step: int | None = None,
    system: str | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int = 1024,
    seed: int = 0,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    chat_template: str = "",
    json: bool = False,
) -> int:
    """Talk with a model: answers appear as they are sampled.

    In a terminal it asks for questions: /help lists its commands, Ctrl-C stops an answer, Ctrl-D leaves. With a
    question on the command line or on standard input it prints the answer and exits.

    Args:
        model: A run (its final model, or its newest checkpoint), a folder with a model or with LoRA adapters, a hub id,
            or smollm2-135m-instruct.
        question: Answer this question and exit; without one, what is piped in.
        before: Let the model before training answer too, side by side where the terminal is wide enough.
        base: The model before training, where it is not the one that the run or the adapters name.
        step: Take the checkpoint of this step of a run.
        system: The system message; default: the one of the run's prompts, or none.
        temperature: 0 is greedy; default: the run's, or 0.7.
        top_p: Sample from the likeliest tokens with this probability together; default: the run's, or 1.
        max_tokens: The longest answer.
        seed: Of sampling: equal seeds and conversations give equal answers.
        device: auto, cpu, mps, cuda or cuda:N.
        dtype: What to compute in; auto: as the run does, or float32.
        chat_template: plain (contents joined by newlines) or a .jinja file; default: the model's own.
        json: Print one JSON object instead of text; needs a question.
    """
    from ..models.loading import resolve_device
    from .chosen_model import choose

    # Collects everything wrong with options, files and device before any weights are loaded.
    problems = Problems(_option_problems(temperature, top_p, max_tokens, seed))
    after = problems.attempt(lambda: choose(model, step=step, base=base, chat_template=chat_template))
    chosen = _speakers(after, problems, before=before)
    place = problems.attempt(lambda: resolve_device(device))
    if problems:
        raise ConfigError(problems)
    # None: a terminal, where questions are asked. A question on the command line leaves standard input alone.
    questions = "" if question else _piped()
    if json and questions is None:
        raise ConfigError("--json: needs a question: trew chat MODEL 'question' --json")
    assert after is not None
    assert place is not None
    sampling = after.sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    notes = after.prompts.notes(template=_template(after), has_system=system is not None or bool(after.system))
    system = after.system if system is None else system
    names = ("before", "after") if before else ("answer",)
    voices = [each.voice(n, device=place, dtype=dtype, system=system) for n, each in zip(names, chosen, strict=True)]
    return _talk(voices, sampling, question or questions, json=json, notes=notes)


def _speakers(after: Chosen | None, problems: Problems, *, before: bool) -> list[Chosen]:
    """The models that answer, in the order in which they are shown; adds what is wrong with them to ``problems``."""
    chosen = [] if after is None else [after]
    if before and after is not None and (first := problems.attempt(after.before)) is not None:
        # First, so that the left column is the model before training.
        chosen.insert(0, first)
    for each in chosen:
        problems += each.problems()
    return chosen


def _option_problems(temperature: float | None, top_p: float | None, max_tokens: int, seed: int) -> list[str]:
    from .talk import problem

    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    found = [problem(name, value) for name, value in given.items() if value is not None]
    return [f"--{text.replace('_', '-', 1)}" for text in found if text]


def _piped() -> str | None:
    """What is on standard input; None in a terminal."""
    from .talk import COMMANDS

    if sys.stdin is None or sys.stdin.isatty():
        return None
    found = sys.stdin.read().strip()
    if not found:
        raise ConfigError("no question: standard input is empty; give one: trew chat MODEL 'question'")
    command, *_ = found.split(maxsplit=1)
    # Nothing would carry it out: the model would be asked about it.
    if command[:1] == "/" and command[1:] in COMMANDS:
        raise ConfigError(
            f"standard input: got the command {command}, accepts a question; commands are for a terminal: run "
            "trew chat MODEL there, or use the options of trew chat --help"
        )
    return found


def _template(chosen: Chosen) -> str:
    """The chat template as the command line or the run names it; empty for the model's own."""
    return chosen.chat_template or (chosen.config.chat_template if chosen.config else "")


def _talk(voices: list[Voice], sampling: Sampling, question: str | None, *, json: bool, notes: Sequence[str]) -> int:
    from .talk import Session

    session = Session(voices, sampling, notes=notes)
    if question is None:
        return session.interactive()
    return session.as_json(question) if json else session.once(question)
