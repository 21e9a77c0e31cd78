"""Adapters against stand-ins of the outside packages: refused when missing, never in the way when failing."""

import contextvars
import importlib.machinery
import sys
import types
from pathlib import Path

import pytest

from trew.errors import ConfigError
from trew.runs import trackers
from trew.runs.trackers import Trackers
from trew.utils.installing import install_extra, requirements
from trew.utils.signals import Interrupted


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


def test_a_run_of_trackios_that_the_caller_has_open_goes_on(tmp_path, fake):
    """trackio keeps the active run in a context variable, and init ends the one that it finds there."""
    active = contextvars.ContextVar("active", default="")
    ended, logged = [], []

    def init(name, **kw):
        ended.append(active.get())
        active.set(name)

    log = lambda values, step: logged.append(active.get())  # noqa: E731
    fake("trackio", init=init, log=log, finish=lambda: ended.append(active.get()))
    active.set("the caller's")
    t = Trackers(["trackio"], folder=tmp_path / "ours", config={})
    t.log(1, {"reward": 1.0})
    t.close()
    assert (logged, ended, active.get()) == (["ours"], ["", "ours"], "the caller's")


def wandb_module(fake, log=lambda values: None, finish=lambda exit_code: None, **attributes):
    """A stand-in of wandb; returns what its init was given."""
    seen = {}

    def init(**kw):
        seen.update(kw)
        return types.SimpleNamespace(log=log, finish=finish, define_metric=lambda *of, **kw: None)

    fake("wandb", init=init, Settings=lambda **kw: kw, **attributes)
    return seen


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    """No login of wandb's, and a home folder of the test's own, which it returns."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_wandb_without_a_key_is_offline_and_asks_nothing(tmp_path, fake, no_key):
    seen = wandb_module(fake)
    said, told = [], []
    Trackers(["wandb"], folder=tmp_path / "a run", config={}, warn=said.append, tell=told.append)
    assert seen["mode"] == "offline"
    assert said == []
    there = tmp_path / "a run" / "wandb"
    assert told == [
        f"note: wandb: no key was found, so this run is kept offline in {there}; upload it with: wandb sync '{there}'"
    ]


def test_nothing_is_noted_where_offline_was_asked_for(tmp_path, fake, no_key, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    seen, told = wandb_module(fake), []
    Trackers(["wandb"], folder=tmp_path, config={}, tell=told.append)
    assert (seen["mode"], told) == ("offline", [])


LOGIN = "machine {} login user password canary\n"


@pytest.mark.parametrize(
    ("host", "server", "mode"),
    [
        ("api.wandb.ai", "", None),
        ("api.forge.coreweave.com", "", None),
        ("wandb.corp.example", "https://wandb.corp.example", None),
        ("localhost:8080", "http://localhost:8080", None),
        ("api.wandb.ai", "https://wandb.corp.example", "offline"),  # wandb would ask for the key of that server
    ],
)
def test_a_login_counts_by_its_server(tmp_path, fake, no_key, monkeypatch, host, server, mode):
    monkeypatch.setenv("WANDB_BASE_URL", server)
    (no_key / ".netrc").write_text(LOGIN.format(host))
    (no_key / ".netrc").chmod(0o644)  # wandb reads it all the same
    seen = wandb_module(fake)
    Trackers(["wandb"], folder=tmp_path, config={}, tell=lambda text: None)
    assert seen["mode"] == mode


def test_a_login_in_a_file_that_NETRC_names_counts(tmp_path, fake, no_key, monkeypatch):
    (tmp_path / "logins").write_text(LOGIN.format("api.wandb.ai"))
    monkeypatch.setenv("NETRC", str(tmp_path / "logins"))
    seen = wandb_module(fake)
    Trackers(["wandb"], folder=tmp_path, config={})
    assert seen["mode"] is None


@pytest.mark.parametrize(("key", "login", "mode"), [(None, "k", None), ("k", None, None), (None, None, "offline")])
def test_wandb_itself_is_asked_for_a_login(tmp_path, fake, no_key, key, login, mode):
    """Its server may be named in its own settings, and a login may be of this process alone."""
    (no_key / ".netrc").write_text(LOGIN.format("api.wandb.ai"))  # of another server than the one of its settings
    settings = types.SimpleNamespace(base_url="https://wandb.corp.example", api_key=key)
    asked = []
    fake("wandb.sdk.lib.wbauth", read_netrc_auth=lambda *, host: asked.append(host) or login)
    seen = wandb_module(fake, setup=lambda: types.SimpleNamespace(settings=settings))
    Trackers(["wandb"], folder=tmp_path, config={}, tell=lambda text: None)
    assert seen["mode"] == mode
    assert asked == ([] if key else ["https://wandb.corp.example"])


def test_an_older_wandb_names_its_server_and_netrc_is_read_here(tmp_path, fake, no_key):
    (no_key / ".netrc").write_text(LOGIN.format("wandb.corp.example"))
    settings = types.SimpleNamespace(base_url="https://wandb.corp.example", api_key=None)
    seen = wandb_module(fake, setup=lambda: types.SimpleNamespace(settings=settings))
    Trackers(["wandb"], folder=tmp_path, config={})
    assert seen["mode"] is None


@pytest.mark.parametrize(("version", "apart"), [("0.19.10", True), ("0.31.0", True), ("1.0", True), ("0.19.9", False)])
def test_a_run_of_the_callers_own_is_left_alone(tmp_path, fake, monkeypatch, version, apart):
    """An init without reinit returns the active run: rows would go into it, and the training would finish it."""
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-3f9a7")
    seen, said = wandb_module(fake, __version__=version, run=object()), []
    t = Trackers(["wandb"], folder=tmp_path, config={}, warn=said.append)
    t.log(1, {"reward": 1.0})
    t.close()
    if apart:
        assert (seen["reinit"], said) == ("create_new", [])
    else:
        assert seen == {}
        (text,) = said
        assert "another run of wandb is active in this process; finish it" in text
        assert "wandb>=0.19.10" in text


def test_wandb_gets_each_row_at_once_with_its_step(tmp_path, fake, monkeypatch):
    """With a ``step`` of wandb's own, a row would wait for the next step, and be lost if the process is killed."""
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-3f9a7")
    logged = []
    wandb_module(fake, log=logged.append)
    t = Trackers(["wandb"], folder=tmp_path, config={})
    t.log(5, {"reward": 1.0})
    t.log(5, {"eval_accuracy": 0.5})
    assert logged == [{"reward": 1.0, "step": 5}, {"eval_accuracy": 0.5, "step": 5}]


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (ValueError("boom"), 1), (Interrupted("interrupted", 15), 255), (SystemExit(0), 1)]
)
def test_wandb_shows_how_a_training_ended(tmp_path, fake, monkeypatch, error, code):
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-3f9a7")
    codes = []
    wandb_module(fake, finish=lambda exit_code: codes.append(exit_code))
    t = Trackers(["wandb"], folder=tmp_path, config={})
    t.close(error)
    t.close()
    assert codes == [code]


def test_wandb_with_a_key_is_online_and_never_sends_it(tmp_path, fake, monkeypatch):
    seen = wandb_module(fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-1f9a7")
    Trackers(["wandb"], folder=tmp_path / "r", config={"note": "key wb-canary-1f9a7"})
    assert seen["mode"] is None
    assert seen["config"] == {"note": "key [redacted]"}


def test_a_failing_tracker_costs_one_warning_and_its_neighbours_go_on(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-2f9a7")

    def broken(values):
        raise ConnectionError("no route; key wb-canary-2f9a7 refused")

    ended = []
    wandb_module(fake, log=broken, finish=lambda exit_code: ended.append(exit_code) or broken({}))
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
    assert ended == [1]  # closed once, whatever that raises: a run left open would be in the way of the next training


def test_a_tracker_that_cannot_start_is_left_out(tmp_path, fake):
    def init(**kw):
        raise SystemExit(1)

    finished = []
    fake("trackio", init=init, finish=lambda: finished.append(1))
    with pytest.warns(RuntimeWarning, match="trackio failed"):
        t = Trackers(["trackio"], folder=tmp_path, config={})
    assert finished == []  # there is no run of ours
    t.log(1, {"reward": 1.0})
    t.close()


def test_an_interrupt_is_not_a_failure_of_the_tracker(tmp_path, fake):
    def log(values, step):
        raise KeyboardInterrupt

    fake("trackio", init=lambda **kw: None, log=log, finish=lambda: None)
    t = Trackers(["trackio"], folder=tmp_path, config={})
    with pytest.raises(KeyboardInterrupt):
        t.log(1, {"reward": 1.0})


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


@pytest.mark.parametrize(("there", "steps"), [(True, [3]), (False, [1, 2, 3])])
def test_tensorboard_gets_earlier_rows_only_where_its_files_are_missing(tmp_path, fake, there, steps):
    calls = []
    writer = types.SimpleNamespace(
        add_text=lambda *of: None, add_scalar=lambda *of: calls.append(of), flush=lambda: None, close=lambda: None
    )
    fake("tensorboard")
    fake("torch.utils.tensorboard", SummaryWriter=lambda folder, *, purge_step: writer)
    if there:
        (tmp_path / "tensorboard").mkdir()
    t = Trackers(["tensorboard"], folder=tmp_path, config={})
    t.catch_up([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}])
    t.log(3, {"reward": 0.5})
    assert [step for _, _, step in calls] == steps


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_new_run_begins_with_the_rows_from_before_a_resume(tmp_path, fake, monkeypatch, name):
    monkeypatch.setenv("WANDB_API_KEY", "wb-canary-3f9a7")
    logged = []
    wandb_module(fake, log=lambda values: logged.append((values.pop("step"), values)))
    log = lambda values, step: logged.append((step, values))  # noqa: E731
    fake("trackio", init=lambda **kw: None, log=log, finish=lambda: None)
    t = Trackers([name], folder=tmp_path, config={})
    t.catch_up([])
    t.catch_up([{"step": 0, "eval_accuracy": 0.1}, {"step": 1, "reward": 1, "loss": float("nan"), "health": ["x"]}])
    t.log(2, {"reward": 2.0})
    assert logged == [(0, {"eval_accuracy": 0.1}), (1, {"reward": 1.0}), (2, {"reward": 2.0})]


@pytest.mark.parametrize(("count", "told"), [(499, []), (500, ["note: the 500 rows so far go to trackio first"])])
def test_a_long_run_says_why_it_goes_on_late(tmp_path, fake, count, told):
    fake("trackio", init=lambda **kw: None, log=lambda values, step: None)
    said = []
    t = Trackers(["trackio"], folder=tmp_path, config={}, tell=said.append)
    t.catch_up([{"step": step, "reward": 1.0} for step in range(count)])
    assert said == told


def test_an_older_package_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    versions = {"mlflow": "1.27.0", "wandb": "99.0", "tensorboard": "2.16.0rc1"}
    monkeypatch.setattr(trackers, "_installed", lambda package: versions.get(package, ""))
    (line,) = trackers.problems(["mlflow", "wandb", "tensorboard", "trackio"])
    (floor,) = requirements()["mlflow"]
    assert line == (f"track.to: got 'mlflow', whose package is 1.27.0 here, accepts {floor}: {install_extra('mlflow')}")


def test_a_run_is_named_by_its_folder_however_that_is_given(tmp_path, fake, monkeypatch):
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    names = []
    fake("trackio", init=lambda **kw: names.append(kw["name"]), finish=lambda: None)
    for folder in (Path("."), Path("../second"), Path("all/round-02/policy"), Path("all/round-2x/policy")):
        Trackers(["trackio"], folder=folder, config={}).close()
    assert names == ["first", "second", "all/round-02/policy", "policy"]


def test_tensorboard_writes_scalars_when_it_is_there(tmp_path):
    pytest.importorskip("tensorboard")
    t = Trackers(["tensorboard"], folder=tmp_path, config={"model": "m"})
    t.log(1, {"reward": 0.5})
    t.close()
    assert list((tmp_path / "tensorboard").iterdir())
