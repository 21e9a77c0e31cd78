"""``trew report`` on run folders that somebody else made: no link followed, no wait, no traceback."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from report_help import make
from trew.runs.report import load_run, render_report
from trew.runs.report.read import load_samples
from trew.runs.report.safe_files import UnsafeFile, file_names, open_file, read_text

SECONDS = 60.0


def in_time(action):
    """The result of ``action``; a failure where it waits for something that never comes."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "did not return in time"
    return found[0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "config.toml"])
@pytest.mark.parametrize("kind", ["secret", "/dev/zero", "fifo", "folder"])
def test_what_is_no_regular_file_is_named_and_not_read(tmp_path: Path, name: str, kind: str):
    run = make(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "reward": 0.125, "canary": 1}\n')
    (run / name).unlink()
    if kind == "fifo":
        os.mkfifo(run / name)
    elif kind == "folder":
        (run / name).mkdir()
    else:
        (run / name).symlink_to(secret if kind == "secret" else kind)
    page = in_time(lambda: render_report([load_run(run)]))
    assert "canary" not in page
    assert f"{name}: is " in page


@pytest.mark.parametrize("kind", ["evals", "rollouts"])
def test_links_to_samples_are_not_followed(tmp_path: Path, kind: str):
    other = make(tmp_path / "other")
    run = make(tmp_path / "run")
    for file in (run / kind).iterdir():
        file.unlink()
        file.symlink_to(other / kind / file.name)
    assert load_samples(run, kind=kind) == []
    for file in (run / kind).iterdir():
        file.unlink()
    (run / kind).rmdir()
    (run / kind).symlink_to(other / kind)
    assert load_samples(run, kind=kind) == []
    assert load_samples(other, kind=kind) != []
    with pytest.raises(UnsafeFile, match="link"):
        file_names(run, kind)


def test_sizes_are_bounded_and_names_stay_below_the_folder(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "above").write_text("x")
    (tmp_path / "run" / "long").write_text("x" * 11)
    assert read_text(tmp_path / "run", "long", most=11) == "x" * 11
    with pytest.raises(UnsafeFile, match="11 bytes, accepts at most 10"):
        read_text(tmp_path / "run", "long", most=10)
    for name in ("../above", "/etc/hostname", "a//b", ".", ""):
        with pytest.raises(UnsafeFile, match="plain name"):
            open_file(tmp_path / "run", name, most=10)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert read_text(tmp_path / "link", "long", most=11)  # the user named the folder itself


VALUES = [
    "1e308", "-1e308", "5e-324", "1" + "0" * 400, "-" + "9" * 400, "true", '"text"', "[1]", '{"a": 1}', "1e999", "NaN",
    "null", "0.5",
]  # fmt: skip


@pytest.mark.parametrize("name", ["reward", "accuracy", "eval_accuracy", "eval_low", "eval_n", "loss", "reward/x"])
def test_values_of_any_size_and_type(tmp_path: Path, name: str):
    run = tmp_path / "run"
    run.mkdir()
    rows = [f'{{"step": {i}, "eval_accuracy": 0.5, "{name}": {value}}}' for i, value in enumerate(VALUES)]
    rows += [f'{{"step": {"9" * 400}, "reward": 1}}', '{"step": -1}', '{"step": 1.5}', "[" * 100_000]
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    loaded = load_run(run)
    assert len(loaded.rows) == len(VALUES)
    assert "4 lines that are incomplete or not metrics rows" in " ".join(loaded.notes)
    assert f"3 values of {name} that are not numbers" in " ".join(loaded.notes)
    page = render_report([loaded])
    assert "nan" not in page.partition("<svg")[2].partition("</svg>")[0]


def test_a_range_as_wide_as_floats_go(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": -1e308}\n{"step": 2, "reward": 1e308}\n')
    page = render_report([load_run(run)])
    assert "1e308" in page
    assert "inf" not in page.partition("<svg")[2]


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e308", '"x"', "[]", '{"a": {}}', "true", "null"])
def test_summaries_and_configurations_of_any_size_and_type(tmp_path: Path, value: str):
    run = tmp_path / "run"
    run.mkdir()
    keys = ("task", "model", "objective", "seed", "steps", "seconds", "tokens_per_second", "peak_memory_bytes",
            "device", "versions", "n_eval", "accuracy_before", "accuracy_after")  # fmt: skip
    (run / "summary.json").write_text("{" + ", ".join(f'"{key}": {value}' for key in keys) + "}")
    toml = value if value not in ("null", '{"a": {}}') else "0"
    (run / "config.toml").write_text(
        f"model = {toml}\nsteps = {toml}\n[health]\nwindow = {toml}\n[rollout]\ncompletions = {toml}\n"
        f"max_tokens = {toml}\n[learner]\nmax_grad_norm = {toml}\n[data]\ntask = {toml}\n"
    )
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 1}\n')
    assert render_report([load_run(run)])
    interval = json.dumps({"mean": 0, "low": 0, "high": 0}).replace("0", value)
    (run / "summary.json").write_text(f'{{"accuracy_before": {interval}, "accuracy_after": {interval}}}')
    assert render_report([load_run(run)])


def test_tables_of_another_kind_are_left_out(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = make(tmp_path / "run", evals=False)
    [file] = (run / "rollouts").iterdir()
    pq.write_table(pa.table({"prompt": [1], "uid": [[2]], "score": ["x"]}), file)
    assert load_samples(run, kind="rollouts") == []
    assert render_report([load_run(run)])
