"""LoRA adapters: small trainable matrices inside the linear layers of a frozen model, through peft.

    y = W x + (alpha / rank) B A x      W frozen, A (rank, in) random, B (out, rank) 0 at first      arXiv:2106.09685

The loaded model object is kept, with its linear layers replaced by peft's; everything that runs the model runs the
adapters. The same model with adapters disabled (:meth:`Adapters.disabled`) is the reference policy, without a second
copy.

The frozen linear layers may be stored in fewer bytes: ``bfloat16`` gives exactly the results of float32 weights if the
computation is in bfloat16 (autocast rounds them in every product anyway); ``nf4`` (4 bits and a float32 scale per 64
weights, arXiv:2305.14314) is a different, slightly worse model. Embeddings, norms and the head stay float32.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import logging
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import LoraConfig
from ..errors import ModelError, nearest
from ..utils.installing import install_extra
from . import files, loading
from .anatomy import add_low_rank
from .sharded import full

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "default"
"""peft's name for the only adapter."""

_SAMPLED = 4096
"""Approximate number of values of each frozen tensor that enter the fingerprint."""


@dataclass(frozen=True, eq=False)
class Adapters:
    """The adapters that :func:`attach` put into ``model``; ``base`` is a fingerprint of the frozen weights."""

    model: PreTrainedModel
    base: str
    _peft: Any  # peft's PeftModel around the same model

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Makes the model exactly its frozen base inside the block. A backward pass after the block would be wrong."""
        with self._peft.disable_adapter():
            yield

    def tensors(self) -> dict[str, Tensor]:
        """The adapters' tensors under peft's names, in a fixed order."""
        from peft import get_peft_model_state_dict

        # False: by default peft looks up the base model's configuration, on the hub too, to see whether its vocabulary
        # grew.
        return dict(sorted(get_peft_model_state_dict(self._peft, save_embedding_layers=False).items()))

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Writes only the adapters, in peft's format: adapter_config.json and adapter_model.safetensors. ``tensors``:
        whole ones, where the model's are sharded."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: t.detach().cpu().contiguous() for name, t in (tensors or self.tensors()).items()}
        save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.save_config(folder)

    def save_config(self, folder: Path) -> None:
        """Writes adapter_config.json, which peft needs to load adapters."""
        config = copy.copy(self._peft.peft_config[NAME])
        config.inference_mode = True  # as peft writes it: loading then freezes the adapters unless asked otherwise
        config.save_pretrained(str(folder))

    def export(self, tokenizer: PreTrainedTokenizerBase, folder: Path, *, mode: int | None = None) -> None:
        """Writes the merged model and the tokenizer as an ordinary model folder, with the adapters in its ``adapter/``.
        Both appear, or are replaced, together; ``mode`` are the folder's permissions."""
        loading.export(merged(self), tokenizer, folder, extra_files=lambda work: self.save(work / "adapter"), mode=mode)


def load_base(name: str, config: LoraConfig, *, device: str, dtype: str) -> PreTrainedModel:
    """Loads the model for adapters, its linear layers stored as ``config.base`` says; ``dtype``: type to compute in.

    Raises ModelError as :func:`.models.load_model` does.
    """
    if config.base == "nf4":
        return _load_nf4(name, device=device, dtype=dtype)
    if config.base == "float32":
        return loading.load_model(name, device=device)
    return load_bfloat16(name, device=device)


def load_bfloat16(name: str, *, device: str, biases: bool = True) -> PreTrainedModel:
    """Loads the model with the weights of its linear layers in bfloat16 and all else in float32.

    ``biases``: the biases of linear layers are in bfloat16 too.
    """
    # Loaded as stored, so that a float32 copy of the whole model never exists. Every parameter is copied below: one
    # left in the mapped file would keep all the file's pages in memory.
    at = "meta" if device == "meta" else "cpu"
    model = loading.load_model(name, device=at, dtype="auto")
    stored = files.stored_types(loading.folder(name))
    if not stored <= _HOLDS.get(model.dtype, set()):  # config.json may name another type than the files have
        model = loading.load_model(name, device=at)
    small = {id(p) for layer in linear_layers(model).values() for p in layer.parameters(recurse=False)}
    for p in model.parameters():
        low = id(p) in small and (biases or p.dim() > 1)
        p.data = p.data.to(torch.bfloat16 if low else torch.float32, copy=True)
    _restore_buffers(model)
    return model.to(device)  # pyrefly: ignore[bad-argument-type]


def _restore_buffers(model: PreTrainedModel) -> None:
    """Replaces buffers that were rounded to 16 bits: Gemma's factor of embeddings, in a model made in bfloat16."""
    rounded = {key: b for key, b in model.named_buffers() if b.dtype in (torch.bfloat16, torch.float16)}
    if not rounded:
        return
    made = loading.made_buffers(model.config)
    for key, b in rounded.items():
        b.data = made[key] if key in made else b.data.float()


def import_libraries() -> None:
    """Loads the code that adapters need, some 50 MiB of a process."""
    with _quiet_import():
        importlib.import_module("peft")


_HOLDS = {torch.bfloat16: {"BF16"}, torch.float16: {"F16"}, torch.float32: {"F32", "F16", "BF16"}}
"""The stored types, by safetensors name, that a type holds without rounding."""


def _load_nf4(name: str, *, device: str, dtype: str) -> PreTrainedModel:
    from transformers import BitsAndBytesConfig

    with _quiet_import():
        import bitsandbytes
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, dtype)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loading.load_model(name, device=device, quantization=quantization)
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            # On some CPUs the first pass without gradient would repack the weights and round their scales to bfloat16:
            # generation and training would then use two different models.
            layer.support_avx512bf16_for_cpu = False
    for p in model.parameters():
        if p.dtype == torch.float32:
            p.data = p.data.clone()  # out of the file's pages, see above
    return model


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Silences bitsandbytes, which peft imports too: on import it reports missing kernels of another package."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def with_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merges the adapters in ``folder``, in peft's format, into a float32 model, in place. Raises ModelError if they
    are not of this model."""
    if not (folder / "adapter_model.safetensors").is_file():  # peft would unpickle adapter_model.bin
        raise ModelError(f"adapters {folder}: adapter_model.safetensors is missing; only safetensors are read")
    try:
        import_libraries()
    except ModuleNotFoundError:
        raise ModelError(f"adapters {folder}: need peft, which is not installed: {install_extra('lora')}") from None
    import peft

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # peft only warns of adapters that it does not find
            warnings.filterwarnings("ignore", message=".*renamed|.*deprecated")
            return peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu").merge_and_unload()
    except (ValueError, TypeError, KeyError, RuntimeError, UserWarning, OSError) as error:
        raise ModelError(f"adapters {folder}: do not fit the model: {files.cause(error)}") from error


# --------------------------------------------------------------------------------------------------------------------
# Which layers


_ROUTERS = re.compile(r"Router|Grouped")


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns a model's linear layers by name, without its output head; includes GPT-2's, which are transposed."""
    from transformers.pytorch_utils import Conv1D

    head: Any = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        # Routers that are linear layers too return more than a product.
        if isinstance(layer, nn.Linear | Conv1D) and not _ROUTERS.search(type(layer).__name__) and layer is not head
    }


def target_problems(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Finds ``lora.targets`` that are not the last name of a linear layer; ``model`` may be without weights."""
    names = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    if not names:
        return [f"lora.rank: {type(model).__name__} has no linear layers, so LoRA cannot train it"]
    return [
        f"lora.targets: got {target!r}, accepts {', '.join(names)}{nearest(target, names)}"
        for target in targets
        if target not in names
    ]


# --------------------------------------------------------------------------------------------------------------------
# In and out


def notes(name: str, config: LoraConfig) -> list[str]:
    """A note where rounding the base takes away what adapters have learned before, which ``name`` has merged."""
    folder = loading.folder(name)
    if not config.rank or config.base == "float32" or folder is None or not (folder / "adapter").is_dir():
        return []
    return [
        f"lora.base: {config.base!r} rounds the weights of {name}, into which adapters have been merged: most of what "
        "they have learned may be lost, as the evaluation before training shows. lora.base = 'float32' keeps it"
    ]


def attach(model: PreTrainedModel, config: LoraConfig, *, name: str, seed: int) -> Adapters:
    """Freezes ``model`` and puts adapters into its linear layers, in place. They change nothing until they are trained.

    ``name`` is the base model's name in the adapter's configuration. ``seed`` determines A: uniform within
    1 / sqrt(in), drawn on the CPU, so that it does not depend on the device. Raises ModelError if peft cannot.
    """
    wrapped = insert(model, config, name=name)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            assert a.dtype == b.dtype == torch.float32
            bound = 1 / math.sqrt(a.shape[1])
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=draw))
            b.zero_()
    return Adapters(model.eval(), fingerprint(model), wrapped)


def insert(model: PreTrainedModel, config: LoraConfig, *, name: str) -> Any:
    """Replaces the linear layers of ``model`` by peft's and returns peft's wrapper; A and B are not initialised."""
    from transformers.pytorch_utils import Conv1D

    with _quiet_import():
        import peft
    if problems := target_problems(model, config.targets):
        raise ModelError("\n".join(problems))
    layers = linear_layers(model)
    chosen = {n: m for n, m in layers.items() if not config.targets or n.rpartition(".")[2] in config.targets}
    how = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyrefly: ignore[bad-argument-type]  (annotated int, used as a factor)
        lora_dropout=config.dropout,
        target_modules=sorted({n.rpartition(".")[2] for n in chosen}),
        # peft matches by suffix, which may be that of the output head too.
        exclude_modules=sorted({n for n, m in model.named_modules() if m is model.get_output_embeddings()}),
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in chosen.values()),
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about attributes that transformers renamed
            wrapped = peft.get_peft_model(model, how)
    except (ValueError, TypeError, NotImplementedError) as error:
        why = files.cause(error).rstrip("( ")
        raise ModelError(
            f"lora.targets: peft cannot put adapters into all of these layers of {type(model).__name__}: {why}; choose "
            "some, such as those of the attention"
        ) from error
    wrapped.peft_config[NAME].base_model_name_or_path = name
    assert wrapped.get_base_model() is model
    _refuse_others(model, config, chosen=chosen.keys())
    return wrapped


def _refuse_others(model: PreTrainedModel, config: LoraConfig, *, chosen: Collection[str]) -> None:
    """Raises ModelError where peft has adapted other layers than those chosen: it matches names by suffix, and moves
    names to fused experts where it knows the architecture."""
    other = sorted(lora_layers(model).keys() ^ set(chosen))
    if not other:
        return
    among = [name for name in ("q_proj", "k_proj", "v_proj", "o_proj") if any(n.endswith(name) for n in chosen)]
    raise ModelError(
        f"lora.targets: got {list(config.targets) or 'all linear layers'}, of which peft adapts others in "
        f"{type(model).__name__} than those named ({', '.join(other[:3])}{', ...' if len(other) > 3 else ''}); "
        f"choose layers outside of the experts{f', such as {among}' if among else ''}"
    )


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Returns peft's layers inside ``model`` by name; empty without adapters."""
    with _quiet_import():
        from peft.tuners.lora import LoraLayer
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


@dataclass(frozen=True, slots=True)
class LowRank:
    """A linear layer's adapter: scale B A is added to its weight."""

    a: nn.Parameter  # (rank, in)
    b: nn.Parameter  # (out, rank)
    scale: float


def split(module: Any) -> tuple[Any, LowRank | None]:
    """Returns a linear layer's frozen part and its adapter: None without one, or while adapters are disabled."""
    if type(module) is nn.Linear:
        return module, None
    if module.disable_adapters:
        return module.get_base_layer(), None
    return module.get_base_layer(), LowRank(
        module.lora_A[NAME].weight, module.lora_B[NAME].weight, module.scaling[NAME]
    )


def fingerprint(model: nn.Module) -> str:
    """Hashes the frozen weights: their names, shapes and types, and about 4,096 values of each, evenly spaced."""
    digest = hashlib.blake2b(digest_size=16)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            some = p.detach().flatten()[:: max(1, p.numel() // _SAMPLED)].cpu().contiguous()
            digest.update(f"{name} {tuple(p.shape)} {p.dtype} ".encode())
            # As bytes: numpy has no bfloat16.
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def merged(adapters: Adapters) -> PreTrainedModel:
    """Returns a plain model on the CPU with W + (alpha / rank) B A in float32, whatever the type of W: bfloat16 would
    round away most of what was learned. Float32 tensors without an adapter are shared with the adapted model. Sharded
    weights are gathered: all ranks must call this together."""
    plain = _plain(adapters)
    tensors = {name: tensor.cpu() for name, tensor in merged_tensors(adapters)}
    return loading.fill(plain, tensors, like=adapters.model)


def merged_tensors(adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of :func:`merged` one by one, on the model's device, so that one at a time is in memory."""
    plain = _plain(adapters)
    # Parameters first, then all else in the state; tied weights appear under several names there.
    for name in dict.fromkeys([*dict(plain.named_parameters()), *plain.state_dict()]):
        owner, _, kind = name.rpartition(".")
        with torch.no_grad():  # not around the yield, which would leave it on for the caller
            # A LoRA layer stands under the name of the linear layer that it replaced.
            tensor = _merged_tensor(adapters.model.get_submodule(owner), kind)
        yield name, tensor


def _plain(adapters: Adapters) -> PreTrainedModel:
    """The model without adapters and without weights."""
    config = copy.deepcopy(adapters.model.config)
    config.dtype = torch.float32
    # The merged weights are float32: from_pretrained must not quantise them again.
    vars(config).pop("quantization_config", None)
    return loading.skeleton(config)


def _merged_tensor(owner: Any, kind: str) -> Tensor:
    from peft.tuners.lora import LoraLayer

    if not isinstance(owner, LoraLayer):
        tensor = full(getattr(owner, kind).detach())
        return tensor.float() if tensor.is_floating_point() else tensor
    value = getattr(owner.get_base_layer(), kind)
    state = getattr(value, "quant_state", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit

        value = dequantize_4bit(value.data, state)
    if kind != "weight":
        return full(value.detach()).float()
    # copy: the addition below would change the base itself where it is float32.
    weight = full(value.detach()).to(torch.float32, copy=True)
    add_low_rank(weight, owner, NAME)
    return weight


def parameter_count(model: nn.Module) -> int:
    """Counts a model's weights: tied ones once, and packed 4-bit tensors by the weights they represent."""
    states = ((p, getattr(p, "quant_state", None)) for p in model.parameters())
    return sum(p.numel() if state is None else state.shape.numel() for p, state in states)
