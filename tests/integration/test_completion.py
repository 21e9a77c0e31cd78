"""Completion of commands in the real shells, as far as this machine has them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from trew.cli.completion import Shell, script
from trew.cli.main import COMMANDS

ASK = {
    "bash": 'source "$1"; COMP_WORDS=({words}); COMP_CWORD={last}; _tyro_trew; printf "%s\\n" "${{COMPREPLY[@]}}"',
    "zsh": (
        "_describe() {{ print -rl -- ${{(P)2}} }}; _files() {{ print FILES }}; words=({words}); CURRENT={count}; "
        'source "$1"'
    ),
    "fish": 'source $argv[1]; complete -C "{line}"',
}
CALL = {"bash": ["--norc", "-c"], "zsh": ["-f", "-c"], "fish": ["--no-config", "-c"]}
SHELLS = [pytest.param(s, marks=pytest.mark.skipif(not shutil.which(s), reason=f"{s} is not installed")) for s in ASK]


@pytest.fixture(scope="module", params=SHELLS)
def shell(request, tmp_path_factory) -> tuple[Shell, Path]:
    file = tmp_path_factory.mktemp("shell") / "script"
    file.write_text(script(request.param))
    return request.param, file


def completed(shell: tuple[Shell, Path], *words: str) -> set[str]:
    """What the shell offers for the last of these words."""
    name, file = shell
    quoted = " ".join(map(shlex.quote, words))
    asked = ASK[name].format(words=quoted, last=len(words) - 1, count=len(words), line=" ".join(words))
    name_of_script = [] if name == "fish" else [name]
    ran = subprocess.run([name, *CALL[name], asked, *name_of_script, file], capture_output=True, text=True, check=True)
    separator = {"bash": "\n", "zsh": ":", "fish": "\t"}[name]
    return {line.partition(separator)[0] for line in ran.stdout.splitlines() if line}


def test_commands_their_parts_options_and_values_are_offered(shell):
    assert completed(shell, "trew", "") >= set(COMMANDS)
    assert completed(shell, "trew", "ch") == {"chat"}
    assert completed(shell, "trew", "data", "") - {"-h", "--help"} == {"prepare", "show", "convert"}
    assert completed(shell, "trew", "train", "--re") == {"--resume", "--replay"}
    assert completed(shell, "trew", "export", "model", "--pu") == {"--push", "--public"}
    assert completed(shell, "trew", "chat", "--dtype", "") == {"auto", "float32", "bfloat16"}


def test_a_name_that_is_no_shell_is_refused(server, tmp_path):
    assert "fish" in server.run("completion", "tcsh", cwd=tmp_path, code=2)
