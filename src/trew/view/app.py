"""The routes of the server. Every answer is JSON; every request is answered from run folders, read now."""

from __future__ import annotations

import traceback
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
from .answers import BadRequest, NotHere, answer, failed
from .comparing import Comparisons
from .completion import completion
from .groups import groups
from .guard import Access, Guard
from .library import Library
from .metrics import metrics
from .page_files import page_file
from .parameters import Parameters
from .pieces import Tokenizers
from .prompts import prompt, prompts
from .rollouts import rollouts
from .settings import compared, config
from .steps import steps
from .store import Store
from .summary import summary
from .viewed import ViewedRun

Answer = Callable[[Library, Parameters], Any]
OfRun = Callable[[ViewedRun, Parameters], Any]


def application(library: Library, access: Access, store: Store, *, page: Path | None = None) -> Guard:
    """The ASGI application over ``library``. ``page``: the folder of the built page, by default this package's."""

    def route(path: str, found: Answer) -> Route:
        def endpoint(request: Request) -> Response:  # not async: Starlette runs it in a thread
            try:
                return answer(found(library, Parameters(request.query_params, request.path_params)))
            except TrewError as error:
                return failed(error)
            except Exception as error:
                return _broken(request, error)

        return Route(path, endpoint, methods=["GET"])

    def of_run(path: str, found: OfRun) -> Route:
        return route(f"/api/runs/{{id}}{path}", lambda library, p: found(library.run(p.path["id"]), p))

    def file(request: Request) -> Response:
        return page_file(request.url.path, page)

    tokenizers, comparisons = Tokenizers(), Comparisons()
    routes = [
        route("/api/runs", _runs),
        route("/api/config", lambda library, p: compared(_named(library, p))),
        route("/api/compare", lambda library, p: comparisons.of(_named(library, p), p)),
        of_run("/metrics", lambda run, p: metrics(run, since=p.whole("since", -1), only=p.names("columns"))),
        of_run("/summary", lambda run, p: summary(run)),
        of_run("/config", lambda run, p: config(run)),
        of_run("/steps", lambda run, p: steps(run, store)),
        of_run("/rollouts", lambda run, p: rollouts(run, store, p)),
        of_run("/groups", lambda run, p: groups(run, store, p)),
        of_run("/prompts", lambda run, p: prompts(run, store, p)),
        # uids may contain slashes. Of several prompts with one uid, the parameter prompt_hash says which.
        of_run("/prompts/{uid:path}", lambda run, p: prompt(run, store, p, p.path["uid"])),
        # What the page asks for: in a parameter, every uid keeps its form.
        of_run("/prompt", lambda run, p: prompt(run, store, p, p.text("uid"))),
        of_run("/completion", lambda run, p: completion(run, tokenizers, p)),
        # Last: it matches everything.
        Route("/{path:path}", file, methods=["GET"]),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: _no_route}), access)


def _runs(library: Library, parameters: Parameters) -> dict[str, Any]:
    runs = [run.about() for run in library.runs()]
    return {"version": __version__, "runs": runs, "left_out": library.left_out}


def _named(library: Library, parameters: Parameters) -> list[ViewedRun]:
    """The runs of the parameters ``run``, which may be given several times."""
    ids = [*dict.fromkeys(parameters.all("run"))]
    if not ids:
        raise BadRequest("run: is missing, accepts the id of a run; give it once for each run")
    return [library.run(id) for id in ids]


def _no_route(request: Request, error: Exception) -> Response:
    return failed(NotHere(f"{request.url.path[:200]}: there is nothing at this address"))


def _broken(request: Request, error: Exception) -> Response:
    """A fault of ours; the terminal has its traceback, the page its name."""
    traceback.print_exception(error)
    message = f"{request.url.path[:200]}: {type(error).__name__}: {error}; this is a fault of trew view"
    return answer({"error": {"message": message}}, 500)
