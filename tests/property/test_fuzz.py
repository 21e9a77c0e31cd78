"""Any input of a loader is accepted or refused with one of our errors, in time: a few inputs of ``fuzzing``, the same
ones each time. ``benchmarks/fuzz.py`` tries as many as there is time for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzzing
import tiers
from fuzzing import TARGETS, Target
from trew.errors import DataError


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_any_input_is_accepted_or_refused(target, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    @settings(
        max_examples=tiers.examples(60),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def tried(made: Any) -> None:
        fuzzing.attempt(target, made)

    tried()


def test_what_is_neither_would_be_noticed(monkeypatch):
    def raises(made: int, folder: Path) -> None:
        if made > 3:
            raise KeyError(made)

    def hangs(made: int, folder: Path) -> None:
        while True:
            pass

    def silent(made: int, folder: Path) -> None:
        raise DataError("  ")

    assert fuzzing.attempt(Target("fine", st.integers(), raises), 3) is None
    with pytest.raises(KeyError):
        fuzzing.attempt(Target("raises", st.integers(), raises), 4)
    with pytest.raises(AssertionError, match="DataError, exit code 2: "):
        fuzzing.attempt(Target("silent", st.integers(), silent), 0)
    monkeypatch.setattr(fuzzing, "SECONDS", 0.05)
    with pytest.raises(fuzzing.TooSlow):
        fuzzing.attempt(Target("hangs", st.integers(), hangs), 0)
