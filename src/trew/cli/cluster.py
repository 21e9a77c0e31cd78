"""``trew cluster``: makes the environment that vLLM servers run in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import tyro


def install_vllm(
    folder: Annotated[str, tyro.conf.Positional] = "", *, build: Literal["auto", "cpu", "gpu"] = "auto"
) -> None:
    """Makes a Python environment with vLLM and trew-vllm, for runs with cluster.rollout = "vllm".

    vLLM needs other versions of torch and transformers than trew, so it gets a separate environment. Run it again to
    continue where it was interrupted.

    Args:
        folder: Where to make it; default: a folder in trew's cache, where runs look for it.
        build: vLLM for NVIDIA GPUs or for CPUs; auto: by what this machine has.
    """
    from ..rollout.vllm import environment

    place = Path(os.path.expanduser(folder)) if folder else environment.default_folder()
    cpu = build == "cpu" or (build == "auto" and not environment.has_gpu())
    made = environment.install(place.absolute(), cpu=cpu, say=_say)
    if folder:
        _say(f'write in the recipe: [cluster] python = "{made.python}"')
    _say("trew doctor cluster checks it")


def install_plugin(python: Annotated[str, tyro.conf.Positional] = "") -> None:
    """Installs this trew's trew-vllm into an environment that has vLLM, in place of any other; needs no network.

    Args:
        python: The environment's Python; default: the one that runs would use.
    """
    from ..errors import EngineError
    from ..rollout.vllm import environment

    found = environment.find(python)
    environment.install_plugin(found, say=_say)
    if problems := environment.probe(found).problems():
        raise EngineError("\n".join(map(str, problems)))


def _say(line: str) -> None:
    print(line, flush=True)
