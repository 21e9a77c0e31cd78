"""Weights & Biases: runs of our own, online where there is a login."""

from __future__ import annotations

import contextlib
import importlib
import netrc
import os
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from .tracker import Ending, Rows, Subject
from .versions import parts

_CREATES_NEW = (0, 19, 10)
"""The first wandb whose init leaves other runs of the process alone."""
_WANDB_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}
"""Names of one and the same service, whose logins wandb takes for each other."""


class Wandb:
    def __init__(self, subject: Subject):
        self._subject = subject
        self._run: Any = None

    def begin(self) -> None:
        wandb: Any = importlib.import_module("wandb")
        about, apart = self._subject, parts(getattr(wandb, "__version__", "0")) >= _CREATES_NEW
        # An older one would return the active run: rows would go there, and its owner would find it finished.
        if not apart and getattr(wandb, "run", None) is not None:
            raise RuntimeError(
                "another run of wandb is active in this process; finish it before the training, or install "
                f"wandb>={'.'.join(map(str, _CREATES_NEW))}"
            )
        # Without a key wandb would prompt for one; offline files can be uploaded later with `wandb sync`.
        asked = os.environ.get("WANDB_MODE")
        offline = not asked and not _has_key(wandb)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", about.project),
            name=about.name,
            dir=str(about.folder),
            config=about.config,
            mode="offline" if offline else asked or None,  # None: as wandb's own settings say
            settings=wandb.Settings(silent=True, console="off", init_timeout=20),
            **({"reinit": "create_new"} if apart else {}),
        )
        # An axis of our own: under wandb's, the row of a step would be held back until the next step, and lost if the
        # process is killed, since the evaluation of the same step may still come.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if offline:
            there = getattr(getattr(self._run, "settings", None), "sync_dir", None) or about.folder / "wandb"
            about.note(
                f"no key was found, so this run is kept offline in {there}; upload it with: "
                f"wandb sync {shlex.quote(str(there))}"
            )

    def catch_up(self, rows: Rows) -> None:
        for step, values in rows:
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self, ending: Ending) -> None:
        if self._run is not None:
            # 255 is what wandb itself gives a run that was interrupted.
            self._run.finish(exit_code={"finished": 0, "failed": 1, "interrupted": 255}[ending])


def _has_key(wandb: Any) -> bool:
    """Whether wandb would log in without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = os.environ.get("WANDB_BASE_URL", "")
    # wandb knows best: its server may be named in its own settings, and a login may be of this process alone.
    with contextlib.suppress(Exception, SystemExit):
        settings = wandb.setup().settings
        server = settings.base_url
        if settings.api_key:
            return True
        return bool(importlib.import_module("wandb.sdk.lib.wbauth").read_netrc_auth(host=server))
    # An older wandb, or another: a login is in netrc, by the server's host.
    url = urlsplit(server or "https://api.wandb.ai")
    hosts = {url.netloc, url.hostname}
    hosts |= _WANDB_HOSTS if hosts & _WANDB_HOSTS else set()
    usual = (os.path.expanduser(name) for name in ("~/.netrc", "~/_netrc"))
    path = os.environ.get("NETRC") or next(filter(os.path.exists, usual), "")
    try:
        # By its path: of its own accord Python refuses a file that others may read, which wandb does not.
        logins = netrc.netrc(os.path.expanduser(path)) if path else None
    except (OSError, netrc.NetrcParseError):
        return False
    return logins is not None and any(host and logins.authenticators(host) for host in hosts)
