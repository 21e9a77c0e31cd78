"""The handshake: a server that does not fit a run is refused with what it has and what is needed."""

import copy
import dataclasses
import http.server
import json
import socketserver
import threading
import types
from pathlib import Path

import pytest

import tiny
from trew.config import Config
from trew.config.schema import EnvironmentConfig, RolloutConfig
from trew.errors import ConfigError
from trew.rollout.vllm import handshake as h
from trew.rollout.vllm.client import ServerGone
from trew.rollout.vllm.endpoint import Endpoint
from trew.rollout.vllm.environment import FORMAT
from trew.training.episodes import EpisodePlan
from trew.training.planning import most_tokens

EXPECTED = h.Expected(dtype="float32", vocabulary=tiny.VOCAB, length=140)


class Says(socketserver.ThreadingUnixStreamServer):
    """Answers each route with the JSON of a table, and a POST with ``refuses`` where that is set."""

    daemon_threads = True

    def __init__(self, path: Path, model: Path) -> None:
        settings = {**h.SETTINGS, "model": str(model), "dtype": "torch.float32", "max_model_len": 512}
        config = {"model_config": settings, "weight_transfer_config": {"backend": "trew_files"}}
        self.answers = {
            "/version": {"version": "0.32.0"},
            "/openapi.json": {"paths": {route: {} for route in h.ROUTES}},
            "/server_info": {"vllm_config": config},
        }
        self.settings, self.config, self.refuses, self.asked = settings, config, "", []
        super().__init__(str(path), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Says

    def answer(self, status: int, found: object) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.answer(200, copy.deepcopy(self.server.answers[self.path.partition("?")[0]]))

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        refuses = self.server.refuses
        self.answer(500 if refuses else 200, {"error": {"message": refuses}})

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def address_string(self) -> str:
        return "unix"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def server(tmp_path, model):
    with Says(tmp_path / "s", model) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def problems(tmp_path, expected=EXPECTED):
    try:
        h.check(Endpoint("http://localhost", tmp_path / "s"), expected, root=tmp_path)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_a_server_that_fits_is_accepted_and_shown_a_folder_that_nobody_can_guess(server, tmp_path):
    assert problems(tmp_path) == []
    assert problems(tmp_path) == []
    one, other = (Path(asked["init_info"].pop("root")) for asked in server.asked)
    assert server.asked == [{"init_info": {"format": FORMAT}}] * 2
    assert one.parent == other.parent == tmp_path
    assert one != other
    assert not one.exists()


def test_a_server_that_does_not_see_the_runs_folder_is_refused(server, tmp_path):
    """In the words of trew-vllm's own check."""
    server.refuses = "Refused: root: got '...', accepts the absolute path of a folder on this host"
    (problem,) = problems(tmp_path)
    assert f"does not see the folder {tmp_path}, and weights reach it as files; put the run (out) on a file" in problem
    said = (Path(h.__file__).parent / "plugin" / "trew_vllm" / "engine.py").read_text()
    assert "accepts the absolute path of a folder on this host" in said


def test_what_a_version_does_not_tell_is_not_judged(server, tmp_path):
    server.settings.clear()
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("dtype", "torch.bfloat16", "computes in bfloat16, the learner in float32; start it with --dtype float32"),
        ("max_model_len", 100, "has max_model_len = 100, prompts and completions take up to 140 tokens"),
        ("logprobs_mode", "raw_logprobs", "has logprobs_mode = 'raw_logprobs', needs 'processed_logprobs'"),
        ("generation_config", "auto", "has generation_config = 'auto', needs 'vllm'"),
    ],
)
def test_a_setting_that_does_not_fit_is_named_with_both_values(server, tmp_path, key, value, says):
    server.settings[key] = value
    (problem,) = problems(tmp_path)
    assert says in problem
    assert problem.startswith(f"server unix:{tmp_path}/s: ")


@pytest.mark.parametrize(
    ("plays", "started", "says"),
    [
        (False, False, "start it with --max-model-len 140, or lower data.max_prompt_tokens, rollout.max_tokens or"),
        (True, False, "episodes take up to 140 tokens; start it with --max-model-len 140, or set environment.episode_"),
        (True, True, "raise data.max_prompt_tokens by 40, or set environment.episode_tokens to at most 100"),
    ],
)
def test_a_server_that_is_too_short_is_told_with_the_keys_that_decide_there(server, tmp_path, plays, started, says):
    server.settings["max_model_len"] = 100
    (problem,) = problems(tmp_path, dataclasses.replace(EXPECTED, plays=plays, started=started))
    assert says in problem
    assert ("environment." in problem) is plays


def test_a_server_behind_trew_serve_is_told_with_what_that_takes(server, tmp_path):
    """It has no option of vLLM's, and refuses these keys of cluster.server_args."""
    server.settings |= {"max_model_len": 100, "dtype": "torch.bfloat16"}
    found = problems(tmp_path, dataclasses.replace(EXPECTED, served=True, backend="trew_memory"))
    backend, dtype, length = found
    assert "needs 'trew_memory'; start trew serve again, of this version of trew and with the run's recipe" in backend
    assert "start trew serve with --set learner.dtype=float32" in dtype
    assert "start trew serve with the run's recipe, or with data.max_prompt_tokens raised by 40 in its own" in length
    assert not any("--max-model-len" in problem or "--dtype" in problem for problem in found)


def test_a_server_that_asks_the_canary_last_is_refused_where_completions_wait_meanwhile(server, tmp_path):
    server.config["scheduler_config"] = {"policy": "fcfs"}
    assert problems(tmp_path) == []
    (problem,) = problems(tmp_path, dataclasses.replace(EXPECTED, keeps=True))
    assert "has the scheduling policy 'fcfs', needs 'priority' in an asynchronous run" in problem
    assert "--scheduling-policy priority" in problem
    server.config["scheduler_config"] = {"policy": "priority"}
    assert problems(tmp_path, dataclasses.replace(EXPECTED, keeps=True)) == []


def test_episodes_end_at_the_models_positions_so_that_no_server_needs_more():
    config = Config(model="m", rollout=RolloutConfig(max_tokens=50))
    episodes = EpisodePlan(EnvironmentConfig(turns=10, episode_tokens=0), None, None, opening=20, around=8)
    made = types.SimpleNamespace(config=config, longest=20, episodes=episodes)
    assert most_tokens(made) > 500
    assert most_tokens(made, positions=128) == 128


def test_another_model_is_refused_by_its_vocabulary(server, tmp_path):
    tiny.model(vocab_size=300).save_pretrained(tmp_path / "other")
    server.settings["model"] = str(tmp_path / "other")
    (problem,) = problems(tmp_path)
    assert f"with a vocabulary of 300, the run's model has {tiny.VOCAB}" in problem


def test_all_problems_are_told_together(server, tmp_path):
    server.answers["/version"]["version"] = "0.29.1"
    server.config["weight_transfer_config"] = None
    server.settings["dtype"] = "torch.float16"
    server.refuses = "trew-vllm: the trainer publishes format 1, this server reads format 2"
    version, backend, dtype, weights = problems(tmp_path)
    assert "has vLLM 0.29.1, accepts 0.30, 0.31, 0.32 and 0.33" in version
    assert "has the weight transfer backend None, needs 'trew_files'" in backend
    assert "float16" in dtype
    assert "the trainer publishes format 1, this server reads format 2" in weights


def test_missing_routes_are_named_and_not_asked(server, tmp_path):
    for route in ("/server_info", "/init_weight_transfer_engine", "/pause"):
        del server.answers["/openapi.json"]["paths"][route]
    (problem,) = problems(tmp_path)
    assert "has no route /pause, /init_weight_transfer_engine, /server_info; start it with VLLM_SERVER_DEV" in problem
    assert server.asked == []


def test_a_server_that_takes_turns_needs_more_routes(server, tmp_path):
    sleeping, endpoint = dataclasses.replace(EXPECTED, sleeps=True), Endpoint("http://localhost", tmp_path / "s")
    with pytest.raises(ConfigError, match="has no route /sleep, /wake_up, /is_sleeping; start it"):
        h.check(endpoint, sleeping, root=tmp_path)
    server.answers["/openapi.json"]["paths"] |= {route: {} for route in h.SLEEP_ROUTES}
    h.check(endpoint, sleeping, root=tmp_path)


def test_a_server_that_is_not_there_is_gone(tmp_path):
    with pytest.raises(ServerGone, match="handshake"):
        h.check(Endpoint("http://localhost", tmp_path / "nobody"), EXPECTED, root=tmp_path)
