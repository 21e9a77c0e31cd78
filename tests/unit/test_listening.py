"""The token of commands that listen: made once, whole, for its owner alone."""

from __future__ import annotations

import stat
import threading

import pytest

from trew.errors import ConfigError
from trew.utils.listening import TOKEN_FILE, token_for


def ask(folder, told=None):
    return token_for("TREW_NO_SUCH_TOKEN", folder, (told if told is not None else []).append)


def test_commands_that_start_at_once_have_one_token(tmp_path):
    start, found = threading.Barrier(8), []

    def command() -> None:
        start.wait()
        found.append(ask(tmp_path))

    threads = [threading.Thread(target=command) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    file = tmp_path / TOKEN_FILE
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text().strip() == found[0]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_is_told_once(tmp_path):
    first: list[str] = []
    made = ask(tmp_path, first)
    again: list[str] = []
    assert ask(tmp_path, again) == made
    assert any(made in line for line in first)
    assert not any(made in line for line in again)


def test_a_planted_link_is_not_followed(tmp_path):
    other = tmp_path / "other"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / TOKEN_FILE).symlink_to(other)
    with pytest.raises((OSError, ConfigError)):
        ask(tmp_path / "run")
    assert not other.exists()
