"""Gathers the pages of the site into build/docs, laid out as in the repository, so that links between them work.

    python docs/gather.py && mkdocs build --strict        make site

Pages are docs/*.md and those in PAGES; files that a page links to or shows are copied with them. Links to other sites
are not fetched: they are listed, by page, in build/external-links.txt.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "docs"
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "recipes/README.md")
STYLE = """\
.md-typeset table:not([class]) { font-size: .66rem; }
.md-typeset pre > code { font-size: .68rem; }
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; }
.md-grid { max-width: 74rem; }
.md-typeset img { max-width: 100%; height: auto; }
"""


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    pages = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in PAGES)]
    external: list[str] = []
    for page in pages:
        copy(page)
        text = without_code(page.read_text(encoding="utf-8"))
        for target in targets(text):
            if re.match(r"[a-z]+:", target):
                external.append(f"{page.relative_to(ROOT)}: {target}")
            elif (file := (page.parent / target.partition("#")[0]).resolve()).is_file() and file.suffix != ".md":
                copy(file)
    (OUT / "site.css").write_text(STYLE, encoding="utf-8")
    (OUT.parent / "external-links.txt").write_text("\n".join(dict.fromkeys(external)) + "\n", encoding="utf-8")
    print(f"{len(pages)} pages; {len(set(external))} links to other sites are in build/external-links.txt, not fetched")


def copy(file: Path) -> None:
    to = OUT / file.relative_to(ROOT)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def targets(text: str) -> list[str]:
    """Everything that a page links to or shows."""
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"(?:src|href)=\"([^\"]+)\"", text)]


if __name__ == "__main__":
    main()
