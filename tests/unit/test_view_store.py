"""What the server of ``trew view`` keeps of runs that were looked at earlier."""

from pathlib import Path

import pytest

from trew.view import store
from trew.view.library import Library
from trew.view.steps import steps
from trew.view.store import Store
from view_help import make_run


def test_nothing_is_kept_of_an_index_that_had_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_KEPT_BYTES", 1)
    for name in "abc":
        make_run(tmp_path / name, steps=1)
    kept = Store()
    for run in Library([tmp_path]).runs():
        steps(run, kept)
    assert {run for run, _ in kept._indexes} == {"c"}
    assert {run for run, _ in kept._results} == {"c"}
