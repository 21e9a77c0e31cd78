"""Uploads an exported model to the Hugging Face hub, by huggingface_hub."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TrewError


def check(repo: str, *, public: bool) -> None:
    """Finds out, before anything is exported, whether ``repo`` can be written: name, token, and its visibility.

    Raises ConfigError for what the user can change, TrewError where the hub does not answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push: got {repo!r}, accepts NAME or OWNER/NAME: {str(error).splitlines()[0]}") from None
    if not get_token():
        raise ConfigError("--push: there is no token for the hub; log in with hf auth login, or set HF_TOKEN")
    api = HfApi()
    with _hub(api, "--push"):
        owner = api.whoami()["name"]
        full = repo if "/" in repo else f"{owner}/{repo}"
        try:
            private = bool(api.model_info(full).private)
        # A repository that does not exist is created later, with the visibility that was asked for.
        except RepositoryNotFoundError:
            return
    # ``private`` says what is there, ``public`` what was asked for: equal means that they contradict.
    if private == public:
        there, want = ("private", "without --public") if private else ("public", "with --public")
        raise ConfigError(f"--push: {full} exists and is {there}; give another name, or push {want}")


def push(folder: Path, repo: str, *, public: bool, message: str, say: Callable[[str], None]) -> str:
    """Uploads a folder as the model ``repo``, which is created if it does not exist; returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    say(f"uploading {folder} to {repo}")
    # Where the repository was not made yet, the command makes it: a public one unless it is told otherwise.
    again = shlex.join(["hf", "upload", repo, str(folder), *([] if public else ["--private"])])
    with _hub(api, f"{folder} is complete, but was not uploaded", then=f"; try again: {again}"):
        made = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    return str(made)


@contextmanager
def _hub(api: Any, subject: str, *, then: str = "") -> Iterator[None]:
    """Turns what the hub and the network raise into one message."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise ConfigError(f"{subject}: the hub is switched off by HF_HUB_OFFLINE; unset it{then}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ConfigError(
                f"{subject}: the hub refuses the token (HTTP {status}); it needs permission to write{then}"
            ) from None
        raise TrewError(f"{subject}: the hub answers HTTP {status}: {_line(error)}{then}") from None
    except (httpx2.HTTPError, OSError) as error:
        raise TrewError(f"{subject}: the hub at {api.endpoint} cannot be reached: {_line(error)}{then}") from None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
