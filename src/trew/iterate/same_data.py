"""Records which data the rounds began with. A later round finds its prompts by their places, and what is held out by
the seed: other data would repeat prompts, or train on those that measured the rounds before."""

from __future__ import annotations

import json

from ..errors import ConfigError
from ..runs import RunFolder
from ..runs.files import write_atomic

FILE = "data.json"


def check(folder: RunFolder, fingerprint: str, *, allow: bool) -> list[str]:
    """Compares the data with those that the rounds began with, and records them. Raises ConfigError for other ones,
    unless they are allowed: then returns a line about them."""
    path = folder.folder / FILE
    # Folders of older versions have no record.
    known = json.loads(path.read_text("utf-8"))["fingerprint"] if folder.resumed and path.is_file() else fingerprint
    said = f"{folder.folder}: the data changed since the rounds began (fingerprint {known}, now {fingerprint})"
    if known != fingerprint and not allow:
        raise ConfigError(
            f"{said}; give the same data, start new rounds elsewhere (out), or go on with --allow-changes: prompts may "
            "come again, and what is held out now may have been trained on"
        )
    write_atomic(path, lambda file: file.write(json.dumps({"fingerprint": fingerprint}).encode() + b"\n"))
    return [said] if known != fingerprint else []
