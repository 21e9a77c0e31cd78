"""`trew view` as a real process: its addresses, what it refuses, and a run that trains while it is watched."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys

import httpx2
import pytest

import trew
from forks import wait_for
from recipe_help import recipe, run_folder
from view_help import make_run


def connect(command):
    """The address that the command printed, and a client that has its token."""
    command.says("Ctrl-C ends it")
    url = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", command.text())[0]
    address, _, token = url.partition("/?token=")
    return url, httpx2.Client(base_url=address, headers={"Authorization": f"Bearer {token}"}, trust_env=False)


def test_a_run_is_watched_while_it_trains(server, tmp_path):
    """Rows and completions appear one after another; afterwards the run is finished and its tokens have texts."""
    run_folder(tmp_path, recipe("lm", steps=4, chat_template="plain", eval={"every": 2}))
    training = server.start("train", "r.toml", "--out", "runs/x", cwd=tmp_path, hold="trew.runs.folder:RunFolder.log:3")
    training.held()  # the evaluation before training and step 1 have rows, step 2 only its completions
    view = server.start("view", "--port", "0", cwd=tmp_path)
    url, page = connect(view)
    run = page.get("/api/runs").json()["runs"][0]
    assert (run["id"], run["state"], run["step"], run["steps"]) == ("x", "running", 1, 4)
    metrics = page.get("/api/runs/x/metrics").json()
    assert metrics["steps"] == [1]
    assert page.get("/api/runs/x/rollouts?eval=0").json()["total"] == 24  # 4 prompts, 3 completions each
    training.go()
    assert training.wait() == 0, training.text()
    run = page.get("/api/runs").json()["runs"][0]
    assert (run["state"], run["step"]) == ("finished", 4)
    assert run["revision"] != metrics["revision"]
    assert page.get("/api/runs/x/metrics?since=1").json()["steps"] == [2, 3, 4]
    assert page.get("/api/runs/x/rollouts?eval=0").json()["total"] == 48
    found = page.get("/api/runs/x/completion?step=4&group=1&sample=2").json()
    assert len(found["tokens"]) == len(found["values"]["logprob"]) == 6
    assert found["pieces"]["why"] == ""
    recorded = {"advantage", "entropy", "logprob", "sampling_logprob", "ratio", "weight", "coefficient"}
    assert recorded | {"sampler_gap"} <= set(found["values"])
    assert (
        page.get("/api/runs/x/completion?eval=1&step=4&group=1&sample=0").json()["values"].keys()
        < found["values"].keys()
    )
    assert page.get("/", headers={"Authorization": ""}).status_code == 401
    cookie = httpx2.get(url, trust_env=False).headers["set-cookie"].partition(";")[0]
    assert page.get("/", headers={"Authorization": "", "Cookie": cookie}).status_code == 200
    view.kill(signal.SIGINT)
    assert view.wait() == 130
    assert "Traceback" not in view.text()


def test_several_folders_ssh_and_a_taken_port(server, tmp_path):
    make_run(tmp_path / "one")
    make_run(tmp_path / "more" / "two")
    ssh = {"SSH_CONNECTION": "10.0.0.9 51000 10.0.0.2 22", "USER": "kim"}
    first = server.start("view", "one", "more", "--port", "0", cwd=tmp_path, **ssh)
    url, page = connect(first)
    port = int(re.search(r":(\d+)/", url)[1])
    assert f"ssh -N -L {port}:127.0.0.1:{port} -p 22 kim@10.0.0.2" in first.text()
    assert [run["name"] for run in page.get("/api/runs").json()["runs"]] == ["one", "two"]
    said = server.run("view", "one", "--port", port, cwd=tmp_path, code=2)
    assert f"cannot use 127.0.0.1 port {port}" in said
    with socket.socket() as other:  # on another interface nobody listens
        other.settimeout(5)
        assert other.connect_ex(("127.0.0.2", port)) != 0
    make_run(tmp_path / "more" / "three")
    assert len(page.get("/api/runs").json()["runs"]) == 3
    first.kill(signal.SIGTERM)
    assert first.wait() == 143


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "runs: no such folder; give a run folder of trew train, or one that contains runs"),
        (("lm",), "lm: no run is there; give a run folder of trew train, or a folder that contains runs"),
        (("lm", "--port", "99999"), "--port: got 99999, accepts 0 (any free one) to 65535"),
    ],
)
def test_what_cannot_be_shown_is_said(server, tmp_path, args, message):
    (tmp_path / "lm").mkdir()
    if "--port" in args:
        make_run(tmp_path / "lm" / "x")
    assert message in server.run("view", *args, cwd=tmp_path, code=2)


def test_without_its_packages_the_command_that_installs_them_is_named(tmp_path):
    make_run(tmp_path / "x")
    code = "import sys; sys.modules['starlette'] = None; from trew.cli.main import main; main(['view', 'x'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "trew view needs the package starlette, which is not installed: " in done.stderr
    assert "pip install 'starlette>=1.0' 'uvicorn>=0.40'" in done.stderr


def test_nothing_heavy_is_imported_to_answer(tmp_path):
    make_run(tmp_path / "x")
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from pathlib import Path; from view_help import client, get\n"
        "page = client(Path('x'))\n"
        "for path in ('metrics', 'summary', 'steps', 'rollouts?text=a', 'completion?step=1&group=0&sample=0'):\n"
        "    get(page, f'runs/x/{path}')\n"
        "print({'torch', 'transformers', 'scipy'} & set(sys.modules))"
    )
    paths = [path for path in sys.path if path.endswith(("tests", "src"))]
    done = subprocess.run([sys.executable, "-c", code, *paths], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_notebook_shows_the_page_in_a_frame(tmp_path):
    make_run(tmp_path / "x")
    viewer = trew.view(tmp_path / "x", height=500)
    assert viewer._repr_html_() == (
        f'<iframe src="{viewer.url}" width="100%" height="500" style="border: 0"></iframe>'
    )  # fmt: skip
    address, _, token = viewer.url.partition("/?token=")
    found = httpx2.get(viewer.url, trust_env=False)
    assert (found.status_code, found.headers["content-security-policy"][-17:]) == (200, "frame-ancestors *")
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx2.get(f"{address}/api/runs", headers=headers, trust_env=False).json()["runs"][0]["id"] == "x"
    viewer.close()
    assert viewer._repr_html_() == "<p>closed</p>"
    wait_for(lambda: _closed(viewer.port))
    with pytest.raises(ValueError, match="height: got 5, accepts 100 to 10000"):
        trew.view(tmp_path / "x", height=5)


def _closed(port):
    with socket.socket() as other:
        return other.connect_ex(("127.0.0.1", port)) != 0
