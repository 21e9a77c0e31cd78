"""``trew``: finds the command, imports only its module, and turns trew's errors into one message and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from ..errors import TrewError, nearest, output_problem, path_problem
from ..utils import posix
from ..utils.secrets import redact
from ..utils.signals import Interrupts, leave

# command -> (module, function or its several functions, one line of help)
COMMANDS: dict[str, tuple[str, str | tuple[str, ...], str]] = {
    "demo": ("demo", "demo", "watch a small language model learn to add, or a game: minutes, no account, no GPU"),
    "train": (
        "train",
        "train",
        "train from a recipe; --set key=value changes it, --dry-run checks it, --resume continues",
    ),
    "sft": (
        "sft",
        "sft",
        "fine-tune on demonstrations, accepted completions or preference pairs (DPO); --dry-run",
    ),
    "plan": ("plan", "plan", "the memory and time that a recipe needs, and what to change; --json for programs"),
    "eval": ("eval", "eval", "accuracy, pass@k and avg@k of a model with 95 % intervals"),
    "chat": ("chat", "chat", "talk with a model or a run; --before: beside the model before training"),
    "train-reward": (
        "train_reward",
        "train_reward",
        "train a reward model on preference pairs; --dry-run checks it, --resume continues",
    ),
    "iterate": ("iterate", "iterate", "train policy and reward model in turns, round after round"),
    "report": ("report", "report", "one HTML file about one or several runs"),
    "view": ("view", "view", "runs in a browser, while they train and afterwards: curves, completions, tokens"),
    "compare": ("compare", "compare", "which settings are better, and how sure that is: runs paired by seed"),
    "study": ("study", "study", "many runs by one design: learning rates tuned, seeds paired, intervals, resumable"),
    "explain": ("explain", "explain", "an objective: its equation, defaults and source; --plot draws its weight"),
    "data": (
        "data",
        ("prepare", "convert", "show"),
        "prepare, convert and show data sets",
    ),
    "rewards": (
        "rewards",
        ("test", "score", "serve"),
        "check a reward on data before training; score a file; compute rewards for other machines",
    ),
    "env": ("env", "env", "list environments; --play plays one by hand, --check tests it before training"),
    "export": ("export", ("model", "verl"), "a checkpoint as a model folder; a recipe as another trainer's command"),
    "serve": ("serve", "serve", "serve a model by vLLM to runs on other machines, behind a token"),
    "cluster": ("cluster", ("install-vllm", "install-plugin"), "make the environment that vLLM servers run in"),
    "schema": ("schema", "schema", "the JSON schema of recipes: editors complete keys and mark mistakes with it"),
    "completion": ("completion", "completion", "the script by which bash, zsh or fish completes these commands"),
    "doctor": ("doctor", "doctor", "what this machine can do, and what is missing"),
}

# Commands whose results are in a folder: without what they print, nothing is lost.
IN_FOLDER = frozenset({"demo", "train", "sft", "train-reward", "iterate"})

# Commands that import torch, which needs a temporary folder, or need one themselves; env says itself when it does.
TEMPORARY = IN_FOLDER | {"plan", "eval", "chat", "study", "rewards", "export", "serve", "cluster", "schema"}

# 128 + SIGPIPE, as of a program that the signal has ended.
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of the ``trew`` command; always ends with SystemExit."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_closed()
    _prepare_streams()
    if lacking := posix.problem():
        tell(lacking)
        sys.exit(2)
    code: int | str | None
    try:
        # Before the command's module is imported, which may take seconds.
        with Interrupts() as interrupts, interrupts.anywhere():
            code = run(args)
    except SystemExit as ended:  # the parser's, which has said what there is to say
        code = ended.code
    except TrewError as error:
        tell(error)
        code = error.exit_code
    except OSError as error:  # BrokenPipeError has no path
        if isinstance(error, BrokenPipeError):
            _discard_output()
            code = _BROKEN_PIPE
        elif _is_of_output(error):
            _discard_output()
            tell(output_problem(error))
            code = 1
        elif said := path_problem(error):
            tell(said)
            code = 2
        else:
            raise
    except KeyboardInterrupt as error:
        tell(error or "interrupted")
        # 130: as a shell reports SIGINT.
        code = getattr(error, "exit_code", 130)
        if argv is None:  # without waiting for threads that are still at work; children end with their parent
            leave(code)
    sys.exit(_with_all_written(args, code))


def _with_all_written(args: list[str], code: int | str | None) -> int | str | None:
    """Writes what standard output has buffered; returns the exit code, which is none of success where a part of the
    output is lost."""
    lost = ""
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        if isinstance(error, BrokenPipeError):
            return code or _BROKEN_PIPE
        lost = output_problem(error)
    # Only of a command that has used it: importing it takes a while.
    if (console := sys.modules.get("trew.utils.console")) is not None:
        lost = console.take_lost() or lost
    asked = {arg.replace("_", "-") for arg in args[1:]} & {"--dry-run", "--help", "-h"}
    in_folder = args[:1] and args[0] in IN_FOLDER and not asked
    if code or not lost or in_folder:
        return code
    tell(lost)
    return 1


def _is_of_output(error: OSError) -> bool:
    """Whether an error of a disk is of standard output's: those of writing name no file."""
    if error.filename or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return False
    try:
        sys.stdout.flush()
        # What is larger than the buffer was never in it.
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        return again.errno == error.errno
    return False


def _discard_output() -> None:
    """Discards what standard output has buffered, and all that comes: it would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed() -> None:
    """Opens what this process was started without, as by ``>&-``, on nothing: a file of the run would be opened in its
    place, and get what other processes and libraries print."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        # Takes the lowest free number: those below are open by now.
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _prepare_streams() -> None:
    """Makes standard output and error fit for any text, and for a disk that becomes full."""
    out = sys.stdout
    # Only the process's own: a stream that a caller has put in its place is the caller's.
    is_own = sys.stdout is sys.__stdout__
    if is_own and isinstance(out, io.TextIOWrapper) and isinstance(out.buffer, io.RawIOBase):
        # With PYTHONUNBUFFERED, Python takes a write that was cut short, as by a full disk, for a whole one.
        sys.stdout = open(out.fileno(), "w", 1, out.encoding, out.errors, closefd=False)  # noqa: SIM115
    # Names of files and texts of models may have characters that a terminal's encoding has not. surrogateescape is what
    # Python sets in the locale C.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def tell(message: object) -> None:
    """Prints a message on standard error with secrets masked; ignores a terminal that is gone."""
    with contextlib.suppress(OSError, ValueError):
        for line in redact(str(message)).splitlines():
            print(f"trew: {brief(visible(line))}", file=sys.stderr)
        sys.stderr.flush()


def visible(text: str) -> str:
    r"""Escapes unprintable characters: a message may quote models, data and user code.

    >>> visible("caf\u00e9 \x1b[31m")
    'café \\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def brief(line: str, most: int = 2000) -> str:
    """Cuts the middle out of a very long line: an error message shows the value it got, whatever its length.

    >>> brief("model: got 'aaaaaaaaaaaaaaaaaaaa', accepts a folder", 30)
    "model: got 'aaa...pts a folder"
    """
    half = most // 2
    return line if len(line) <= most else f"{line[:half]}...{line[3 - half :]}"


def run(args: list[str]) -> int:
    """Runs one command line; returns the exit code."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        from .. import __version__

        print(f"trew {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        print(
            f"trew: {name!r} is not a command{nearest(name, COMMANDS)}; accepts {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    module, target, line = COMMANDS[name]
    prog = f"trew {name}"
    if isinstance(target, tuple):
        if not rest or rest[0] in ("-h", "--help"):
            print(f"{line}\n\nUsage: {prog} {{{','.join(target)}}} ...   ({prog} <command> --help says more)")
            return 0
        if rest[0] not in target:
            hint = nearest(rest[0], target)
            print(f"{prog}: {rest[0]!r} is not a command{hint}; accepts {', '.join(target)}", file=sys.stderr)
            return 2
        # Commands have hyphens, functions underscores.
        prog, target, rest = f"{prog} {rest[0]}", rest[0].replace("-", "_"), rest[1:]
    if not {"-h", "--help"} & {*rest} and (problem := _problem_here(name)):
        tell(problem)
        return 2
    # Only now: each command imports what it needs, so that trew --help imports none.
    function = getattr(importlib.import_module(f".{module}", __package__), target)
    return call(function, rest, prog=prog)


def _problem_here(command: str) -> str:
    """Says why a command cannot run in this place, where what it imports would fail without saying why; empty if
    nothing is known to be in its way."""
    if sys.flags.optimize >= 2:
        return (
            "Python leaves out docstrings (PYTHONOPTIMIZE is 2 or more, or -OO), which trew and what it imports read; "
            "unset PYTHONOPTIMIZE, or set it to 1"
        )
    try:
        os.getcwd()
    except OSError:
        return "the current folder no longer exists; cd into another one"
    return temporary_problem() if command in TEMPORARY else ""


def temporary_problem() -> str:
    """Says that there is no folder for temporary files, with what to do; empty if there is one."""
    import tempfile

    try:
        tempfile.gettempdir()
    except OSError as error:
        found = error.strerror or str(error)
        return f"temporary folder: {found[:1].lower()}{found[1:]}; set TMPDIR to a folder that can be written to"
    return ""


def call(function: Callable[..., int | None], args: list[str], *, prog: str) -> int:
    """Parses ``args`` according to the function's signature and calls it."""
    import tyro

    flat = tyro.conf.configure(tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction)(function)
    return tyro.cli(flat, args=expand_pairs(args), prog=prog) or 0


def expand_pairs(args: list[str]) -> list[str]:
    """Expands ``--set a=1 b=2`` to ``--set a=1 --set b=2``: one flag takes every key=value that follows it. The same
    for ``--rates``.

    >>> expand_pairs(["r.toml", "--set", "a=1", "b=2", "--resume"])
    ['r.toml', '--set', 'a=1', '--set', 'b=2', '--resume']
    """
    out: list[str] = []
    flag, waiting = "", False  # waiting: the flag was read, its first key=value was not
    for arg in args:
        if arg in ("--set", "--rates"):
            # A flag without a value stays as it is, for the parser to complain.
            out += [flag] if waiting else []
            flag, waiting = arg, True
        # A word without "=" after the first pair is the next positional argument.
        elif flag and not arg.startswith("-") and (waiting or "=" in arg):
            out += [flag, arg]
            waiting = False
        else:
            out += [flag, arg] if waiting else [arg]
            flag, waiting = "", False
    return [*out, flag] if waiting else out


def usage() -> str:
    """The text of ``trew --help``."""
    lines = ["trew: train language models with reinforcement learning from verifiable rewards", "", "Commands:"]
    lines += [f"  {name:<12} {line}" for name, (_, _, line) in COMMANDS.items()]
    lines += ["", "trew <command> --help says more about each. New here: trew demo, then trew doctor."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
