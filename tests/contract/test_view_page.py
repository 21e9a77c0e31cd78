"""The committed page of ``trew view`` is what its sources build, is small, and asks no other machine for anything."""

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from trew.types import ScoreStatus

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "frontend" / "view"
PAGE = ROOT / "src" / "trew" / "view" / "page"
BUILD = json.loads((PAGE / "build.json").read_text())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hash_of_sources() -> str:
    """The same as in vite.config.ts: one line per file with its path and its hash, sorted."""
    files = [p for p in SOURCES.rglob("*") if p.is_file() and "node_modules" not in p.relative_to(SOURCES).parts]
    lines = sorted(f"{p.relative_to(SOURCES).as_posix()} {_sha256(p.read_bytes())}\n" for p in files)
    return _sha256("".join(lines).encode())


def test_the_page_was_built_from_its_sources() -> None:
    assert _hash_of_sources() == BUILD["sources"], "frontend/view has changed since the page was built: run make view"


def test_what_was_built_was_not_changed_afterwards() -> None:
    changed = [name for name, sha in BUILD["files"].items() if _sha256((PAGE / name).read_bytes()) != sha]
    assert not changed, f"{changed} are not what make view wrote"
    assert {"app.js", "index.css", "index.html"} <= set(BUILD["files"])


def test_the_page_is_small() -> None:
    assert sum(len(gzip.compress(p.read_bytes())) for p in PAGE.iterdir()) < 200_000


def test_the_licences_of_what_the_page_contains_go_along() -> None:
    text = (PAGE / "THIRD_PARTY_LICENSES.txt").read_text()
    for name, version in json.loads((SOURCES / "package.json").read_text())["dependencies"].items():
        licence = text.partition(f"{name} {version}\n")[2]
        assert "Permission is hereby granted" in licence
        assert "Copyright" in licence


def test_html_has_no_script_or_style_of_its_own() -> None:
    html = (PAGE / "index.html").read_text()
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module" crossorigin src="./app.js">']
    assert "<style" not in html
    assert not re.search(r"\s(style|on\w+)=", html)


def test_every_status_of_a_reward_is_explained() -> None:
    table = re.search(r"const STATUSES: .*? = {\n(.*?)\n};", (SOURCES / "src/parts/answer.tsx").read_text(), re.DOTALL)
    assert table
    assert re.findall(r"^  (\w+): ", table[1], re.MULTILINE) == list(get_args(ScoreStatus))


@pytest.mark.parametrize("name", ["app.js", "index.css", "index.html"])
def test_nothing_is_asked_of_other_machines(name: str) -> None:
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w{2,}[^\s"'`)]*""", (PAGE / name).read_text()))
    # Names of XML dialects, which no browser opens.
    assert {a for a in addresses if "www.w3.org" not in a} == set()
