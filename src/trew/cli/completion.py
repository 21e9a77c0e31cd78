"""``trew completion``: the script by which a shell completes trew's commands, options and their values."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

import tyro

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Annotated[Shell, tyro.conf.Positional]) -> None:
    """Print the completion script for a shell; docs/install.md says where it goes.

    Args:
        shell: The shell that is to complete trew's commands.
    """
    print(script(shell), end="")


def script(shell: Shell) -> str:
    """The script, made by tyro from the signatures of all commands."""
    printed = io.StringIO()
    # tyro prints the script and exits.
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(
            _all_commands(), prog="trew", args=["--tyro-print-completion", shell],
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction),
        )  # fmt: skip
    # Its scripts read one option per line, so that a line break in a description would look like another option.
    return re.sub(r"COMPLETION_SPEC = .*", lambda found: re.sub(r"\\+n", " ", found[0]), printed.getvalue())


def _all_commands() -> Any:
    """A union of all commands; those of a group are a union inside."""
    from .main import COMMANDS

    found = []
    for name, (module, target, line) in COMMANDS.items():
        loaded = importlib.import_module(f".{module}", __package__)
        if isinstance(target, str):
            found.append(_command(name, getattr(loaded, target), line))
        else:
            below = [_command(each, getattr(loaded, each.replace("-", "_")), "") for each in target]
            found.append(_command(name, _group(below), line))
    return Union[tuple(found)]  # noqa: UP007 - made at run time  # pyrefly: ignore[invalid-annotation]


def _group(commands: list[Any]) -> Callable[..., Any]:
    def group(command: Any) -> None:
        """A command that has others below it."""

    # Set by hand: tyro reads types from annotations, and these exist at run time only.
    group.__annotations__["command"] = tyro.conf.OmitSubcommandPrefixes[Union[tuple(commands)]]  # noqa: UP007  # pyrefly: ignore
    return group


def _command(name: str, function: Callable[..., Any], line: str) -> Any:
    about = line or (function.__doc__ or "").strip().splitlines()[0]
    return Annotated[Any, tyro.conf.subcommand(name, constructor=function, description=about)]
