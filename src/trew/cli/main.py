"""``trew``: finds the command, imports only its module, and turns trew's errors into one message and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from ..errors import TrewError, nearest, path_problem
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


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point of the ``trew`` command; always ends with SystemExit."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_closed()
    # Names of files and texts of models may have characters that a terminal's encoding has not.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    if lacking := posix.problem():
        tell(lacking)
        sys.exit(2)
    try:
        # Before the command's module is imported, which may take seconds.
        with Interrupts() as interrupts, interrupts.anywhere():
            code = run(args)
    except TrewError as error:
        tell(error)
        code = error.exit_code
    except OSError as error:  # BrokenPipeError has no path
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still buffered
            # 128 + SIGPIPE, as of a program that the signal has ended.
            code = 141
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
    sys.exit(code)


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
    # Only now: each command imports what it needs, so that trew --help imports none.
    function = getattr(importlib.import_module(f".{module}", __package__), target)
    return call(function, rest, prog=prog)


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
