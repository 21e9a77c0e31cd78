"""What ``trew view`` shows of folders that another run takes over, and of tables that are damaged in part."""

from pathlib import Path

from trew.runs import RunFolder
from view_help import CONFIG, client, get, group, write_step


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
