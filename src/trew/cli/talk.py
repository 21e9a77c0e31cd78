"""The conversation in the terminal: questions, commands with a slash, answers as they grow, one or two side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..config import limits
from ..errors import ConfigError, TrewError, nearest
from ..rollout.conversation import Answer, Voice
from ..runs.report.text import visible
from ..types import Sampling
from ..utils.console import Display
from ..utils.signals import Stoppable

WIDE = 100
"""Columns from which on two answers stand side by side."""
REDRAW_S = 0.08
PROMPT = "you> "

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda x: x == 0 or limits.COLDEST <= x <= limits.NUMBER,
        f"0 (greedy), or at least {limits.COLDEST:g}",
    ),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "max_tokens": (
        lambda x: 1 <= x <= limits.MOST["rollout.max_tokens"],
        f"a whole number from 1 to {limits.MOST['rollout.max_tokens']:,}",
    ),
    "seed": (lambda x: 0 <= x < 2**63, "a whole number from 0 to 2**63 - 1"),
}
_HELP = """\
/reset              begins a new conversation
/system TEXT        begins a new conversation with this system message; without a text, with none
/temperature X      0 is greedy; also /top_p X, /max_tokens N, /seed N
/save FILE          writes the conversation as JSON
/help               this list
/quit               leaves, as Ctrl-D does
Ctrl-C stops an answer. A question of several lines begins and ends with a line of three quotes: \"""\""""
COMMANDS = ("reset", "system", *_RULES, "save", "help", "quit")


def problem(name: str, value: float) -> str:
    """Says what is wrong with a setting of sampling; empty if nothing is."""
    holds, accepts = _RULES[name]
    return "" if holds(value) else f"{name}: got {value!r}, accepts {accepts}"


class Session:
    """Questions to one model, or to the model before training and the one after it."""

    def __init__(self, voices: Sequence[Voice], sampling: Sampling, *, notes: Sequence[str] = ()) -> None:
        """``notes``: what is said before the first answer, besides what voices say of themselves."""
        self.voices, self.sampling, self.notes = tuple(voices), sampling, tuple(notes)
        self.display = Display()
        self.stop = Stoppable()
        self.quits = False
        self._escaped = 0

    # ---- one question

    def once(self, question: str) -> int:
        """Prints the answer to one question."""
        self._notes(sys.stderr)
        self._answer(question)
        return 0

    def as_json(self, question: str) -> int:
        """Prints the answers to one question as a JSON object; what is not as it was said, beside it."""
        self._notes(sys.stderr)
        answers = {voice.name: self._whole(voice, question) for voice in self.voices}
        self._tell_escaped(sys.stderr)
        print(json.dumps({**self._record(), **answers}, indent=2, ensure_ascii=False))
        return 0

    def _whole(self, voice: Voice, question: str) -> dict[str, Any]:
        *_, last = voice.conversation.ask(question, self.sampling)
        return {"model": voice.label, "text": last.text, "tokens": last.tokens, "finish_reason": last.reason}

    def _record(self) -> dict[str, Any]:
        """What the answers depend on, and what was asked."""
        s, first = self.sampling, self.voices[0].conversation
        asked = [m["content"] for m in first.messages if m["role"] == "user"]
        settings = {k: v for k, v in dataclasses.asdict(s).items() if k != "stop"}
        return {"system": first.system, "questions": asked, "sampling": settings}

    # ---- many questions

    def interactive(self) -> int:
        """Answers questions until somebody leaves."""
        # Some builds of Python have no readline.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - editing and earlier lines for input()
        for voice in self.voices:
            self._say(f"{voice.label}" if len(self.voices) == 1 else f"{voice.name}: {voice.label}")
        self._say(f"{self._settings()}; /help lists commands")
        self._notes(sys.stdout)
        with self.stop:
            while not self.quits:
                try:
                    line = _read()
                except EOFError:
                    print()
                    break
                except KeyboardInterrupt:
                    print("\n(/quit or Ctrl-D leaves)")
                    continue
                with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C while an answer was being stopped
                    self._take(line.strip())
        return 0

    def _take(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(line[1:])
            elif line:
                self._answer(line)
        except TrewError as error:
            self._say(str(error))

    def _settings(self) -> str:
        s = self.sampling
        cut = "".join(f", {name} {getattr(s, name):g}" for name, off in _CUTS if getattr(s, name) != off)
        return f"temperature {s.temperature:g}{cut}, seed {s.seed}, at most {s.max_tokens} tokens"

    def _notes(self, file: Any) -> None:
        for note in (*self.notes, *(voice.conversation.note for voice in self.voices)):
            if note:
                print(f"note: {visible(note)}", file=file, flush=True)

    # ---- commands

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        name, rest = name.strip().replace("-", "_"), rest.strip()
        if name in _RULES:
            self._set(name, rest)
        elif name in ("quit", "exit"):
            self.quits = True
        elif name == "reset":
            self._begin(self.voices[0].conversation.system)
        elif name == "system":
            self._begin(rest)
        elif name == "save":
            self._save(rest)
        elif name in ("help", "?"):
            print(_HELP)
        else:
            known = ", ".join(f"/{command}" for command in COMMANDS)
            self._say(f"/{name} is not a command{nearest(name, COMMANDS)}; accepts {known}")

    def _begin(self, system: str) -> None:
        for voice in self.voices:
            voice.begin(system=system)
        self._escaped = 0
        self._say("a new conversation" + (f", with the system message {system!r}" if system else ""))

    def _set(self, name: str, text: str) -> None:
        whole = name in ("max_tokens", "seed")
        try:
            value: Any = int(text) if whole else float(text)
        except ValueError:
            raise ConfigError(f"/{name}: got {text!r}, accepts {_RULES[name][1]}") from None
        if wrong := problem(name, value):
            raise ConfigError(f"/{wrong}")
        self.sampling = dataclasses.replace(self.sampling, **{name: value})
        self._say(self._settings())

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save: needs the name of a file")
        path = Path(os.path.expanduser(name))
        said = {v.name: {"model": v.label, "messages": list(v.conversation.messages)} for v in self.voices}
        text = json.dumps({**self._record(), **said}, indent=2, ensure_ascii=False)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{text}\n")
        except FileExistsError:
            raise ConfigError(f"/save: {path} already exists; choose another name") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"/save: {path}: cannot be written: {getattr(error, 'strerror', '') or error}") from None
        self._say(f"{path}: written")

    # ---- answers

    def _answer(self, question: str) -> None:
        began = time.monotonic()
        console = self.display.console
        # The stack closes the conversations' iterators, and with them what the engine still does.
        with self.stop.working(), contextlib.ExitStack() as closing:
            growing = [self._growing(voice, question, closing) for voice in self.voices]
            if len(growing) == 1:
                answers = [self._stream(growing[0])]
            elif console.is_terminal and console.width >= WIDE:
                answers = self._beside(growing)
            else:
                answers = [
                    self._stream(each, f"--- {voice.name}: {voice.label}\n")
                    for voice, each in zip(self.voices, growing, strict=True)
                ]
        self._after(answers, time.monotonic() - began)

    def _growing(self, voice: Voice, question: str, closing: contextlib.ExitStack) -> Iterator[Answer]:
        """The answer as it grows, until it is whole or somebody stops it."""
        # Closing the iterator stops the answer: see Conversation.ask.
        asked = closing.enter_context(contextlib.closing(voice.conversation.ask(question, self.sampling)))  # type: ignore[type-var]
        last = Answer("")
        try:
            for last in asked:
                yield last
                # An answer that ended by itself in the same moment is whole.
                if self.stop.asked and not last.reason:
                    break
        # A second Ctrl-C, before the first one was looked at.
        except KeyboardInterrupt:
            self.stop.asked = True
        if not last.reason:
            yield dataclasses.replace(last, reason="abort")

    def _stream(self, growing: Iterator[Answer], heading: str = "") -> Answer:
        """Prints an answer as it grows."""
        out = sys.stdout
        shown, last = 0, Answer("")
        # A program that reads the output gets the text as it is.
        safe = visible if out.isatty() else str
        out.write(heading)
        for last in growing:
            out.write(safe(last.text[shown:]))
            out.flush()
            # Never back: what was printed once is not printed again.
            shown = max(shown, len(last.text))
        if not last.text.endswith("\n"):
            out.write("\n")
        out.flush()
        return last

    def _beside(self, growing: Sequence[Iterator[Answer]]) -> list[Answer]:
        """Shows two answers side by side while they grow, the ends of them that fit, and then as a whole."""
        console = self.display.console
        answers = [Answer("")] * len(growing)
        drawn_at = 0.0
        with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
            running = set(range(len(growing)))
            while running:
                # One step of each in turn, so that both grow together.
                for number in sorted(running):
                    found = next(growing[number], None)
                    if found is None:
                        running.remove(number)
                    else:
                        answers[number] = found
                if time.monotonic() - drawn_at >= REDRAW_S:
                    live.update(self._columns(answers, lines=max(3, console.height - 3)), refresh=True)
                    drawn_at = time.monotonic()
        # The live display vanishes (transient); what stays is the whole text.
        console.print(self._columns(answers))
        return answers

    def _columns(self, answers: Sequence[Answer], *, lines: int | None = None) -> Table:
        """The answers in columns; ``lines``: the last so many of each."""
        console = self.display.console
        table = Table(box=None, pad_edge=False, padding=(0, 4, 0, 0), expand=True)
        width = console.width // len(answers) - 4
        cells = []
        for voice, answer in zip(self.voices, answers, strict=True):
            table.add_column(Text(visible(f"{voice.name}: {voice.label}")), ratio=1, overflow="fold")
            wrapped = Text(visible(answer.text)).wrap(console, width)
            # The last lines that fit, as in a terminal that scrolls.
            cells.append(Text("\n").join(wrapped if lines is None else wrapped[-lines:]))
        table.add_row(*cells)
        return table

    def _after(self, answers: Sequence[Answer], seconds: float) -> None:
        """One line on the answers, where somebody looks on; and what is not as it was said."""
        endings = {"length": "cut off at the limit of tokens", "abort": "stopped"}
        for voice, answer in zip(self.voices, answers, strict=True):
            # A program is told only of what is missing; "stopped" is for the person who stopped it.
            if answer.reason in endings and (sys.stdout.isatty() or answer.reason == "length"):
                who = f"{voice.name} " if len(self.voices) > 1 else ""
                print(f"({who}{endings[answer.reason]})", file=_aside(), flush=True)
        self._tell_escaped(_aside())
        if sys.stdout.isatty():
            count = sum(answer.tokens for answer in answers)
            self.display.console.print(
                Text(f"({count} tokens, {count / max(seconds, 1e-9):.0f} per second)", style="dim")
            )

    def _tell_escaped(self, file: Any) -> None:
        escaped = max(voice.conversation.escaped for voice in self.voices)
        if escaped > self._escaped:
            self._escaped = escaped
            print("(special tokens in the question were passed on as plain text)", file=file, flush=True)

    def _say(self, text: str) -> None:
        print(visible(text), flush=True)


_CUTS = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))


def _aside() -> Any:
    """Where remarks go: never between the text of an answer that a program reads."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def _read() -> str:
    """One question or command."""
    line = input(PROMPT)
    if line.strip() != '"""':
        return line
    lines: list[str] = []
    while (line := input("...  ")).strip() != '"""':
        lines.append(line)
    return "\n".join(lines)
