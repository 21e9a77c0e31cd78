"""MLflow's tracker against a stand-in of its server: names that it accepts, whose run is whose, and how a run ends."""

import importlib.machinery
import os
import sys
import types
from typing import Any

import pytest

from trew.runs.trackers import Trackers
from trew.runs.tracking.mlflow import Names
from trew.utils.signals import Interrupted


class Refused(Exception):
    """What the stand-in raises."""


class Store:
    """Experiments and runs of one server; refuses what MLflow refuses."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, types.SimpleNamespace] = {}
        self.fail = ""  # the method that raises
        self.uris: list[str] = []

    def client(self, tracking_uri: str) -> "Client":
        self.uris.append(tracking_uri)
        return Client(self)


class Client:
    def __init__(self, store: Store):
        self.store = store

    def _check(self, method: str) -> None:
        if self.store.fail == method:
            raise Refused(method)

    def get_experiment_by_name(self, name: str) -> types.SimpleNamespace | None:
        found = self.store.experiments.get(name)
        return found and types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        if name in self.store.experiments:
            raise Refused("RESOURCE_ALREADY_EXISTS")
        self.store.experiments[name] = f"e{len(self.store.experiments)}"
        return self.store.experiments[name]

    def create_run(self, experiment: str, *, run_name: str, tags: dict[str, str]) -> types.SimpleNamespace:
        run = types.SimpleNamespace(
            info=types.SimpleNamespace(run_id=f"r{len(self.store.runs)}", status="RUNNING", name=run_name),
            data=types.SimpleNamespace(tags=tags, metrics=[], params={}), sizes=[], experiment=experiment,
        )  # fmt: skip
        self.store.runs[run.info.run_id] = run
        return run

    def search_runs(self, experiments: list[str], *, filter_string: str) -> list[types.SimpleNamespace]:
        inode = filter_string.removeprefix("attributes.status = 'RUNNING' and tags.`trew.inode` = '").removesuffix("'")
        runs = self.store.runs.values()
        return [r for r in runs if r.info.status == "RUNNING" and r.data.tags.get("trew.inode") == inode]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self._check("log_batch")
        run = self.store.runs[run_id]
        if len(metrics) > 1000 or len(params) > 100:
            raise Refused("too many")
        run.sizes.append(len(metrics) + len(params))
        run.data.metrics += [(m.step, m.key, m.value) for m in metrics]
        for p in params:
            if p.key in run.data.params or len(p.value) > 500:
                raise Refused(p.key)
            run.data.params[p.key] = p.value

    def set_terminated(self, run_id: str, status: str) -> None:
        self.store.runs[run_id].info.status = status


@pytest.fixture
def store(monkeypatch):
    """Installs the stand-in as mlflow. It has none of the functions that act on the whole process."""
    store = Store()
    for name, attributes in {
        "mlflow": {"MlflowClient": store.client},
        "mlflow.entities": {
            "Metric": lambda key, value, timestamp, step: types.SimpleNamespace(key=key, value=value, step=step),
            "Param": lambda key, value: types.SimpleNamespace(key=key, value=value),
        },
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that what the tracker sets is taken back
        monkeypatch.delenv(name)
    return store


def begun(folder, config=None, **how):
    return Trackers(["mlflow"], folder=folder, config=config or {}, **how)


def test_it_stays_in_the_run_folder_unless_told_and_shows_a_run_of_its_name(tmp_path, store, monkeypatch):
    (tmp_path / "first").mkdir()
    t = begun(tmp_path / "first", {"long": "x" * 900, "learner": {"lr": 1e-6}})
    t.log(2, {"kl": 0.5, "loss": float("nan")})
    t.close()
    (run,) = store.runs.values()
    assert store.uris == [f"sqlite:///{tmp_path.resolve() / 'first' / 'mlflow.db'}"]
    assert (run.info.name, run.experiment, [*store.experiments]) == ("first", "e0", ["trew"])
    assert run.data.metrics == [(2, "kl", 0.5)]
    assert run.data.params == {"long": "x" * 500, "learner.lr": "1e-06"}
    assert run.info.status == "FINISHED"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example")
    begun(tmp_path / "first").close()
    assert store.uris[1:] == ["http://tracking.example"]


def test_a_server_that_cannot_be_reached_is_given_up_soon(tmp_path, store, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "90")  # what the user has set stays
    begun(tmp_path).close()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "90"


def test_runs_that_start_at_once_share_one_experiment(tmp_path, store, monkeypatch):
    """Both find none of that name; the one that comes second is refused as it makes it."""
    asked = []
    found = Client.get_experiment_by_name

    def at_first_none(self, name):
        asked.append(name)
        return None if len(asked) == 1 else found(self, name)

    store.experiments["trew"] = "e7"
    monkeypatch.setattr(Client, "get_experiment_by_name", at_first_none)
    begun(tmp_path).close()
    assert [run.experiment for run in store.runs.values()] == ["e7"]


def test_an_experiment_that_cannot_be_made_is_a_failure(tmp_path, store, monkeypatch):
    def refuse(self, name):
        raise Refused("no permission")

    monkeypatch.setattr(Client, "create_experiment", refuse)
    said = []
    begun(tmp_path, warn=said.append).close()
    (text,) = said
    assert "mlflow failed and is no longer used (Refused: no permission)" in text


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (ValueError("boom"), "FAILED"), (Interrupted("interrupted", 2), "KILLED")],
)
def test_it_shows_how_a_training_ended(tmp_path, store, error, status):
    t = begun(tmp_path)
    t.close(error)
    assert [run.info.status for run in store.runs.values()] == [status]


def test_a_tracker_that_fails_leaves_no_run_that_goes_on(tmp_path, store):
    said = []
    store.fail = "log_batch"
    t = begun(tmp_path, {"a": 1}, warn=said.append)  # while it begins: its run is there already
    t.log(1, {"reward": 1.0})
    store.fail = ""
    u = begun(tmp_path, warn=said.append)
    store.fail = "log_batch"
    u.log(1, {"reward": 1.0})
    u.close()
    assert [run.info.status for run in store.runs.values()] == ["FAILED", "FAILED"]
    assert len(said) == 2


def test_requests_stay_within_their_limits(tmp_path, store):
    t = begun(tmp_path, {f"p{i}": i for i in range(250)})
    t.log(1, {f"m/{i}": 1.0 for i in range(2100)})
    (run,) = store.runs.values()
    assert run.sizes == [100, 100, 50, 1000, 1000, 100]


def test_a_resumed_run_begins_with_the_rows_before_it_and_ends_the_one_that_was_killed(tmp_path, store):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    begun(tmp_path / "here")  # killed: never closed
    begun(tmp_path / "there")
    t = begun(tmp_path / "here")
    t.catch_up([{"step": 0, "eval_accuracy": 0.25}, {"step": 1, "reward": 1.0}, {"step": 1, "eval_accuracy": 0.5}])
    t.log(2, {"reward": 2.0})
    killed, other, new = store.runs.values()
    assert (killed.info.status, other.info.status, new.info.status) == ("KILLED", "RUNNING", "RUNNING")
    assert new.data.metrics == [
        (0, "eval_accuracy", 0.25), (1, "reward", 1.0), (1, "eval_accuracy", 0.5), (2, "reward", 2.0)
    ]  # fmt: skip


def test_a_run_of_the_same_path_on_another_host_goes_on(tmp_path, store):
    begun(tmp_path)
    (other,) = store.runs.values()
    other.data.tags["trew.inode"] = "1"
    begun(tmp_path)
    other.data.tags |= {"trew.inode": str(tmp_path.stat().st_ino), "trew.folder": "/elsewhere"}
    begun(tmp_path)
    assert other.info.status == "RUNNING"


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("reward/no_answer", "reward/no_answer"),
        ("environment/steps (%)", "environment/steps ___"),
        ("eval_accuracy/größe: a-b.c", "eval_accuracy/größe: a-b.c"),
        ("+", "_"),
        ("@", "_"),
        (".", "_"),
        ("..", "__"),
        ("//", "_"),
        ("", "_"),
        ("data//a/b/", "data/a/b"),
        ("reward/../x/./y", "reward/__/x/_/y"),
        ("..x", "__x"),
        ("/a\n", "a_"),
        ("x" * 300, "x" * 250),
        ("x" * 249 + "/yy", "x" * 249),
        ("x" * 248 + "/.yy", "x" * 248 + "/_"),
    ],
)
def test_names_are_made_such_that_mlflow_accepts_them(name, accepted):
    assert Names().of({name: 1}) == {accepted: 1}


def test_names_that_become_equal_stay_apart_from_row_to_row(tmp_path, store):
    t = begun(tmp_path, {"käse(%)": 1, "käse[%]": 2})
    t.log(1, {"a+b": 1.0, "a-b": 2.0, "a*b": 3.0, "a_b": 4.0, "x" * 251: 5.0, "x" * 252: 6.0})
    t.log(2, {"a*b": 3.0, "a+b": 1.0})
    (run,) = store.runs.values()
    assert run.data.params == {"käse___": "1", "käse____2": "2"}
    long = {f"{'x' * 250}": 5.0, f"{'x' * 240}_2": 6.0}
    first = {key: value for step, key, value in run.data.metrics if step == 1}
    assert first == {"a_b": 4.0, "a-b": 2.0, "a_b_2": 1.0, "a_b_3": 3.0} | long
    assert {key: value for step, key, value in run.data.metrics if step == 2} == {"a_b_2": 1.0, "a_b_3": 3.0}
