"""Finds what is wrong with a model's files before anything heavy is imported or loaded; one line per problem."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config.limits import MODEL_PARTS, MODEL_WIDTH
from ..errors import ModelError, nearest
from .causality import causal_problems
from .default import DEFAULT_MODEL, fetch_default
from .integrity import StoredTensor, tensors_of

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
ADAPTER_BESIDE = (
    "an adapter next to the model (adapter_config.json), which would be added to it unasked; merge them and save the "
    "whole model, or take the adapter away"
)
_PAGES = 256
"""Pages of each weight file that :func:`digest_of_sample` reads: enough for adapters that were merged into a tenth of
the weights."""


def is_path(name: str) -> bool:
    """Whether ``name`` is a path: it exists, or looks like a path rather than a hub id."""
    return (
        Path(os.path.expanduser(name)).exists()
        or name.startswith((".", "/", "~", os.sep))
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    )


def offline() -> bool:
    """Whether the user has disabled the hub (``HF_HUB_OFFLINE=1``)."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


def locate_folder(name: str, role: str) -> tuple[Path | None, list[str]]:
    """Resolves ``name`` to an existing folder, or says why it cannot."""
    folder = Path(os.path.expanduser(name))
    if not folder.exists():
        siblings = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        hint = nearest(folder.name, siblings)
        return None, [f"{role}: no such folder: {name}{hint}; give a folder in Hugging Face layout or a hub id"]
    if folder.is_dir():
        return folder, []
    what = "a GGUF file" if folder.suffix == ".gguf" else "a file"
    return None, [f"{role}: {name} is {what}, not a folder; give the folder that holds config.json and *.safetensors"]


def locate_on_hub(name: str, role: str) -> tuple[Path | None, list[str]]:
    """Returns the local snapshot folder of hub id ``name`` with at least its configuration, or why there is none."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # The smallest file that each role cannot do without.
    file = "config.json" if role == "model" else "tokenizer_config.json"
    # The cache first: no request, and the same answer offline.
    try:
        return Path(hf_hub_download(name, file, local_files_only=True)).parent, []
    except HFValidationError:
        return None, [f"{role}: got {name!r}, which is neither a folder nor a hub id (owner/name)"]
    except OSError:
        pass  # not in the hub's cache yet
    advice = f"use a local folder, or model = {DEFAULT_MODEL!r}"
    if "/" not in name:
        advice += nearest(name, [DEFAULT_MODEL])
    if offline():
        return None, [f"{role}: {name!r} is not in the local hub cache and HF_HUB_OFFLINE is set; {advice}"]
    try:
        HfApi().model_info(name, timeout=10)  # one request without retries: an unreachable hub shows at once
        return Path(hf_hub_download(name, file)).parent, []
    except (HfHubHTTPError, OSError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
            why = "the hub has no such model, or it is gated or private and needs `hf auth login`"
        else:
            why = f"no such folder here, and the hub cannot be reached ({cause(error)})"
        return None, [f"{role}: {name!r}: {why}; {advice}"]
    except Exception as error:  # the hub's client changes its HTTP library and with it the types of network errors
        return None, [
            f"{role}: {name!r}: no such folder here, and the hub cannot be reached ({cause(error)}); {advice}"
        ]


def fetched(name: str) -> Path:
    """Returns the folder of a model's files with its weights, downloaded where they are missing. Raises ModelError."""
    if name == DEFAULT_MODEL:
        return fetch_default()
    if is_path(name):
        return Path(os.path.expanduser(name))
    from huggingface_hub import snapshot_download

    loaded = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=loaded, local_files_only=offline()))
    except Exception as error:  # the hub's client raises many types, and changes them
        raise ModelError(f"model {name!r}: cannot be downloaded: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """The most informative line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, KeyError):  # whose text is the key alone
        text = f"{text} is not known"
    # A heading says nothing by itself: the cause is on the next line.
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text if len(text) <= 300 else text[:297] + "..."


# --------------------------------------------------------------------------------------------------------------------
# Model folders


def model_problems(folder: Path, name: str, *, weights: bool, kind: Kind | None = None) -> list[str]:
    """Finds what prevents loading ``folder`` as a model of ``kind``: a causal language model by default.

    ``weights``: whether the weights must be there already.
    """
    path = folder / "config.json"
    if not path.is_file():
        return [_why_no_config(folder, name)]
    if (folder / "adapter_config.json").is_file():
        return [f"model: {name} has {ADAPTER_BESIDE}"]
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return [f"model: {path} is not valid JSON ({error}); the download is not complete"]
    if not isinstance(config, dict):
        return [f"model: {path} is not a JSON object"]
    if odd := _name_problems(config, name):
        return odd
    # Of an unknown type nothing else can be said, so that its kind is not checked.
    found = _unknown_architecture(config, name) or (kind or causal_problems)(config, name)
    if config.get("quantization_config"):
        found.append(
            f"model: {name} is stored quantised (quantization_config in config.json), so that its weights cannot be "
            "trained; use the model as it was before, with lora.base = 'nf4' to keep it in 4 bits"
        )
    found += _size_problems(config, name)
    found += _table_problems("model", folder / "generation_config.json") + _end_problems(folder, config, name)
    return found + (_weight_problems(folder, name) if weights else [])


def _name_problems(config: dict[str, Any], name: str) -> list[str]:
    """Finds names of the architecture that are none: with them nothing else can be looked up."""
    kind, classes = config.get("model_type"), config.get("architectures")
    listed = classes is None or (isinstance(classes, list) and all(isinstance(each, str) for each in classes))
    wrong = [] if kind is None or isinstance(kind, str) else [("model_type", kind, "a text, such as 'llama'")]
    wrong += [] if listed else [("architectures", classes, "a list of texts, such as ['LlamaForCausalLM']")]
    return [
        f"model: {name}: config.json has {key} = {got!r}, accepts {what}: correct the file, or fetch it again"
        for key, got, what in wrong
    ]


def _why_no_config(folder: Path, name: str) -> str:
    """Says what a folder without config.json is instead of a model."""
    if (folder / "adapter_config.json").is_file():
        if (folder.parent / "config.json").is_file():
            return (
                f"model: {name} holds an adapter without its base model (the folder above it has the two merged): give "
                "that one"
            )
        return (
            f"model: {name} holds an adapter without its base model; merge them and save the whole model, by peft: "
            f"PeftModel.from_pretrained(base, {str(folder)!r}).merge_and_unload().save_pretrained('merged'), and its "
            "tokenizer beside it"
        )
    if unmerged := _shards_of_verl(folder, name):
        return unmerged
    if list(folder.glob("*.gguf")):
        return f"model: {name} holds GGUF files; give a folder in Hugging Face layout (config.json, safetensors)"
    return f"model: {name} has no config.json, so it is not a Hugging Face model folder"


def _shards_of_verl(folder: Path, name: str) -> str:
    """Says how to merge a checkpoint of verl, of which ``folder`` is any folder: that of a step, of the actor with a
    pickle file for each rank, or beside these files, with configuration and tokenizer alone. Empty if it is none."""
    for actor in (folder, folder.parent, folder / "actor"):
        if any(actor.glob("model_world_size_*_rank_*.pt")):
            return (
                f"model: {name} is of a checkpoint of verl, whose weights are in one file for each rank; merge them in "
                f"verl's environment: python -m verl.model_merger merge --backend fsdp --local_dir {actor} "
                "--target_dir merged, then model = 'merged'"
            )
    return ""


_SIZES = (
    (re.compile(r"(layers?|heads?|experts|blocks)$"), MODEL_PARTS),
    (re.compile(r"(size|dim|rank|n_embd|n_inner)$"), MODEL_WIDTH),
)
"""Which keys of config.json count parts of a model or numbers in a row, and how many a model may have."""


def _size_problems(config: dict[str, Any], name: str) -> list[str]:
    """Finds counts that no real model has: building such a model would take minutes, or all memory."""
    # Configurations of multimodal models nest the counts of their text model.
    inner = config.get("text_config")
    table = config | (inner if isinstance(inner, dict) else {})
    return [
        f"model: {name}: config.json has {key} = {value}, accepts at most {most:,}; fetch it again"
        for key, value in table.items()
        for pattern, most in _SIZES
        if isinstance(value, int) and pattern.search(key) and value > most
    ]


def _table_problems(role: str, *files: Path) -> list[str]:
    """Finds settings files that are not JSON objects: transformers ignores some of them, and end tokens and templates
    are lost. A missing file is not a problem.
    """
    found = []
    for path in files:
        # lexists: a link to nowhere, as to a deleted blob of the hub's cache, is a problem and not a missing file.
        if not os.path.lexists(path):
            continue
        why = "is not a JSON object"
        try:
            sound = path.is_file() and isinstance(json.loads(path.read_bytes()), dict)
        except (ValueError, RecursionError) as error:
            sound, why = False, f"is not valid JSON ({error})"
        if not sound:
            found.append(f"{role}: {path} {why}: what it says, such as end tokens, would be lost; fetch it again")
    return found


def _end_problems(folder: Path, config: dict[str, Any], name: str) -> list[str]:
    """Finds end tokens that the model does not have: completions would never end with them."""
    inner = config.get("text_config")
    rows = (inner if isinstance(inner, dict) else config).get("vocab_size")
    if not isinstance(rows, int):
        return []
    found = []
    for file in ("generation_config.json", "config.json"):
        ends = _end_ids(folder / file)
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        # type() and not isinstance: true is no token.
        odd = [end for end in listed if type(end) is not int or not 0 <= end < rows]
        if odd:
            found.append(
                f"model: {name}: {file} has eos_token_id {ends!r}, of which {odd[0]!r} is no token of the model's "
                f"{rows}; accepts whole numbers from 0 to {rows - 1}: correct the file, or fetch it again"
            )
    return found


def end_ids(folder: Path | None) -> frozenset[int]:
    """The end tokens that the files of a model name, which an engine adds to the tokenizer's; none where ``folder`` is
    not there. Generation configurations may have more of them than the tokenizer has: Llama 3, Qwen 2.5, Gemma 3."""
    if folder is None:
        return frozenset()
    own = folder / "generation_config.json"
    # Without one, transformers takes the model's.
    ends = _end_ids(own if own.exists() else folder / "config.json")
    return frozenset(end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int)


def _end_ids(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # the file does not exist, or another check reports it


def _unknown_architecture(config: dict[str, Any], name: str) -> list[str]:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        if config.get("auto_map"):
            return [
                f"model: {name} brings its own Python code (auto_map in config.json), which trew never runs; use a "
                f"model that transformers knows by itself"
            ]
        got = f"model_type {kind!r}{nearest(str(kind), CONFIG_MAPPING_NAMES)}" if kind else "no model_type"
        return [f"model: {name}: config.json has {got}, which transformers {__version__} does not know; upgrade it?"]
    return []


def head_of(config: dict[str, Any]) -> tuple[str, int]:
    """Which head a configuration names, ``sequence``, ``token`` or nothing, and how many labels it has.

    >>> head_of({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}})
    ('sequence', 1)
    """
    architectures = [a for a in config.get("architectures") or [] if isinstance(a, str)]
    heads = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}
    head = next((h for end, h in heads.items() if any(a.endswith(end) for a in architectures)), "")
    labels = config.get("id2label")
    # transformers assumes two labels where none are listed.
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    return head, count if isinstance(count, int) else 2


def scorer_problems(config: dict[str, Any], name: str) -> list[str]:
    """Says why a configuration does not describe a model with one score; empty if it does."""
    head, labels = head_of(config)
    what = ", ".join(map(str, config.get("architectures") or [])) or config.get("model_type")
    accepts = "accepts a ...ForSequenceClassification with one label, or a ...ForTokenClassification with one or two"
    if not head:
        hint = "; trew train-reward makes a reward model of it" if not causal_problems(config, name) else ""
        return [f"model: {name} is {what}, not a reward model; {accepts}{hint}"]
    if labels != 1 and (head, labels) != ("token", 2):
        return [f"model: {name} is {what} with {labels} labels, which is not a score; {accepts}"]
    return []


def base_problems(config: dict[str, Any], name: str) -> list[str]:
    """Says why a model cannot become a reward model: it is neither a causal language model nor one with a score."""
    head, labels = head_of(config)
    if head == "sequence":
        return scorer_problems(config, name)
    if head == "token":
        return [f"model: {name} scores tokens ({labels} labels); accepts a causal language model or a reward model"]
    return causal_problems(config, name)


Kind = Callable[[dict[str, Any], str], list[str]]
"""Finds why a configuration does not describe a kind of model: :func:`causal_problems` and the like."""


def weight_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns a model's weight files, from its index if it has one: present files, and missing ones.

    Raises ValueError for an invalid index.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        return ([single], []) if single.is_file() else ([], [])
    shards = _shards_in(index)
    here = [shard for shard in shards if (folder / shard).is_file()]
    return [folder / shard for shard in here], [folder / shard for shard in shards if shard not in here]


def digest_of_sample(folder: Path) -> str:
    """SHA-256 of the headers of a model's weight files and of ``_PAGES`` pages spread over each: in a moment, also for
    a large model. A model that was trained further has another one; one with a few other numbers may have the same."""
    digest = hashlib.sha256()
    for path in weight_files(folder)[0]:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(length))
            size = path.stat().st_size
            for at in range(_PAGES):
                file.seek(8 + length + (size - 8 - length) * at // _PAGES)
                digest.update(file.read(4096))
    return digest.hexdigest()


def _shards_in(index: Path) -> list[str]:
    try:
        table = json.loads(index.read_bytes())
        shards = sorted(set(table["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index} is not a valid index; the download is not complete") from None
    # An index is untrusted input: "../" in it must not make us read other files.
    if any(Path(str(shard)).name != shard for shard in shards):
        raise ValueError(f"{index} names files outside its own folder, which are not read; use another copy")
    if "metadata" not in table:  # transformers asks for it
        raise ValueError(f"{index} is not a valid index; the download is not complete")
    return shards


def stored(folder: Path) -> list[StoredTensor]:
    """Returns all tensors of a model's weight files; none if files are missing. Call after :func:`model_problems`."""
    here, missing = weight_files(folder)
    return [] if missing else [tensor for file in here for tensor in tensors_of(file)]


def _weight_problems(folder: Path, name: str) -> list[str]:
    try:
        here, missing = weight_files(folder)
    except ValueError as error:
        return [f"model: {error}"]
    if missing:
        names = ", ".join(file.name for file in missing[:3])
        return [
            f"model: {name} lacks {len(missing)} of {len(here) + len(missing)} weight files ({names}); the download is "
            "not complete: fetch it again"
        ]
    if not here and (unmerged := _shards_of_verl(folder, name)):
        return [unmerged]
    if not here and any(list(folder.glob(f"*{suffix}")) for suffix in (".bin", ".pt", ".pth")):
        return [
            f"model: {name} has its weights in pickle files (*.bin, *.pt), which can run code when read; trew reads "
            "safetensors only: convert it once with save_pretrained, or use a copy that has model.safetensors"
        ]
    if not here:
        return [f"model: {name} has no weights (model.safetensors or shards with an index); the download is incomplete"]
    return [problem for file in here if (problem := _safetensors_problem(file))]


def stored_types(folder: Path | None) -> set[str]:
    """Returns the types of a model's weights, by safetensors name ("F32", "BF16"); none without files."""
    return {tensor.dtype for file in (folder.glob("*.safetensors") if folder else ()) for tensor in tensors_of(file)}


def _safetensors_problem(file: Path) -> str | None:
    """Checks a file's length, which its own header determines: 8 bytes, the header, and the last tensor's end."""
    size = file.stat().st_size
    again = "fetch it again"
    with file.open("rb") as stream:
        start = stream.read(8)
    # The first bytes of a pointer file, which would otherwise read as an absurd header length.
    if start == b"version " and size < 1024:
        return f"model: {file} is a Git LFS pointer, not the weights; run `git lfs pull` or {again}"
    length = int.from_bytes(start, "little")
    # safetensors itself refuses headers above 100 MB.
    if len(start) < 8 or length > min(size - 8, 100_000_000):
        return f"model: {file} is cut off or not a safetensors file ({size} bytes); {again}"
    try:
        expected = max((tensor.stop for tensor in tensors_of(file)), default=8 + length)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return f"model: {file} has a broken header; {again}"
    if size != expected:
        return f"model: {file} has {size} bytes, its header says {expected}: the download is not complete; {again}"
    return None


# --------------------------------------------------------------------------------------------------------------------
# Tokenizers and templates


def tokenizer_problems(folder: Path, name: str) -> list[str]:
    """Checks that there is a tokenizer and that its settings can be read."""
    if any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return _table_problems("tokenizer", *(folder / file for file in _TOKENIZER_SETTINGS))
    return [
        f"tokenizer: {name} has none of {', '.join(_TOKENIZER_FILES)}; set tokenizer to a folder or hub id with one"
    ]


def vocabulary_problems(folder: Path, tokenizer: Path, name: str) -> list[str]:
    """Compares config.json's vocabulary with tokenizer.json's where both can be read; check_vocab does it for all."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        rows = int((config.get("text_config") or config)["vocab_size"])
        table = json.loads((tokenizer / "tokenizer.json").read_bytes())
        vocab = table["model"]["vocab"]
        # A Unigram model has a list of pieces in the order of their ids, the others a table from piece to id.
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        size = max(ids + [int(token["id"]) for token in table.get("added_tokens", ())]) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    problem = vocabulary_mismatch(rows, size)
    return [f"tokenizer: does not fit model {name}: {problem}"] if problem else []


def vocabulary_mismatch(rows: int, size: int) -> str | None:
    """Compares ``rows`` of the embedding with ``size`` of the tokenizer. Models round their embedding up by hundreds.

    >>> vocabulary_mismatch(151936, 151669) is None
    True
    >>> vocabulary_mismatch(32000, 50257)
    'the tokenizer has 50257 tokens, the model 32000; use the tokenizer that was trained with the model'
    """
    if size <= rows <= 1.05 * size + 1024:
        return None
    return f"the tokenizer has {size} tokens, the model {rows}; use the tokenizer that was trained with the model"


def template_problems(chat_template: str) -> list[str]:
    """Whether ``chat_template`` is empty, ``"plain"``, or a file with a template in it."""
    if chat_template in ("", "plain"):
        return []
    accepts = "accepts 'plain' or a Jinja file (.jinja), or nothing for the tokenizer's own"
    path = Path(os.path.expanduser(chat_template))
    if not path.is_file():
        return [f"chat_template: no such file: {chat_template}; {accepts}"]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return [f"chat_template: {chat_template} is not UTF-8 text; {accepts}"]
    except OSError as error:
        return [f"chat_template: {chat_template} cannot be read: {error.strerror}; {accepts}"]
    return [] if "messages" in text else [f"chat_template: {chat_template} never mentions messages; {accepts}"]
