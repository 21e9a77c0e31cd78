"""examples/quickstart.ipynb runs from its first cell to its last, and shows what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from trew.runs.layout import problems

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 6
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


def test_the_notebook_says_how_its_run_is_continued(tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    [train] = [cell for cell in cells if "trew.train(" in "".join(cell["source"])]
    before = "".join(cells[cells.index(train) - 1]["source"])
    assert "overwrite=True" in "".join(train["source"])
    # Both together are refused, and with overwrite alone what the interrupted run has saved is gone.
    assert problems(tmp_path / "run", resume=True, overwrite=True)
    assert "`resume=True` in the place of `overwrite=True`" in before


@pytest.mark.nightly
def test_the_notebook_runs(tmp_path, monkeypatch):
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("TREW_QUICKSTART_MODEL", str(tiny.save(tmp_path / "model")))
    monkeypatch.setenv("TREW_QUICKSTART_STEPS", "3")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = [set(output.get("data", ())) for output in outputs]
    block = next(o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", ()))
    assert "training: " not in block  # the bar is gone at the end
    for shown in ("reward and accuracy over the steps", "after training (n = 100)", "a prompt of this step"):
        assert shown in block
    assert any("image/svg+xml" in kind for kind in kinds)
    assert any("text/latex" in kind for kind in kinds)
    text = "".join(output.get("text", "") for output in outputs)
    assert "ok      the gold can score: in every row" in text
    assert "Traceback" not in text
    assert (tmp_path / "runs" / "notebook" / "final").is_dir()
