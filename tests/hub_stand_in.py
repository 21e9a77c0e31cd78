"""A stand-in for the Hugging Face hub over HTTP: what huggingface_hub asks for when it uploads a model."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_4f1c9a77e0b2d3558c61"


class Hub:
    """Use as a context: ``url`` is its address; ``repos`` holds each model's visibility and files after a commit."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.fails = ""  # requests whose path contains this are answered with 507

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            return 200, {"name": "ada", "type": "user", "orgs": [], "auth": {"type": "access_token"}}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.repos.setdefault(name, {"private": private, "files": {}})
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if parts[:2] == ["api", "models"]:
            return self._model("/".join(parts[2:4]), parts[4:], body)
        return 404, {"error": "not found"}

    def _model(self, name: str, rest: list[str], body: bytes) -> tuple[int, Any]:
        if name not in self.repos:
            return 404, {"error": "Repository not found"}
        repo = self.repos[name]
        if not rest or rest[0] == "revision":
            return 200, {"id": name, "private": repo["private"], "sha": "0" * 40, "siblings": [], "tags": []}
        if rest[0] == "preupload":
            # Large files would go into content-addressed storage (Xet), which this is not: all are small.
            paths = [f["path"] for f in json.loads(body)["files"]]
            return 200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
        if rest[0] == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    repo["files"][value["path"]] = base64.b64decode(value["content"])
            return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/{name}/commit/1"}
        return 404, {"error": "not found"}


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def _any(self) -> None:
        path, body = self.path.partition("?")[0], self._body()
        self.owner.asked.append(f"{self.command} {path}")
        if self.owner.fails and self.owner.fails in path:
            status, found = 507, {"error": "no room"}
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, found = 401, {"error": "Invalid username or password."}
        else:
            status, found = self.owner.answer(self.command, path, body)
        data = json.dumps(found).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_HEAD = _any

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def log_message(self, format: str, *args: object) -> None:
        pass
