"""Training as a library: what the caller has set for its own code changes nothing, and is as it was afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import crashing
import trew
from run_help import configured, save_models
from trew.errors import ConfigError
from trew.training.alone import alone
from trew.utils.console import Silent


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def trained(folder: Path, model: Path, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a run without what a clock said."""
    folder.mkdir()
    config = configured(folder, model, steps=2, **settings)
    trew.train(config, display=Silent())
    return crashing.rows(Path(config.out))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CALLERS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "another device": lambda: torch.device("meta"),
}


@pytest.fixture(scope="module", params=["native", "plain"])
def alike(request, models, tmp_path_factory) -> tuple[dict[str, Any], Path, list[dict[str, Any]]]:
    """Settings, the model, and the rows of a run that nothing is around."""
    settings = {} if request.param == "native" else {"kernels": "plain", "linear": "plain"}
    return settings, models["native"], trained(tmp_path_factory.mktemp("alone") / "run", models["native"], **settings)


@pytest.mark.parametrize("caller", CALLERS)
def test_settings_of_the_caller_change_nothing(alike, caller, tmp_path):
    settings, model, expected = alike
    with CALLERS[caller]():
        before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = trained(tmp_path / "run", model, **settings)
        assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        assert torch.empty(1).device.type == ("meta" if caller == "another device" else "cpu")
    assert found == expected


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_refused(enabled, models, tmp_path):
    """Also switched off: copies of weights that are cast inside would outlive their updates."""
    with torch.autocast("cpu", enabled=enabled), pytest.raises(ConfigError, match=r"inside torch\.autocast"):
        trained(tmp_path / "run", models["native"])
    assert trained(tmp_path / "again", models["native"])


def test_a_second_training_in_the_same_process_is_refused(models, tmp_path):
    refused: list[str] = []
    number = itertools.count()

    def second(row: Any) -> None:
        def work() -> None:
            try:
                trained(tmp_path / f"second-{next(number)}", models["native"])
            except ConfigError as error:
                refused.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    (tmp_path / "first").mkdir()
    trew.train(configured(tmp_path / "first", models["native"], steps=1), display=Silent(), on_row=second)
    assert refused
    assert all("another one runs in this process" in text for text in refused)
    assert trained(tmp_path / "third", models["native"])


def test_an_error_leaves_room_for_the_next():
    with pytest.raises(KeyError), alone():
        raise KeyError("x")
    with alone():
        pass


def test_a_handler_that_python_did_not_set_is_there_again(tmp_path):
    """faulthandler's dumps stacks; without it the signal ends the process."""
    dump = tmp_path / "dump"
    program = f"""
import faulthandler, os, signal
from trew.utils.signals import Interrupts
file = open({str(dump)!r}, "w")
faulthandler.register(signal.SIGUSR1, file=file)
with Interrupts() as interrupts:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert interrupts.asked == signal.SIGUSR1
assert os.path.getsize({str(dump)!r}) == 0
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
os.kill(os.getpid(), signal.SIGUSR1)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "alive\n", done.stderr
    assert "Current thread" in dump.read_text()
