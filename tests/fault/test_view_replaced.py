"""What ``trew view`` shows of folders that another run takes over, and of tables that are damaged in part."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from trew.runs import RunFolder
from view_help import CONFIG, client, get, group, make_run, write_step


def test_a_run_in_the_folder_of_another_kind_has_its_scores(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    demonstrations = CONFIG.replace('"arithmetic"', '"demonstrations"')
    page = None
    for text, mean in ((demonstrations, None), (CONFIG, 0.5), (demonstrations, None)):
        with RunFolder.open(folder, overwrite=True) as run:
            run.write_config(text.format(steps=1, seed=0, lr=1e-3))
            write_step(run, 1, group("a", "no", "yes"))
        page = page or client(tmp_path)
        assert get(page, "runs/x/steps")["steps"][0]["mean"] == mean
        assert get(page, "runs/x/groups", step=1)["groups"][0]["mean"] == mean


def _damage(path: Path, column: str) -> None:
    """Overwrites the data of one column, as a bad sector does."""
    chunks = pq.read_metadata(path).row_group(0)
    found = next(c for c in map(chunks.column, range(chunks.num_columns)) if c.path_in_schema == column)
    data = bytearray(path.read_bytes())
    begin = found.dictionary_page_offset or found.data_page_offset
    data[begin : begin + found.total_compressed_size] = bytes(found.total_compressed_size)
    path.write_bytes(data)


@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_a_table_whose_texts_are_damaged_is_named(column: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", steps=2)
    _damage(folder / "rollouts" / "000002.parquet", column)
    page = client(tmp_path)
    message = get(page, "runs/x/groups", 404, step=2)["error"]["message"]
    assert message.startswith("x: the groups of step 2 cannot be shown: rollouts/000002.parquet: cannot be read (")
    found = get(page, "runs/x/rollouts", eval=0)
    assert (found["total"], [row and row["step"] for row in found["rows"]]) == (10, [1] * 5 + [None] * 5)
    # Everything else is there, and a text is a text, since the page shows it as one.
    assert get(page, "runs/x/groups", step=1)["total"] == 2
    assert [p["prompt"] for p in get(page, "runs/x/prompts", sort="uid")["prompts"]] == ["", "", "question held"]
    history = get(page, "runs/x/prompt", uid="a")
    assert (history["prompt"], [len(visit["rows"]) for visit in history["visits"]]) == ("question a", [2, 0])


def test_metrics_of_a_server_that_was_started_again_do_not_go_on_behind_those_of_another_run(tmp_path: Path) -> None:
    """A page that was open meanwhile asked for the rows behind its last one, and drew both runs as one."""
    folder = make_run(tmp_path / "x")
    before = get(client(tmp_path), "runs/x/metrics")["read"]
    with RunFolder.open(folder, overwrite=True) as run:
        run.write_config(CONFIG.format(steps=9, seed=0, lr=1e-3))
        for step in range(1, 6):
            write_step(run, step, group("a", "x"))
    page = client(tmp_path)
    assert get(page, "runs/x/metrics", since=3)["read"] == get(page, "runs")["runs"][0]["read"] != before
