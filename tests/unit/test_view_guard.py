"""Who is let in by `trew view`: token, cookie, Host header, and the headers of every answer."""

from __future__ import annotations

import socket

import pytest
from starlette.testclient import TestClient

from trew.errors import ConfigError
from trew.utils import listening
from trew.view import serving
from trew.view.app import application
from trew.view.guard import Access
from trew.view.library import Library
from trew.view.store import Store
from view_help import PORT, TOKEN, make_run

HOME = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("guarded") / "x", steps=1)


def stranger(folder, base=HOME, **access):
    app = application(Library([folder]), Access(TOKEN, PORT, **access), Store())
    return TestClient(app, base_url=base, follow_redirects=False)


@pytest.mark.parametrize("path", ["/", "/index.html", "/api/runs", "/api/runs/x/metrics", "/api/none", "/api"])
@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer "},
        {"Cookie": f"trew-view-{PORT}=wrong"}, {"Cookie": f"trew-view-1={TOKEN}"}, {"Cookie": f"trew-view-{PORT}="},
        {"Cookie": b"\x80=;;"}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Bearer {TOKEN[:-1]}"},
    ],
)  # fmt: skip
def test_nothing_is_said_without_the_token(folder, path, headers):
    found = stranger(folder).get(path, headers=headers)
    assert found.status_code == 401
    assert "grpo" not in found.text
    assert "token" in found.text


def test_two_tokens_are_none(folder):
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {TOKEN}")]
    assert stranger(folder).get("/api/runs", headers=headers).status_code == 401
    assert stranger(folder).get(f"/?token={TOKEN}&token={TOKEN}").status_code == 401


@pytest.mark.parametrize("other", ['theme={"dark":true}', "name=Jane Doe (x)", "a b=1", "=", "ü=1", '"', "x", "p=a=b"])
def test_cookies_of_other_programs_on_this_machine_do_not_lock_out(folder, other):
    # Browsers send the cookies of a host to all of its ports, and other programs' may be no cookies by the standard.
    own = f"trew-view-{PORT}={TOKEN}"
    for cookie in (f"{other}; {own}", f"{own}; {other}", f"{other};{own};{other}"):
        found = stranger(folder).get("/api/runs", headers={"Cookie": cookie.encode()})
        assert found.status_code == 200, cookie


@pytest.mark.parametrize("port", [80, PORT])
def test_the_usual_port_is_left_out_by_browsers(folder, port):
    app = application(Library([folder]), Access(TOKEN, port), Store())
    page = TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {TOKEN}"})
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert page.get("/api/runs", headers={"Host": host}).status_code == (200 if port == 80 else 403)
    assert page.get("/api/runs", headers={"Host": "evil.example"}).status_code == 403


def test_the_address_with_the_token_sets_a_cookie_that_opens_everything(folder):
    page = stranger(folder)
    found = page.get(f"/?token={TOKEN}")
    assert (found.status_code, found.headers["location"]) == (303, "/")
    cookie = found.headers["set-cookie"]
    assert cookie == f"trew-view-{PORT}={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    assert TOKEN not in found.headers["location"]
    assert page.get("/").status_code == page.get("/api/runs").status_code == 200
    assert stranger(folder).get("/?token=wrong").status_code == 401
    assert stranger(folder).get(f"/api/runs?token={TOKEN}").status_code == 401  # addresses are logged: the first only


@pytest.mark.parametrize("host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"LOCALHOST:{PORT}", f"[::1]:{PORT}"])
def test_this_machines_names_are_known(folder, host):
    headers = {"Host": host, "Authorization": f"Bearer {TOKEN}"}
    assert stranger(folder).get("/api/runs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{PORT}",
             "", f"localhost:{PORT}@evil.example", f"evil#localhost:{PORT}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/runs", "/app.js", f"/?token={TOKEN}"])
def test_other_names_are_refused_even_with_the_token(folder, host, path):
    found = stranger(folder).get(path, headers={"Host": host, "Authorization": f"Bearer {TOKEN}"})
    assert found.status_code == 403
    assert "set-cookie" not in found.headers


def test_a_host_that_was_allowed_is_known(folder):
    headers = {"Host": "lab.example:9000", "Authorization": f"Bearer {TOKEN}"}
    page = stranger(folder, hosts=frozenset({"lab.example:9000"}))
    assert page.get("/api/runs", headers=headers).status_code == 200
    assert stranger(folder).get("/api/runs", headers=headers).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(folder, method):
    found = stranger(folder).request(method, "/api/runs", headers={"Authorization": f"Bearer {TOKEN}"})
    assert found.status_code == 405


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_of_other_pages_are_refused(folder, site):
    headers = {"Cookie": f"trew-view-{PORT}={TOKEN}", "Sec-Fetch-Site": site}
    assert stranger(folder).get("/api/runs", headers=headers).status_code == 403
    assert stranger(folder).get("/api/runs", headers={**headers, "Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/app.js", "/nothing", "/api/runs/x/metrics?since=x"])
@pytest.mark.parametrize("token", [TOKEN, "wrong"])
def test_every_answer_has_the_headers_that_keep_text_text(folder, path, token):
    found = stranger(folder).get(path, headers={"Authorization": f"Bearer {token}"}).headers
    rules = dict(part.strip().partition(" ")[::2] for part in found["content-security-policy"].split(";"))
    assert rules == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self' data:",
        "connect-src": "'self'", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'self'",
    }  # fmt: skip
    assert found["x-content-type-options"] == "nosniff"
    assert found["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in found
    if path.startswith("/api") or path == "/":
        assert found["cache-control"] == "no-store"


def test_a_notebooks_frame_is_opened_by_its_address_alone(folder):
    page = stranger(folder, framed=True)
    found = page.get(f"/?token={TOKEN}")
    assert found.status_code == 200
    assert found.headers["content-security-policy"].endswith("frame-ancestors *")
    assert "set-cookie" not in found.headers
    assert page.get("/").status_code == page.get("/?token=wrong").status_code == 401
    assert page.get(f"/api/runs?token={TOKEN}").status_code == 401


@pytest.mark.parametrize(
    "path", ["/../app.py", "/..%2fapp.py", "/%2e%2e/app.py", "/page/../../app.py", "/.", "//etc/passwd", "/app.js/",
             "/app.py", "/%00", "/assets/../../viewed.py"],
)  # fmt: skip
def test_only_the_files_of_the_page_are_served(folder, path):
    found = stranger(folder).get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert found.status_code == 404 or found.url.path == "/"
    assert "import" not in found.text[:200]


def test_the_page_itself_is_served(folder):
    found = stranger(folder).get("/", headers={"Authorization": f"Bearer {TOKEN}"})
    assert found.status_code == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"


def test_the_line_for_ssh_names_the_machine(monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 51000 10.0.0.2 2222")
    monkeypatch.setenv("USER", "kim")
    assert serving.tunnel(8411) == "ssh -N -L 8411:127.0.0.1:8411 -p 2222 kim@10.0.0.2"
    monkeypatch.delenv("SSH_CONNECTION")
    assert serving.tunnel(8411) == ""


def test_small_answers_are_sent_at_once():
    """asyncio turns Nagle's algorithm off only for sockets that say that they are TCP; else each answer takes 40 ms."""
    with listening.sockets_for("127.0.0.1", 0, encrypted=False)[0] as bound:
        assert bound.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("host", ["", "http://localhost:9000", "localhost:9000/", "you@host:1", " host:1"])
def test_a_host_that_no_browser_sends_is_refused(folder, host):
    # Without a check it allowed nothing, and "" requests without a Host header.
    with (
        pytest.raises(ConfigError, match=r"allow_host: got .* accepts HOST:PORT"),
        serving.serving([folder], port=0, hosts=("ok:1", host)),
    ):
        pass
