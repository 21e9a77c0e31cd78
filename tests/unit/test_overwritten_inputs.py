"""What a run reads of the folder that it is to overwrite."""

from __future__ import annotations

from pathlib import Path

import pytest

from trew.runs.layout import RUN, problems


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a run whose final/ holds a model, prompts and a reward."""
    monkeypatch.setenv("HOME", str(tmp_path))
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "run" / "metrics.jsonl").touch()
    for name in ("train.jsonl", "reward.py", "tool.py", "chat.jinja"):
        (final / name).touch()
    return tmp_path


@pytest.mark.parametrize("where", ["~/run/final", "{home}/run/final"])
@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("model", {"model": "PLACE"}),
        ("chat_template", {"chat_template": "PLACE/chat.jinja"}),
        ("data.train", {"data": {"train": ["x.jsonl", "PLACE/train.jsonl"]}}),
        ("rewards.name", {"rewards": [{"name": "gsm8k"}, {"name": "PLACE/reward.py:odd"}]}),
        ("environment.name", {"environment": {"name": "trl:PLACE/tool.py:Class"}}),
        ("environment.tools", {"environment": {"tools": ["PLACE/tool.py:add"]}}),
    ],
)
def test_nothing_that_a_run_reads_is_overwritten(home: Path, where: str, setting: str, settings: dict):
    place = where.format(home=home)

    def filled(value):
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        return [filled(each) for each in value] if isinstance(value, list) else value.replace("PLACE", place)

    given = filled(settings)
    (found,) = problems(home / "run", overwrite=True, layout=RUN, settings=given)
    assert found.startswith(f"{setting}: ")
    assert "which --overwrite deletes first" in found
    assert problems(home / "other", overwrite=True, layout=RUN, settings=given) == []


def test_names_of_built_in_rewards_and_tasks_are_no_files(home: Path):
    settings = {"rewards": [{"name": "gsm8k"}], "environment": {"name": "trl:nothing.py:Class"}, "model": "~nobody/x"}
    assert problems(home / "run", overwrite=True, layout=RUN, settings=settings) == []
