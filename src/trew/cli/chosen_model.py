"""Which model a command line names: a run's final model or checkpoint, a model folder, adapters, or a hub id."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config, load
from ..errors import ConfigError
from ..types import Sampling
from ..utils.toml import toml_value
from .run_folders import refuse_no_policy, refuse_unnamed_run, run_of
from .run_prompts import RunPrompts, prompts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..rollout.conversation import Voice

TEMPERATURE = 0.7
"""Of models without a run: at 1, small ones ramble."""


@dataclass(frozen=True)
class Chosen:
    """A model that can be loaded. ``name`` has the files to check and the tokenizer, ``load`` gives the weights on the
    CPU, ``label`` is for people. ``base`` names the model before training; empty if that is not known."""

    label: str
    name: str
    load: Callable[[], PreTrainedModel]
    tokenizer: str = ""
    chat_template: str = ""
    base: str = ""
    config: Config | None = None
    prompts: RunPrompts = field(default_factory=RunPrompts)

    @property
    def system(self) -> str:
        """The system message of the run's prompts; empty if there is none, or not one for all."""
        return self.prompts.system or (_system(self.config) if self.config else "")

    def sampling(self, *, temperature: float | None, top_p: float | None, max_tokens: int, seed: int) -> Sampling:
        """How answers are drawn: as given, as in the run, or by default."""
        own = self.config.rollout if self.config else None
        found = {"temperature": temperature, "top_p": top_p}
        known: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
        known |= {"max_tokens": max_tokens, "seed": seed}
        settings: dict[str, Any] = {"temperature": TEMPERATURE}
        if own is not None:
            settings = {name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p", "stop")}
        # Options of the command line win over the run's own sampling.
        return Sampling(**(settings | known))

    def before(self) -> Chosen:
        """The model before training."""
        if not self.base:
            raise ConfigError(
                f"--before: {self.label} does not say what it was trained from; name that model with --base"
            )
        own = self.config
        return dataclasses.replace(
            self, label=self.base, name=self.base, load=_loader(self.base),
            tokenizer=own.tokenizer if own else "",
            chat_template=self.chat_template or (own.chat_template if own else ""),
        )  # fmt: skip

    def problems(self) -> list[str]:
        """Everything wrong with the files that shows without loading weights."""
        from ..models import loading

        return loading.check(self.name, tokenizer=self.tokenizer, chat_template=self.chat_template)

    def voice(self, name: str, *, device: str, dtype: str, system: str) -> Voice:
        """Loads the model, ready to talk."""
        import torch

        from ..models import backends, loading
        from ..rollout import Renderer
        from ..rollout.conversation import Voice
        from ..rollout.torch_engine import TorchEngine

        tokenizer = loading.load_tokenizer(self.name, tokenizer=self.tokenizer, chat_template=self.chat_template)
        renderer = Renderer(tokenizer, stop=self.config.rollout.stop if self.config else ())
        # Weights last: the tokenizer's problems show without them.
        model: Any = self.load()
        loading.check_vocab(model, tokenizer)
        own = self.config
        if dtype == "auto":
            dtype = own.learner.dtype if own else "float32"
        # As the run would compute; without one, whatever is fastest here.
        layers, products = (own.kernels == "auto", own.linear == "auto") if own else (True, True)
        engine = TorchEngine(
            model.to(device).eval(), renderer, batch=1, autocast=torch.bfloat16 if dtype == "bfloat16" else None,
            backend=backends.find(device, layers=layers, products=products),
        )  # fmt: skip
        return Voice(name, self.label, engine, system=system)


def choose(name: str, *, step: int | None, base: str, chat_template: str) -> Chosen:
    """The model that ``name`` means. Raises ConfigError if there is none, or a run's recipe cannot be read."""
    path = Path(os.path.expanduser(name))
    # A checkpoint's folder before a run's: its grandparent is the run.
    if path.parent.name == "checkpoints" and (run := run_of(path.parent.parent)) is not None:
        own = _step_of(path)
        if step not in (None, own):
            raise ConfigError(f"--step: got {step}, but {name} is the checkpoint of step {own}; name the run, {run}")
        return _of_run(run, step=own, base=base, chat_template=chat_template)
    if (run := run_of(path)) is not None:
        return _of_run(run, step=step, base=base, chat_template=chat_template, final=path != run)
    refuse_unnamed_run(path)
    if step is not None:
        raise ConfigError(f"--step: got {step}, but {name} is not the folder of a run, which has checkpoints")
    # Adapters alone: with a config.json beside them, the folder is a whole model.
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        return _of_adapters(path, base=base, chat_template=chat_template)
    return Chosen(name, name, _loader(name), chat_template=chat_template, base=base)


def _loader(name: str) -> Callable[[], PreTrainedModel]:
    def load() -> PreTrainedModel:
        from ..models import loading

        return loading.load_model(name)

    return load


def _step_of(checkpoint: Path) -> int:
    digits = checkpoint.name.partition(".")[0]
    if not (checkpoint.is_dir() and digits.isdecimal()):
        raise ConfigError(f"{checkpoint}: is not a checkpoint; accepts a folder like {checkpoint.parent}/000020")
    return int(digits)


def _of_run(run: Path, *, step: int | None, base: str, chat_template: str, final: bool = False) -> Chosen:
    """``final``: the final weights, although the run may have gone on since."""
    from ..training.exporting import has_gone_on

    refuse_no_policy(run)
    # --base replaces the model that the recipe names, which may have moved.
    config = load(run / "config.toml", [f"model={toml_value(base)}"] if base else [])
    template = chat_template or config.chat_template
    folder = run / "final"
    if step is None and (folder / "config.json").is_file() and (final or not has_gone_on(run)):
        # final/ has the tokenizer that the run used, with its template.
        own = Chosen(str(run), str(folder), _loader(str(folder)), chat_template=chat_template)
        return dataclasses.replace(own, base=config.model, config=config, prompts=prompts_of(run, config))

    def load_stored() -> PreTrainedModel:
        from ..training.exporting import load_checkpoint
        from ..utils.console import Display

        # Adapters, if there are any, are merged: a voice speaks for one whole model.
        return load_checkpoint(config, run, step=step, notify=Display().warn).merged()

    which = "newest checkpoint" if step is None else f"step {step}"
    return Chosen(
        f"{run} ({which})", config.model, load_stored, config.tokenizer, template, base=config.model, config=config,
        prompts=prompts_of(run, config),
    )  # fmt: skip


def _of_adapters(folder: Path, *, base: str, chat_template: str) -> Chosen:
    try:
        base = base or str(
            json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"] or ""
        )
    except (OSError, ValueError, KeyError, TypeError):
        base = ""
    if not base:
        raise ConfigError(
            f"{folder}: adapter_config.json does not name the model that the adapters belong to; give it with --base"
        )

    def load_adapted() -> PreTrainedModel:
        from ..models import loading, lora

        return lora.with_adapters(loading.load_model(base), folder)

    return Chosen(f"{folder} (adapters of {base})", base, load_adapted, chat_template=chat_template, base=base)


def _system(config: Config) -> str:
    """The system message of a recipe's data; empty where several data sets have different ones."""
    found = {str(one.args.get("system", "")) for one in config.sets}
    return found.pop() if len(found) == 1 else ""
