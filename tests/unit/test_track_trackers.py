"""Adapters against stand-ins of the outside packages: refused when missing, never in the way when failing."""

import importlib.machinery
import sys
import types

import pytest

from trew.errors import ConfigError
from trew.runs import trackers
from trew.runs.trackers import Trackers
from trew.utils.installing import install_extra


@pytest.fixture
def fake(monkeypatch):
    """Installs a module with the given attributes under a name."""

    def install(name, **attributes):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert trackers.problems(["wandb", "mlflwo"]) == [
        f"track.to: got 'wandb', whose package is not installed: {install_extra('wandb')}",
        "track.to: got 'mlflwo', accepts trackio, wandb, tensorboard, mlflow (did you mean 'mlflow'?)",
    ]
    with pytest.raises(ConfigError, match=r"install .*trackio"):
        Trackers(["trackio"], folder=None, config={})


def test_trackio_gets_numbers_under_their_step(tmp_path, fake):
    calls = []
    fake(
        "trackio",
        init=lambda **kw: calls.append(("init", kw["name"], kw["config"])),
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finish"),
    )
    t = Trackers(["trackio"], folder=tmp_path / "r", config={"learner": {"lr": 1e-6}, "model": "m"})
    t.log(3, {"step": 3, "reward": 1, "loss": float("nan"), "note": "text", "done": True})
    t.close()
    assert calls == [("init", "r", {"learner.lr": 1e-6, "model": "m"}), (3, {"reward": 1.0}), "finish"]


def wandb_module(fake, log=lambda values, step: None):
    seen = {}

    def init(**kw):
        seen.update(kw)
        return types.SimpleNamespace(log=log, finish=lambda: None)

    fake("wandb", init=init, Settings=lambda **kw: kw)
    return seen


def test_wandb_without_a_key_is_offline_and_asks_nothing(tmp_path, fake, monkeypatch):
    seen = wandb_module(fake)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    Trackers(["wandb"], folder=tmp_path / "r", config={})
    assert seen["mode"] == "offline"


def test_wandb_with_a_key_is_online_and_never_sends_it(tmp_path, fake, monkeypatch):
    seen = wandb_module(fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-1f9a7")
    Trackers(["wandb"], folder=tmp_path / "r", config={"note": "key wb-canary-1f9a7"})
    assert seen["mode"] == "online"
    assert seen["config"] == {"note": "key [redacted]"}


def test_a_failing_tracker_costs_one_warning_and_its_neighbours_go_on(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-2f9a7")

    def broken(values, step):
        raise ConnectionError("no route; key wb-canary-2f9a7 refused")

    wandb_module(fake, log=broken)
    seen = []
    fake("trackio", init=lambda **kw: None, log=lambda values, step: seen.append(step), finish=lambda: None)
    said = []
    t = Trackers(["wandb", "trackio"], folder=tmp_path, config={}, warn=said.append)
    for step in range(3):
        t.log(step, {"reward": 0.5})
    t.close()
    assert seen == [0, 1, 2]
    (text,) = said
    assert "wandb failed and is no longer used" in text
    assert "canary" not in text


def test_a_tracker_that_cannot_start_is_left_out(tmp_path, fake):
    def init(**kw):
        raise SystemExit(1)

    fake("trackio", init=init)
    with pytest.warns(RuntimeWarning, match="trackio failed"):
        t = Trackers(["trackio"], folder=tmp_path, config={})
    t.log(1, {"reward": 1.0})
    t.close()


def test_an_interrupt_is_not_a_failure_of_the_tracker(tmp_path, fake):
    def log(values, step):
        raise KeyboardInterrupt

    fake("trackio", init=lambda **kw: None, log=log, finish=lambda: None)
    t = Trackers(["trackio"], folder=tmp_path, config={})
    with pytest.raises(KeyboardInterrupt):
        t.log(1, {"reward": 1.0})


def test_mlflow_stays_in_the_run_folder_unless_told(tmp_path, fake, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    calls = {}
    fake(
        "mlflow",
        set_tracking_uri=lambda uri: calls.update(uri=uri),
        set_experiment=lambda name: calls.update(experiment=name),
        start_run=lambda run_name: calls.update(run=run_name),
        log_params=lambda p: calls.update(params=p),
        log_metrics=lambda values, step: calls.update(metrics=(step, values)),
        end_run=lambda: calls.update(ended=True),
    )
    t = Trackers(["mlflow"], folder=tmp_path, config={"long": "x" * 900})
    t.log(2, {"kl": 0.5})
    t.close()
    assert calls["uri"].startswith("sqlite:///")
    assert str(tmp_path) in calls["uri"]
    assert calls["metrics"] == (2, {"kl": 0.5})
    assert len(calls["params"]["long"]) == 500
    assert calls["ended"]


@pytest.mark.parametrize(
    ("first", "kept"), [({"reward": 0.5}, 7), ({"eval_accuracy": 0.5}, 8), ({"eval_n": 9, "eval_accuracy": None}, 8)]
)
def test_tensorboard_forgets_the_steps_that_a_resumed_run_repeats(tmp_path, fake, first, kept):
    """It would show them twice; an evaluation that is repeated leaves the row of its step."""
    calls = []
    writer = types.SimpleNamespace(
        add_text=lambda *of: None, add_scalar=lambda *of: calls.append(of), flush=lambda: None, close=lambda: None
    )
    fake("tensorboard")
    fake("torch.utils.tensorboard", SummaryWriter=lambda folder, *, purge_step: calls.append(purge_step) or writer)
    t = Trackers(["tensorboard"], folder=tmp_path, config={})
    t.log(7, first)
    t.log(8, {"reward": 1.0})
    t.close()
    assert [calls[0], calls[-1]] == [kept, ("reward", 1.0, 8)]
    assert len([call for call in calls if isinstance(call, int)]) == 1


def test_tensorboard_writes_scalars_when_it_is_there(tmp_path):
    pytest.importorskip("tensorboard")
    t = Trackers(["tensorboard"], folder=tmp_path, config={"model": "m"})
    t.log(1, {"reward": 0.5})
    t.close()
    assert list((tmp_path / "tensorboard").iterdir())
