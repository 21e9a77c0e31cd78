"""Names that begin with ~: Path.expanduser raises RuntimeError where there is no such user, and a folder may be called
so."""

from __future__ import annotations

from pathlib import Path

import pytest

import trew
from trew.cli.chosen_model import choose

SOURCES = Path(trew.__file__).parent


def test_no_name_of_a_user_is_looked_up_in_a_way_that_fails():
    calls = [path.name for path in SOURCES.rglob("*.py") if ".expanduser()" in path.read_text(encoding="utf-8")]
    assert not calls, "os.path.expanduser leaves names of unknown users as they are"


def test_a_model_may_be_called_like_a_user_that_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert choose("~nobody1", step=None, base="", chat_template="").name == "~nobody1"
