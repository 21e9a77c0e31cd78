"""Exports the model of a checkpoint as an ordinary model folder, whichever processes wrote it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import Config, apply_overrides, parse
from ..errors import CheckpointError, ConfigError, ResumeError
from ..learner.critic import without_critic
from ..learner.stored import check_stored, stored_tensors
from ..models import loading, lora
from ..models.sharded import Rows, copy_into
from ..models.writing import written_whole
from ..runs import changes, checkpoint_files
from .policy_program import from_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Stored:
    """The policy of a checkpoint, on the CPU; ``adapters`` are None where all weights were trained."""

    step: int
    model: PreTrainedModel
    adapters: lora.Adapters | None

    def merged(self) -> PreTrainedModel:
        """An ordinary model."""
        return self.model if self.adapters is None else lora.merged(self.adapters)


def export_checkpoint(
    config: Config,
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
    extra_files: Callable[[Path, int], None] = lambda folder, step: None,
) -> int:
    """Writes the policy of a checkpoint of ``run``, whose recipe is ``config``, to the folder ``out``; with adapters,
    the merged model and the adapters. Returns the checkpoint's step. ``extra_files`` may write more into the folder.

    See :func:`load_checkpoint`.
    """
    stored = load_checkpoint(config, run, step=step, notify=notify)
    tokenizer = loading.load_tokenizer(config.model, tokenizer=config.tokenizer, chat_template=config.chat_template)

    def more(folder: Path) -> None:
        if stored.adapters is not None:
            stored.adapters.save(folder / "adapter")
        extra_files(folder, stored.step)

    loading.export(stored.merged(), tokenizer, out, extra_files=more)
    return stored.step


def finished(run: Path) -> int | None:
    """The step of the model in ``final/``; None if there is none, or the run has gone on since."""
    try:
        step = json.loads((run / "summary.json").read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(step, int):
        return None
    # A later checkpoint means that the run went on after final/ was written.
    gone_on = checkpoint_files.newest_step(run / "checkpoints") > step
    return step if (run / "final" / "config.json").is_file() and not gone_on else None


def has_gone_on(run: Path) -> bool:
    """Whether a run has taken more steps than the model in its ``final/``, or is about to: that one is of an earlier
    end."""
    return (run / "final").is_dir() and finished(run) is None and checkpoint_files.newest_step(run / "checkpoints") > 0


def export_final(run: Path, out: Path, *, extra_files: Callable[[Path], None]) -> None:
    """Copies the final model of a finished run to ``out``, with the files that ``extra_files`` writes."""
    with written_whole(out) as work:
        mode = stat.S_IMODE(work.stat().st_mode)
        shutil.copytree(run / "final", work, dirs_exist_ok=True)
        work.chmod(mode)  # copytree gives it those of final/, which a run closes to others
        extra_files(work)


def load_checkpoint(
    config: Config, run: Path, *, step: int | None = None, notify: Callable[[str], None] = lambda text: None
) -> Stored:
    """Loads the policy of a checkpoint of ``run``, whose recipe is ``config``.

    ``step``: of the checkpoint; by default the newest complete one. One process reads the parts of all ranks, on the
    CPU. ``notify`` receives a message for every checkpoint that is damaged. Raises ConfigError if there is no
    checkpoint, ResumeError if none is usable, CheckpointError if it is of another model than the recipe's.
    """
    root = run / "checkpoints"
    if step is None:
        loaded, messages = checkpoint_files.load_latest(root)
        for message in messages:
            notify(message)
        if loaded is None:
            raise ConfigError(f"{run}: has no checkpoint; name the folder of a run that has saved one")
    else:
        loaded = checkpoint_files.load_step(root, step)
    found, tensors, meta = loaded
    config = _with_own_adapters(config, run, found)
    if not config.lora.rank:
        model = loading.load_model(config.model, device="cpu")
        _fill(model, tensors, root, adapters=False)
        return Stored(found, model, None)
    model = lora.load_base(config.model, config.lora, device="cpu", dtype=config.learner.dtype)
    adapters = lora.attach(model, config.lora, name=config.model, seed=config.seed)
    # Adapters fit their own base alone: the fingerprint is that of its frozen weights.
    _refuse_other_base(adapters.base, meta, root)
    _fill(model, tensors, root, adapters=True)
    return Stored(found, model, adapters)


def recipe_at(run: Path, step: int, overrides: Sequence[str] = ()) -> Config | None:
    """The recipe, with ``overrides``, that the checkpoint of ``step`` was trained by, where the run went on under other
    settings after it; None where that is the run's own."""
    if not (then := changes.settings_at(changes.in_folder(run), step, now="")):
        return None
    table = tomllib.loads(then)
    apply_overrides(table, overrides)
    return parse(table, base=run)


def _with_own_adapters(config: Config, run: Path, step: int) -> Config:
    """``config`` with the adapters of the checkpoint of ``step``: those of the run's end may have another alpha."""
    own = recipe_at(run, step) or config
    return dataclasses.replace(config, lora=own.lora, learner=own.learner, seed=own.seed)


def _fill(model: Any, tensors: Mapping[str, Tensor | Rows], root: Path, *, adapters: bool) -> None:
    """Copies a checkpoint's weights into the model."""
    # Both sides by the model's own names: files of adapters have peft's.
    own = {f"model.{name}": t for name, t in stored_tensors(model, adapters=adapters).items()}
    # A reference that follows the policy is part of a checkpoint, but not of its model.
    policy = from_files(without_critic(tensors))
    saved = {name: t for name, t in policy.items() if not name.startswith("reference.")}
    try:
        check_stored(own, saved)
    except CheckpointError as error:
        raise ResumeError(f"{root}: {error}") from None
    with torch.no_grad():
        for name, tensor in own.items():
            copy_into(tensor, saved[name])


def _refuse_other_base(base: str, meta: Mapping[str, Any], root: Path) -> None:
    """Raises ResumeError if the adapters of a checkpoint were trained on other frozen weights."""
    if meta.get("learner", {}).get("base") != base:
        raise ResumeError(
            f"{root}: its adapters were trained on other weights than those of the recipe's model; put the model that "
            "the run began with where the recipe says"
        )
