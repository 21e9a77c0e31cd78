"""What is said of a rank that died too often."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trew.config import parse
from trew.distributed import launch


def test_the_last_start_is_quoted_however_many_there_were(tmp_path):
    for attempt in (0, 1, 9, 10):
        folder = tmp_path / "id" / f"attempt_{attempt}" / "1"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"start {attempt}\n")
    death = ChildFailedError("trew", {1: ProcessFailure(local_rank=1, pid=1, exitcode=3, error_file="/none")})
    text = launch._death(death, tmp_path, parse({"model": "m", "out": "o", "cluster": {"learner": 2}}))
    assert text.startswith("rank 1 on ")
    assert text.endswith("Its last lines:\n  start 10")
