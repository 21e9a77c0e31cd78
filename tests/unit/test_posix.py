"""On a system without what trew needs of it, one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys, signal, os
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in [n for n in dir(signal) if n.startswith(("SIGHUP", "SIGUSR", "SIGVTALRM", "SIGALRM"))]:
    delattr(signal, name)
del os.fork
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("from trew.cli.main import main; main(['doctor'])", 2),
        ("from trew.cli.main import main; main(['train', 'r.toml'])", 2),
        ("import trew\ntry:\n    trew.train\nexcept ImportError as e:\n    sys.exit(f'trew: {e}')", 1),
    ],
)
def test_a_system_that_lacks_something_is_told_in_one_sentence(code, status):
    done = subprocess.run([sys.executable, "-c", f"{WITHOUT}\n{code}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert (
        "trew needs a POSIX system (Linux or macOS; on Windows, WSL): this Python has no fcntl, resource" in done.stderr
    )


def test_objectives_are_there_all_the_same():
    code = f"{WITHOUT}\nimport trew; print(trew.presets()[0])"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
