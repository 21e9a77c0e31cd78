"""The server of ``trew view`` as a process, and a browser window on it.

A window fails on errors of scripts, on what the page's policy forbids, and on requests to other machines.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

expect.set_options(timeout=30_000)  # a busy machine is no failure
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@contextmanager
def serving(*folders: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that `trew view` prints for these folders, and its process."""
    command = [sys.executable, "-m", "trew", "view", *map(str, folders), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "/?token=" in line:
                yield line.strip(), process
                break
        else:
            pytest.fail("trew view ended: " + "".join(said))
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


# Runs before the page's own scripts, and sees what the policy forbade.
WATCH = """
window.forbidden = [];
addEventListener("securitypolicyviolation", e => window.forbidden.push(`${e.violatedDirective} ${e.blockedURI}`));
"""

# WCAG's contrast of every text with what lies behind it, blended; marks of spaces are decoration.
CONTRAST = r"""
() => {
  const parse = c => { const m = c.match(/[\d.]+/g).map(Number); return [m[0], m[1], m[2], m[3] ?? 1]; };
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const light = c => { const f = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    const left_out = e.closest('svg, option, .ws, :disabled, .hidden, .skip, noscript');
    if (!own || left_out || !e.getClientRects().length) continue;
    const chain = []; for (let p = e; p; p = p.parentElement) chain.unshift(p);
    let back = [255, 255, 255, 1];
    for (const p of chain) back = over(parse(getComputedStyle(p).backgroundColor), back);
    const text = over(parse(getComputedStyle(e).color), back);
    const [hi, lo] = [light(text), light(back)].sort((a, b) => b - a);
    const ratio = (hi + 0.05) / (lo + 0.05);
    if (ratio < 4.5) poor.push([e.className, e.textContent.slice(0, 30), ratio.toFixed(2)].join(' | '));
  }
  return poor.slice(0, 8);
}
"""

UNLABELLED = """
() => [...document.querySelectorAll('button, input, select, a, canvas, svg[role], [tabindex="0"]')].filter(e =>
  !(e.closest('[role=img][aria-label]') || e.getAttribute('aria-label') || e.textContent.trim() ||
    (e.labels && [...e.labels].some(l => l.textContent.trim())))
).map(e => e.outerHTML.slice(0, 120))
"""


def until(page: Any, holds: str) -> None:
    """Waits until a function of the page is true. Asked for from here: its policy lets no text be run inside of it."""
    for _ in range(100):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(100)
    raise AssertionError(holds)


class Visit:
    """One browser window on the page, and everything that went wrong in it."""

    def __init__(self, chromium: Any, address: str, *, expected: tuple[str, ...] = (), **context: Any) -> None:
        self.address = address
        self.base = address.partition("?")[0]
        self._expected = expected
        self._context = chromium.new_context(**{"viewport": DESKTOP, **context})
        self._context.add_init_script(WATCH)
        self.page = self._context.new_page()
        self.page.set_default_timeout(30_000)
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("console", self._console)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not any(text in message.text for text in self._expected):
            self.wrong.append(f"console: {message.text}")

    def open(self, hash: str = "") -> Any:
        """Goes to a view by its address, and waits until nothing loads any more."""
        first = not self.asked
        self.page.goto((self.address if first else self.base) + hash)
        if not first:
            self.page.reload()
        return self.settled()

    def settled(self) -> Any:
        self.page.wait_for_selector("main > *", state="attached")
        self.page.wait_for_timeout(150)
        self.page.wait_for_selector(".loading", state="detached", timeout=120_000)
        return self.page

    def fits(self, name: str, pictures: Path | None) -> None:
        """At both widths and in both schemes of colours nothing is cut off, text has contrast, controls have names."""
        for size, viewport in {"desktop": DESKTOP, "phone": PHONE}.items():
            self.page.set_viewport_size(viewport)
            for scheme in ("light", "dark"):
                self.page.emulate_media(color_scheme=scheme)
                self.page.wait_for_timeout(300)
                if pictures:
                    self.page.screenshot(path=pictures / f"{name}-{size}-{scheme}.png")
                assert self.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
                assert self.page.evaluate(CONTRAST) == []
        assert self.page.evaluate(UNLABELLED) == []

    def close(self) -> None:
        """Fails if anything went wrong: scripts, the policy, or a request to another machine."""
        forbidden = self.page.evaluate("window.forbidden")
        self._context.close()
        elsewhere = [
            u for u in self.asked if urlsplit(u).hostname != "127.0.0.1" and not u.startswith(("data:", "blob:"))
        ]
        assert (self.wrong, forbidden, elsewhere) == ([], [], [])
