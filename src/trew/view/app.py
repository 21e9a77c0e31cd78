"""The routes of the server. Every answer is JSON; every request is answered from run folders, read now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..errors import TrewError
from .answers import NotHere, answer, failed
from .guard import Access, Guard
from .library import Library
from .metrics import metrics
from .page_files import page_file
from .parameters import Parameters
from .viewed import ViewedRun

Answer = Callable[[Library, Parameters], Any]
OfRun = Callable[[ViewedRun, Parameters], Any]


def application(library: Library, access: Access, *, page: Path | None = None) -> Guard:
    """The server's ASGI application. ``page``: the folder of the built page, by default the one of this package."""

    def route(path: str, found: Answer) -> Route:
        def endpoint(request: Request) -> Response:  # not async: Starlette runs it in a thread
            try:
                return answer(found(library, Parameters(request.query_params, request.path_params)))
            except TrewError as error:
                return failed(error)

        return Route(path, endpoint, methods=["GET"])

    def of_run(path: str, found: OfRun) -> Route:
        return route(f"/api/runs/{{id}}{path}", lambda library, p: found(library.run(p.path["id"]), p))

    def file(request: Request) -> Response:
        return page_file(request.url.path, page)

    routes = [
        route("/api/runs", _runs),
        of_run("/metrics", lambda run, p: metrics(run, since=p.whole("since", -1), only=p.names("columns"))),
        Route("/{path:path}", file, methods=["GET"]),
    ]
    handlers = {HTTPException: _no_route, Exception: _broken}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), access)


def _runs(library: Library, parameters: Parameters) -> dict[str, Any]:
    return {"version": __version__, "runs": [run.about() for run in library.runs()]}


def _no_route(request: Request, error: Exception) -> Response:
    return failed(NotHere(f"{request.url.path[:200]}: there is nothing at this address"))


def _broken(request: Request, error: Exception) -> Response:
    """A fault of ours; the terminal has its traceback, the page its name."""
    message = f"{request.url.path[:200]}: {type(error).__name__}: {error}; this is a fault of trew view"
    return answer({"error": {"message": message}}, 500)
