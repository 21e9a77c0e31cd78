"""What a user's reward function can do wrong, and what happens then (NaN, None, wrong shapes, errors, side effects)."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from rewards_help import group, write
from trew.config import RewardConfig
from trew.errors import RewardError
from trew.rewards import RewardSet
from trew.rewards.user.functions import Sample
from trew.rewards.user.session import Session
from trew.rewards.user.verdicts import Ask, verdicts_of
from trew.types import Group


def returning(tmp_path: Path, expression: str) -> RewardSet:
    source = f"import fractions\nimport numpy as np\ndef f(completions, **kwargs):\n    return {expression}\n"
    return RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, source)}:f")], host=Session())


def values(rewards: RewardSet, *groups: Group) -> list[float | None]:
    return [score.value for scored in rewards.score(groups) for score in scored.scores]


TWO = (group("first", uid="a"), group("second", uid="b"))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("[1.5, 2]", [1.5, 2.0]),
        ("(True, False)", [1.0, 0.0]),
        ("[None, 0.0]", [None, 0.0]),
        ("[None, None]", [None, None]),
        ("[np.float32(0.5), np.int64(3)]", [0.5, 3.0]),
        ("[np.bool_(True), np.array(2.0)]", [1.0, 2.0]),
        ("np.array([0.25, 1.0], dtype=np.float16)", [0.25, 1.0]),
        ("np.array([1, 0])", [1.0, 0.0]),
        ("np.array([True, False])", [1.0, 0.0]),
        ("np.array([None, 1.0], dtype=object)", [None, 1.0]),
        ("[fractions.Fraction(1, 2), -0.0]", [0.5, 0.0]),
    ],
)
def test_returned_values_that_are_fine(tmp_path: Path, expression: str, expected: list) -> None:
    got = values(returning(tmp_path, expression), *TWO)
    assert got == expected
    assert all(type(value) in (float, type(None)) for value in got)


def test_torch_tensors_are_fine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for expression in (
        "__import__('torch').tensor([0.5, 1.0])",
        "list(__import__('torch').tensor([0.5, 1.0], dtype=__import__('torch').bfloat16))",
        "__import__('torch').tensor([0.5, 1.0], requires_grad=True)",
    ):
        assert values(returning(tmp_path, expression), *TWO) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        # 31: NaN and infinity
        ("[1.0, float('nan')]", "returned nan for prompt 'b', completion 'second'; rewards must be finite"),
        ("[float('inf'), 1.0]", "returned inf for prompt 'a', completion 'first'"),
        ("[-float('inf'), 1.0]", "returned -inf for prompt 'a'"),
        ("np.array([1.0, np.nan])", "returned nan for prompt 'b'"),
        ("[10**400, 1]", "rewards must be finite"),
        # 33: length, type, nesting
        ("[1.0]", "returned 1 values for 2 completions, not a list with one number or None per completion"),
        ("[1.0] * 3", "returned 3 values for 2 completions"),
        ("[]", "returned 0 values for 2 completions"),
        ("1.0", r"returned float \(1.0\), not a list"),
        ("None", r"returned NoneType \(None\), not a list .* did you forget `return`\?"),
        ("'11'", r"returned str \('11'\), not a list"),
        ("['1', '1']", r"returned str \('1'\) for prompt 'a', completion 'first', not a number or None"),
        ("[np.str_('1'), 1]", "returned str"),
        ("[[1.0], [1.0]]", r"returned a step 1\.0 for prompt 'a', completion 'first', not \(end, value\)"),
        ("[(1.0,), 1.0]", "returned a step 1.0 for prompt 'a'"),
        ("[[(9, 1.0)], 1.0]", "with end a whole number of tokens from 1 to 5"),
        ("[{'score': 1.0}] * 2", "returned dict"),
        ("{'a': 1, 'b': 2}", "returned dict"),
        ("(c for c in (1.0, 2.0))", "returned generator"),
        ("np.ones((2, 1))", "returned ndarray with 2 dimensions"),
        ("np.array(1.0)", "returned ndarray with 0 dimensions"),
        ("np.array(['a', 'b'])", "returned str"),
        ("[np.ones(1), 1.0]", "returned ndarray"),
        ("[1j, 1.0]", "returned complex"),
    ],
)
def test_returned_values_that_are_refused(tmp_path: Path, expression: str, says: str) -> None:
    with pytest.raises(RewardError, match=says) as error:
        returning(tmp_path, expression).score(TWO)
    assert "reward 'f' (" in str(error.value)
    assert "my_rewards.py" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_object_whose_repr_fails_is_refused_too(tmp_path: Path) -> None:
    source = """
        class Odd:
            def __repr__(self):
                raise RuntimeError("no repr")

        def f(completions, **kwargs):
            return [Odd()] * len(completions)
    """
    rewards = RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, source)}:f")], host=Session())
    with pytest.raises(RewardError, match=r"returned Odd \(unprintable\)"):
        rewards.score(TWO)


# ------------------------------------------------------------------------------------------------- 34: it raises


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return [1 / (len(c) - 6) for c in completions]",
            "raised ZeroDivisionError: .*; for prompt 'b', completion 'second'",
        ),
        ("raise KeyError('k')", "raised KeyError: 'k'; for prompt 'a', completion 'first'"),
        ("import sys; sys.exit(0)", "raised SystemExit: 0"),
        (
            "assert len(completions) < 2, 'too many'",
            "raised AssertionError: too many; only for all 2 completions together",
        ),
        ("raise ValueError('line one\\nline two')", "ValueError: line one line two; for"),
    ],
)
def test_an_error_names_function_line_and_sample(tmp_path: Path, body: str, says: str) -> None:
    source = f"def f(completions, **kwargs):\n    {body}\n    return [1.0] * len(completions)\n"
    rewards = RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, source)}:f")], host=Session())
    with pytest.raises(RewardError, match=says) as error:
        rewards.score(TWO)
    assert "my_rewards.py:2)" in str(error.value)
    evidence = error.value.evidence
    assert evidence["error"] == str(error.value)
    assert "Traceback" in evidence["traceback"]
    assert "my_rewards.py" in evidence["traceback"]
    named = [row["completion"] for row in evidence["completions"]]
    assert named == (["first", "second"] if "together" in says else ["second"] if "'b'" in says else ["first"])


def test_the_search_for_the_sample_has_a_limit(tmp_path: Path) -> None:
    session = Session()
    [f] = session.load([(write(tmp_path, "def f(completions):\n    raise ValueError('no')\n") + ":f", {})])
    samples = [Sample(g.prompt, c.text, ()) for g in TWO for c in g.rollouts]
    with pytest.raises(RewardError, match=r"ValueError: no; .*2 completions.* could not be found"):
        verdicts_of(session, [Ask(f, samples, 60.0)], search_seconds=-1.0)


# ------------------------------------------------------------------------------ 36: it changes the process around it

MEDDLER = """
    import os, random, signal, sys
    import numpy as np

    def f(completions, **kwargs):
        random.seed(0)
        np.random.seed(0)
        os.chdir("/")
        os.environ["TREW_TEST_LEAK"] = "1"
        os.environ.pop("TREW_TEST_KEPT", None)
        signal.signal(signal.SIGINT, signal.SIG_IGN) if kwargs.get("main") else None
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(0)
            sys.modules["torch"].set_num_threads(sys.modules["torch"].get_num_threads() + 1)
        if kwargs.get("fail"):
            raise ValueError("no")
        return [1.0] * len(completions)
"""


@pytest.mark.parametrize("fail", [False, True])
def test_process_state_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: bool) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("TREW_TEST_KEPT", "yes")
    monkeypatch.chdir(tmp_path)
    config = RewardConfig(name=f"{write(tmp_path, MEDDLER)}:f", args={"fail": fail, "main": True})
    rewards = RewardSet.from_config([config], host=Session())
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    handler, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    if fail:
        with pytest.raises(RewardError, match="ValueError: no"):
            rewards.score(TWO)
    else:
        rewards.score(TWO)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert Path.cwd() == tmp_path
    assert "TREW_TEST_LEAK" not in os.environ
    assert os.environ["TREW_TEST_KEPT"] == "yes"
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.get_num_threads() == threads


def test_a_working_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import os, tempfile

        def f(completions, **kwargs):
            folder = tempfile.mkdtemp()
            os.chdir(folder)
            os.rmdir(folder)
            return [1.0] * len(completions)
    """
    monkeypatch.chdir(tmp_path)
    rewards = RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, source)}:f")], host=Session())
    assert values(rewards, *TWO) == [1.0, 1.0]
    assert Path.cwd() == tmp_path


def test_importing_a_file_changes_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = random.getstate()
    source = (
        "import os, random\nos.chdir('/')\nrandom.seed(0)\ndef f(completions):\n    return [0.0] * len(completions)\n"
    )
    RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, source)}:f")], host=Session())
    assert Path.cwd() == tmp_path
    assert random.getstate() == state


def test_the_same_off_the_main_thread(tmp_path: Path) -> None:
    """Built-ins and functions, sync and async, judge alike from any thread (35)."""
    source = "async def f(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    path = write(tmp_path, source)
    rewards = RewardSet.from_config([RewardConfig(name="gsm8k"), RewardConfig(name=f"{path}:f")], host=Session())
    rows = group("#### 72", "#### 7", answer="72")
    got: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: got.append(values(rewards, rows)))
    thread.start()
    thread.join()
    assert got == [values(rewards, rows)] == [[8.0, 6.0]]
