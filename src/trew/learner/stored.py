"""A model's tensors that checkpoints hold, and the check that a checkpoint's tensors fit before any is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..errors import CheckpointError
from ..models.sharded import Rows

_SHOWN = 8  # differences in the message


def stored_tensors(model: nn.Module, *, adapters: bool) -> dict[str, Tensor]:
    """The tensors of a model that a checkpoint holds: the trained ones of a model with ``adapters``; otherwise all
    parameters (frozen ones too, tied ones once) and the persistent buffers."""
    if adapters:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Buffers that state_dict() leaves out (rotary frequencies, for example) are rebuilt from the configuration.
    persistent = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def check_stored(own: Mapping[str, Tensor], saved: Mapping[str, Tensor | Rows], found: Sequence[str] = ()) -> None:
    """Raises CheckpointError where ``saved``, without its optimizer tensors, has other names, shapes or dtypes than a
    model's ``own`` tensors, or where differences were ``found`` already."""
    saved = {name: t for name, t in saved.items() if not name.startswith("optimizer.")}
    # All differences before anything is copied: a half-loaded model would be worse than a refused one.
    differences = [f"{name}: missing in the checkpoint" for name in own if name not in saved]
    differences += [f"{name}: unknown to this model" for name in saved if name not in own]
    differences += [
        f"{name}: {_kind(saved[name])} in the checkpoint, {_kind(t)} here"
        for name, t in own.items()
        if name in saved and _kind(saved[name]) != _kind(t)
    ]
    differences += found
    if differences:
        rest = len(differences) - _SHOWN
        shown = "\n  ".join(differences[:_SHOWN]) + (f"\n  and {rest} more" if rest > 0 else "")
        raise CheckpointError(f"the checkpoint is of another model or optimizer:\n  {shown}")


def _kind(tensor: Tensor | Rows) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
