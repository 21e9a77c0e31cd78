"""The files of the built page. Only files that are listed in its folder are served, under exactly those names."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from .answers import NotHere, failed

PAGE = Path(__file__).parent / "page"
_KINDS = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon", ".json": "application/json",
    ".map": "application/json", ".woff2": "font/woff2", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip


def page_file(path: str, folder: Path | None = None) -> Response:
    """The file at an address of the server; / is index.html."""
    folder = folder or PAGE
    # Looked up, never joined with a path from outside: no ".." can leave the folder.
    listed = {"/" + str(found.relative_to(folder)): found for found in folder.rglob("*") if found.is_file()}
    found = listed.get("/index.html" if path == "/" else path)
    if found is None or found.suffix not in _KINDS:
        return failed(NotHere(f"{path[:200]}: there is nothing at this address"))
    return Response(found.read_bytes(), media_type=_KINDS[found.suffix])
