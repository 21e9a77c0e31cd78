"""``trew serve``: vLLM servers for runs on other machines, behind a token; and the work of ``trew rewards serve``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import ConfigError, EngineError, TrewError

if TYPE_CHECKING:
    from ..config import Config
    from ..rewards import RewardSet

_LOOK_S = 0.2


def serve(
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|MODEL")],
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    servers: int = 1,
    set: tuple[str, ...] = (),
    out: Path = Path("runs/serve"),
    restarts: int = 3,
    tls_cert: str = "",
    tls_key: str = "",
) -> int:
    """Serve a model by vLLM to runs on other machines: started, watched, started again, and ended with this command.

    Prints the line for the recipe of these runs: [cluster] endpoints. Each server has a port of its own. Requests
    need the token in the environment variable TREW_SERVER_TOKEN on both sides; without one, this command generates
    a token, shows it once and keeps it in the folder --out. Only the routes that runs use can be reached. Weights
    reach a server as files, so that the run's folder must be on a file system that both machines share, under one
    path; or as a stream, with cluster.sync = "nccl" in the recipe of both. Ctrl-C or SIGTERM ends everything.

    Args:
        target: A recipe (.toml), whose model, lengths, learner.dtype and [cluster] server settings are used; or a
            model: a folder, or a hub id.
        host: The interface to listen on: a name or address of this machine. A public one, or all, needs TLS.
        port: The port of the first server, the next ones follow; 0 takes free ones.
        servers: Number of servers, each with cluster.server_gpus GPUs.
        set: key=value, overrides the recipe: --set learner.dtype=bfloat16 data.max_prompt_tokens=2048
        out: The folder for the servers' logs and the token.
        restarts: How often in a row a server that ended is started again; ten minutes of work reset the count.
        tls_cert: The certificate to show, a PEM file; runs trust the system's authorities, or SSL_CERT_FILE.
        tls_key: Its private key, a PEM file without a password.
    """
    from ..rollout.vllm import launch
    from ..rollout.vllm.keeper import Keeper
    from ..rollout.vllm.proxy import Proxy
    from ..runs.lock import Lock
    from ..utils import listening

    if servers < 1 or restarts < 0:
        raise ConfigError(f"--servers, --restarts: got {servers} and {restarts}, accepts 1 or more, and 0 or more")
    config = _config(target, set, servers)
    # ---- what can be refused at once
    encryption = listening.tls(tls_cert, tls_key)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as ending:
        # One command per folder: two would write the same logs and tokens.
        ending.callback(Lock(out / "serve.lock").release)
        # Bound before the servers start, which takes minutes: a port that is taken shows now.
        sockets = [
            ending.enter_context(one)
            for one in listening.sockets_for(host, port, count=servers, encrypted=encryption is not None)
        ]
        made = launch.servers(config, model=_files(config), device="cpu", folder=out)
        token = listening.token_for("TREW_SERVER_TOKEN", out, _say)
        keeper = Keeper(made, tries=restarts, tell=_say)
        proxy = Proxy(keeper, {one.getsockname()[1]: i for i, one in enumerate(sockets)})
        addresses = [listening.address_of(one, host=host, encrypted=encryption is not None) for one in sockets]
        # The proxy first: it asks a run that connects early to wait.
        answers = ending.enter_context(listening.listening(listening.Guard(proxy, token, _say), sockets, encryption))
        # Entered last, so it is left first: servers end while the proxy still answers.
        ending.enter_context(contextlib.closing(keeper))
        _say(f"starting {servers} vLLM server{'s' * (servers > 1)} of {config.model}; logs are in {out}")
        keeper.start()
        _say("ready; in the recipe of a run:")
        _say("")
        _say(recipe_lines(addresses))
        # ---- until no server is left, or somebody ends it
        while not (why := keeper.lost()):
            if not answers():
                raise EngineError("the proxy has ended; start trew serve again")
            time.sleep(_LOOK_S)
        raise EngineError(f"no server is left: {why}")


def serve_rewards(rewards: RewardSet, recipe: Path, host: str, port: int, out: Path, tls_files: tuple[str, str]) -> int:
    """Computes ``rewards``, those of ``recipe``, for runs on other machines until it is interrupted."""
    from ..rewards.remote.host import RewardHost, check_machine
    from ..runs.lock import Lock
    from ..utils import listening

    with contextlib.ExitStack() as ending:
        ending.callback(rewards.close)
        check_machine(rewards)
        encryption = listening.tls(*tls_files)
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        ending.callback(Lock(out / "serve.lock").release)
        sockets = listening.sockets_for(host, port, encrypted=encryption is not None)
        ending.enter_context(sockets[0])
        token = listening.token_for("TREW_REWARDS_TOKEN", out, _say)
        served = listening.Guard(RewardHost(rewards), token, _say)
        answers = ending.enter_context(listening.listening(served, sockets, encryption))
        for line in rewards.code:
            _say(line)
        address = listening.address_of(sockets[0], host=host, encrypted=encryption is not None)
        _say(f"ready: {', '.join(rewards.names)} of {recipe}; in the recipe of a run:")
        _say("")
        _say(f'[cluster]\nreward_hosts = ["{address}"]')
        while answers():
            time.sleep(_LOOK_S)
        raise TrewError("the HTTP server has ended; start trew rewards serve again")


def recipe_lines(addresses: Sequence[str]) -> str:
    """Returns the lines of a recipe that uses these servers.

    >>> print(recipe_lines(["http://10.0.0.1:8000"]))
    [cluster]
    rollout = "vllm"
    endpoints = ["http://10.0.0.1:8000"]
    """
    listed = ", ".join(f'"{address}"' for address in addresses)
    return f'[cluster]\nrollout = "vllm"\nendpoints = [{listed}]'


def _config(target: str, overrides: Sequence[str], servers: int) -> Config:
    """The settings that servers are started with: a recipe's, or the defaults for a model. Raises ConfigError."""
    from ..config import apply_overrides, parse
    from ..config.recipe import read_table

    table: dict[str, Any]
    if target.endswith(".toml"):
        table = read_table(target, overrides)
    else:
        table = {"model": target}
        apply_overrides(table, overrides)
    # How a run uses its servers does not concern this machine, which only starts them.
    given = table.get("cluster", {})
    if isinstance(given, dict):
        own = {k: v for k, v in given.items() if k not in ("endpoints", "colocate")}
        table["cluster"] = {**own, "rollout": "vllm", "servers": servers}
    return parse(table, base=Path(target).parent)


def _files(config: Config) -> Path:
    """The folder of the model's files, which are downloaded if missing. Raises ConfigError, ModelError."""
    from ..models import files, loading

    if problems := loading.check(config.model, tokenizer=config.tokenizer):
        raise ConfigError(problems)
    return files.fetched(config.model)


def _say(line: str) -> None:
    print(line, flush=True)
