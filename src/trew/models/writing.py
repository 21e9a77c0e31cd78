"""Writes the folder of a model so that it appears as a whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..errors import CheckpointError


@contextlib.contextmanager
def written_whole(folder: Path, *, mode: int | None = None) -> Iterator[Path]:
    """A new folder beside ``folder``, which becomes it at the end of the block, in place of one that is there. If the
    block fails, nothing of it stays. Its permissions are ``mode``, by default what the umask leaves. Raises
    CheckpointError if the disk or the place does not take it."""
    work, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    try:
        for leftover in (work, old):
            shutil.rmtree(leftover, ignore_errors=True)
        work.mkdir(parents=True)
        if mode is not None:  # before there is anything in it
            work.chmod(mode)
        yield work
        # Two renames, as a folder cannot replace another one that holds files. A crash in between leaves both complete.
        if folder.exists():
            folder.rename(old)
        work.rename(folder)
    except (OSError, SafetensorError) as error:  # which a full disk is to safetensors
        raise CheckpointError(
            f"{folder}: the model cannot be written: {_reason(error)}; free some space or choose another out"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _reason(error: OSError | SafetensorError) -> str:
    """What the system says, without lists of files."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        return str(error.args[0][0][-1])  # (from, to, why) of each file that could not be copied
    return getattr(error, "strerror", None) or str(error)


def tell_own_head(config: Any, model: Any) -> None:
    """Has ``config`` say that the head is not tied, where ``model`` has one of its own."""
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
