"""The site has every page in its navigation, and nothing that is fetched from elsewhere; its links: make site."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from trew.utils.installing import requirements

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "mkdocs.yml").read_text()


def test_the_navigation_has_every_page_once():
    gather = runpy.run_path(str(ROOT / "docs" / "gather.py"))
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")] + list(gather["PAGES"])
    named = re.findall(r"^ +- [^:]+: (\S+\.md)$", SETTINGS, re.M)
    assert sorted(named) == sorted(pages)


def test_nothing_is_fetched_by_readers_and_broken_links_are_errors():
    assert "font: false" in SETTINGS
    assert "http" not in SETTINGS
    assert SETTINGS.count("warn") >= 6  # with --strict, a warning is an error
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()


def test_links_are_gathered_with_what_they_lead_to():
    targets = runpy.run_path(str(ROOT / "docs" / "gather.py"))["targets"]
    text = '[a](x.md#y) ![b](images/c.svg) <img src="d.png"> [e](https://f.org)'
    assert targets(text) == ["x.md#y", "images/c.svg", "https://f.org", "d.png"]


def test_versions_of_extras_are_pinned():
    """Whatever an extra for development or the site names is in constraints.txt."""
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    for extra in ("dev", "docs"):
        names = {re.split(r"[\[<>=]", line)[0].lower() for line in requirements()[extra]}
        assert names <= pinned | {name.replace("_", "-") for name in pinned}, names - pinned
