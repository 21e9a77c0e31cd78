"""Whole runs whose completions are generated while the learner computes, on stand-ins for vLLM in this process."""

from __future__ import annotations

import json
import signal
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiers
import tiny
from fake_vllm import FakeVllm, serving
from forks import wait_for
from recipe_help import ODD, recipe, training_rows
from trew.runs.rollouts import EFFECTS
from trew.utils.toml import dump_table

UNTAUGHT = [name for name in EFFECTS if name != "teacher_logprobs"]
STEPS, PROMPTS = 6, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "smollm")


@pytest.fixture
def fakes(model: Path, tmp_path: Path) -> Iterator[list[FakeVllm]]:
    made = [FakeVllm(model, token="secret") for _ in range(2)]
    with serving(made[0], tmp_path / "0.sock"), serving(made[1], tmp_path / "1.sock"):
        for fake in made:
            fake.faults.slow = 0.002  # seconds per token: something is in flight when weights change
        yield made


@pytest.fixture
def cli(server: Any, tmp_path: Path) -> Any:
    return partial(server.run, cwd=tmp_path, TREW_SERVER_TOKEN="secret")


def written(folder: Path, model: Path, **cluster: Any) -> Path:
    (folder / "reward.py").write_text(ODD)
    endpoints = [f"unix:{folder}/{i}.sock" for i in range(2)]
    path = folder / "run.toml"
    path.write_text(
        recipe(
            model, steps=STEPS, objective={"preset": "grpo", "correction": "tis"}, checkpoint={"every": 2},
            cluster={"rollout": "vllm", "endpoints": endpoints, "staleness": 1, **cluster}, eval={"every": 3},
            learner={"minibatch_prompts": 2},  # two versions per step
        )
    )  # fmt: skip
    return path


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def trained_on(run: Path) -> Counter[int]:
    """How often each ticket was trained on, after all that was undone."""
    entries, used = ledger(run), {}
    for at, entry in enumerate(entries):
        if "trained" in entry:
            used[entry["trained"]] = (at, entry["tickets"])
        elif "begun" in entry:
            used = {step: (line, tickets) for step, (line, tickets) in used.items() if line < entry["mark"]}
    assert sorted(used) == list(range(1, STEPS + 1))
    return Counter(ticket for _, tickets in used.values() for ticket in tickets)


def check(run: Path, staleness: int = 1) -> None:
    """Every group was trained on once, within the bound; the metrics say so."""
    rows = training_rows(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["age_max"] for row in rows) <= staleness
    assert trained_on(run) == Counter(range(STEPS * PROMPTS))
    for path in sorted((run / "rollouts").glob("*.parquet")):
        step, oldest = int(path.stem), pq.read_table(path, columns=["policy_version"])["policy_version"].to_pylist()
        assert min(oldest) >= 2 * (step - 1 - staleness), "two updates in each step"
        for row in pq.read_table(path, columns=["token_ids", *EFFECTS]).to_pylist():
            # The KL term pulls at every token, so each was run: it has all values whatever weights sampled it.
            assert [len(row[name]) for name in UNTAUGHT] == [len(row["token_ids"])] * len(UNTAUGHT)
            assert not any(value is None for name in UNTAUGHT for value in row[name])


@pytest.mark.parametrize("in_flight", tiers.some(["keep", "finish"], ["keep"]))
def test_a_run_learns_from_rollouts_within_the_bound(in_flight, fakes, model, tmp_path, cli):
    for fake in fakes:
        fake.faults.slow = 0.1  # a completion takes longer than a step
    cli("train", written(tmp_path, model, in_flight=in_flight))
    run = tmp_path / "runs" / "run"
    check(run)
    rows = training_rows(run)
    assert [row["policy_version"] for row in rows] == [2 * step for step in range(1, STEPS + 1)]
    assert max(row["age_max"] for row in rows) == 1
    for row in rows:
        assert row["age/0"] + row["age/1"] == pytest.approx(1)
        assert row["waited_s"] <= row["rollouts/seconds"] <= row["seconds"]
    assert not list((run / "pending").iterdir()), "the last checkpoint covers all groups"
    spans = Counter(len(entry["versions"]) for entry in ledger(run) if "finished" in entry)
    assert (max(spans) > 1) == (in_flight == "keep")


PLACES = (
    "trew.training.loop:update:4", "trew.weights.files:PublishedFiles.write:5", "trew.runs.journal:Journal.put:3",
)  # fmt: skip


@pytest.mark.parametrize("place", tiers.some(PLACES, PLACES[:1]))
def test_a_killed_run_trains_on_nothing_twice_and_loses_nothing(place, fakes, model, tmp_path, server, cli):
    path, run = written(tmp_path, model), tmp_path / "runs" / "run"
    command = server.start("train", path, cwd=tmp_path, hold=place, TREW_SERVER_TOKEN="secret").held()
    command.kill(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    made = {entry["finished"] for entry in ledger(run) if "finished" in entry}
    assert made
    cli("train", path, "--resume")
    check(run)
    begun = [at for at, entry in enumerate(ledger(run)) if "begun" in entry]
    again = [e["again"] for e in ledger(run)[begun[-1] :] if "again" in e and "versions old" not in e["why"]]
    assert not made.intersection(again), "what was finished is used"


def asks_for_a_group(route: str, body: Any) -> bool:
    return "generate" in route and body["sampling_params"]["n"] == 3


@pytest.mark.nightly  # the test above with prompts drawn by their rates
def test_a_curriculum_takes_no_turn_twice_after_a_kill(fakes, model, tmp_path, server, cli):
    path, run = written(tmp_path, model), tmp_path / "runs" / "run"
    path.write_text(path.read_text() + "\n[curriculum]\nshare = 0.5\nlow = 0.0\nhigh = 1.0\n")
    command = server.start("train", path, cwd=tmp_path, hold=PLACES[0], TREW_SERVER_TOKEN="secret").held()
    command.kill(signal.SIGKILL)
    command.wait()
    cli("train", path, "--resume")
    check(run)
    turns = [entry["turn"] for entry in ledger(run) if "turn" in entry]
    assert turns == list(range(len(turns)))
    assert len(turns) < STEPS * PROMPTS, "some were drawn by their rates"
    assert max(row["curriculum/known"] for row in training_rows(run)) > 0


def test_an_interrupted_run_goes_on_where_it_was(fakes, model, tmp_path, server, cli):
    path, run = written(tmp_path, model), tmp_path / "runs" / "run"
    command = server.start("train", path, "--set", "stop.grace_s=0.2", cwd=tmp_path, TREW_SERVER_TOKEN="secret")
    wait_for(lambda: any(asks_for_a_group(*call) for fake in fakes for call in fake.calls))
    for fake in fakes:
        fake.faults.hangs = True
    command.kill(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    for fake in fakes:
        fake.faults.hangs = False
    cli("train", path, "--resume")
    check(run)


FAULTS = {
    "hangs": ({"hangs": True}, "no new token for 1 s (cluster.request_timeout_s)"),
    "half updated": ({"failing": {"/finish_weight_update": 99}}, "the server is not used until an update succeeds"),
    "lies": ({"lies": "another run's"}, 'says that it has "another run\'s"'),
    "stale": ({"stale": ("lm_head",)}, "although it says that it has the same weights"),
}
"""What begins to go wrong with a server in the middle of a run, and what the run says."""


@pytest.mark.parametrize("fault", tiers.some(FAULTS, ("hangs",)))
def test_a_server_that_goes_wrong_costs_no_group(fault, fakes, model, tmp_path, server):
    """Its groups are made again by the other; no token is older than the bound, and none is of weights it only says
    that it has."""
    faults, said = FAULTS[fault]
    fakes[0].faults.slow = 0.02  # something is in flight there
    path = written(tmp_path, model, request_timeout_s=1.0)
    command = server.start("train", path, cwd=tmp_path, TREW_SERVER_TOKEN="secret")
    wait_for(lambda: any(asks_for_a_group(*call) for call in fakes[0].calls))
    for name, value in faults.items():
        setattr(fakes[0].faults, name, value)
    assert command.wait() == 0, command.text()
    run = tmp_path / "runs" / "run"
    check(run)
    assert said in (run / "events.log").read_text()
    if fault == "hangs":
        assert any("again" in entry for entry in ledger(run))
    gaps = [row["canary_gap"] for row in training_rows(run) if row["canary_gap"] is not None]
    assert max(gaps, default=0.0) < 1e-3


@pytest.mark.nightly
def test_servers_that_die_cost_no_group(fakes, model, tmp_path, server):
    fakes[0].faults.slow = 0.05
    command = server.start("train", written(tmp_path, model), cwd=tmp_path, TREW_SERVER_TOKEN="secret")
    wait_for(lambda: any(asks_for_a_group(*call) for call in fakes[0].calls))
    fakes[0].dead = True
    assert command.wait() == 0
    run = tmp_path / "runs" / "run"
    check(run)
    assert "the server is not used any more, 1 of 2 are left" in (run / "events.log").read_text()
    assert any("again" in entry for entry in ledger(run))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("objective.correction=none",), 'correction = "tis"'),
        (("cluster.staleness=-1",), "cluster.staleness: got -1, accepts a whole number of at least 0"),
        (("cluster.colocate=true",), "cluster.staleness: got 1 with cluster.colocate = true"),
        (("rollout.stale_steps=1",), "rollout.stale_steps: got 1 with cluster.staleness = 1"),
        (("rollout.top_p=0.5",), "rollout.top_p: got 0.5"),
        (("cluster.staleness=0", "cluster.in_flight=finish"), "cluster.in_flight: got 'finish', accepts only its"),
        (("cluster.rollout=embedded", "cluster.endpoints=[]"), "cluster.staleness: got 1 with cluster.rollout = 'emb"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(changes, message, model, tmp_path, cli):
    out = cli("train", written(tmp_path, model), "--set", *changes, code=2)
    assert message in out


@pytest.mark.nightly  # as in test_replay.py, of rollouts of several versions
def test_a_replay_is_the_run_to_the_bit_in_one_process(fakes, model, tmp_path, cli):
    """Whatever versions sampled its tokens; two replays are equal in every byte but for times."""
    cli("train", written(tmp_path, model))
    run = tmp_path / "runs" / "run"
    for out in ("one", "two"):
        said = cli("train", "--replay", run, "--out", out)
        assert "nothing is generated but evaluations" in said
    names = ("final/model.safetensors", *(f"rollouts/{step:06d}.parquet" for step in range(1, STEPS + 1)))
    for name in names:
        one, two = (tmp_path / out / name for out in ("one", "two"))
        assert one.read_bytes() == two.read_bytes(), name
    assert (tmp_path / "one" / names[0]).read_bytes() == (run / names[0]).read_bytes()
    measured = [
        [{key: value for key, value in row.items() if not key.endswith(("seconds", "_second"))} for row in rows]
        for rows in (training_rows(tmp_path / "one"), training_rows(tmp_path / "two"), training_rows(run))
    ]
    assert measured[0] == measured[1]
    assert max(row["staleness"] for row in measured[2]) > 0
    for mine, its in zip(measured[0], measured[2], strict=True):
        assert {key: its[key] for key in mine if key != "health"} == {k: v for k, v in mine.items() if k != "health"}
        # Health rules read what was waited for, too.
        waits = ("waited_s", "idle_s", "passed_over")
        assert {*its} - {*mine} == {key for key in its if key.startswith("age") or key in waits}


@pytest.mark.nightly
@pytest.mark.parametrize("with_", ["a critic", "a teacher"])
def test_a_second_model_reads_completions_of_older_weights(with_, fakes, model, tmp_path, server):
    """A critic that is trained, or a teacher on a server of its own: each step has values for all completions."""
    for fake in fakes:
        fake.faults.slow = 0.1
    teacher = FakeVllm(tiny.save(tmp_path / "teacher", "qwen3"))
    with serving(teacher, tmp_path / "teacher.sock"):
        own = {
            "a critic": {"objective": {"preset": "ppo", "correction": "tis"}},
            "a teacher": {
                "objective": {"preset": "opd", "correction": "tis"},
                "teacher": {"endpoint": f"unix:{tmp_path}/teacher.sock"},
            },
        }[with_]
        path = written(tmp_path, model)
        table = tomllib.loads(path.read_text())
        path.write_text(dump_table(table | own))
        server.run("train", path, cwd=tmp_path, TREW_SERVER_TOKEN="secret")
    run = tmp_path / "runs" / "run"
    rows = training_rows(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["age_max"] for row in rows) == 1
    assert trained_on(run) == Counter(range(STEPS * PROMPTS))
    if with_ == "a critic":
        assert all(row["value_loss"] > 0 for row in rows)
        assert rows[-1]["value"] != 0.0
        return
    assert all(row["kl_teacher"] > 0 for row in rows)
    for file in sorted((run / "rollouts").glob("*.parquet")):
        for row in pq.read_table(file, columns=["token_ids", "teacher_logprobs"]).to_pylist():
            assert len(row["teacher_logprobs"]) == len(row["token_ids"])
            assert all(value < 0 for value in row["teacher_logprobs"])
