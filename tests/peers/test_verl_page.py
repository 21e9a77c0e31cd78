"""docs/from-trl-verl.md: every key of verl's on the page is one of its configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from test_verl_export import composed

PAGE = (Path(__file__).parents[2] / "docs" / "from-trl-verl.md").read_text()


@pytest.fixture(scope="module")
def config():
    return composed({})


def keys_of(cell: str, roots: set[str]) -> list[str]:
    """The full names in a cell: a key without a root of verl's stands beside the cell's first one. What is in brackets
    are values, and after "no" is what verl does not have."""
    found: list[str] = []
    for word in re.findall(r"`([^`]+)`", re.sub(r"\([^)]*\)|; no .*", "", cell)):
        key = re.sub(r"^(actor|rollout)\.", r"actor_rollout_ref.\1.", word.partition("=")[0])
        beside = found and key.partition(".")[0] not in roots
        found.append(f"{found[0].rpartition('.')[0]}.{key}" if beside else key)
    return found


def unknown(page: str, config: DictConfig) -> list[str]:
    """Keys of the page's last column that verl does not have."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| `", line)]
    rows = [row for row in rows if len(row) == 3]  # the other table is of TRL's keys alone
    keys = [key for row in rows for key in keys_of(row[2], set(config))]
    assert len(rows) > 25
    assert len(keys) > 40
    wrong = []
    for key in keys:
        parent, _, last = key.removesuffix(".*").rpartition(".")
        holder = OmegaConf.select(config, parent)
        if not isinstance(holder, DictConfig) or last not in [*holder.keys()]:  # "in" leaves out what has no value yet
            wrong.append(key)
    return wrong


def test_every_key_is_one_of_verl_s(config):
    assert unknown(PAGE, config) == []


def test_every_default_is_verl_s(config):
    start = PAGE.index("| here, by default |")
    rows = [row.strip("|").split("|")[2] for row in PAGE[start:].partition("\n\n")[0].splitlines()[2:]]
    seen = 0
    for cell in rows:
        values = [word.partition("=")[2] for word in re.findall(r"`([^`]+)`", cell)]
        for key, value in zip(keys_of(cell, set(config)), values, strict=True):
            assert str(OmegaConf.select(config, key)) == value, key
            seen += 1
    assert seen > 9


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("actor.entropy_coeff", "actor.entropy_coefficient"), ("`kl_penalty`", "`kl_penalties`"),
     ("`trainer.test_freq`", "`trainers.test_freq`"), ("rollout_correction.*", "rollout_corrections.*")],
)  # fmt: skip
def test_a_wrong_key_is_seen(config, right, wrong):
    assert right in PAGE
    assert len(unknown(PAGE.replace(right, wrong), config)) == 1
