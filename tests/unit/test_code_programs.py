"""Programs that are right and must score 1, whatever way they are written in; the sandbox runs each of them."""

from __future__ import annotations

import pytest

from trew.errors import SandboxError
from trew.rewards import grade
from trew.rewards.builtin.kinds import gold_problem
from trew.rewards.sandbox import boundary


@pytest.fixture(scope="module", autouse=True)
def sandbox():
    try:
        return boundary()
    except SandboxError as error:
        pytest.skip(str(error))


def printed(program, output, **args):
    """The verdict on a program that reads nothing and is to print ``output``."""
    return grade("code_stdin", f"```python\n{program}\n```", tests=[{"input": "", "output": output}], **args)


def asserted(program, *asserts, setup=""):
    """The verdict on a program whose function f is to satisfy the asserts."""
    return grade("code_func", f"```python\n{program}\n```", entry_point="f", asserts=list(asserts), setup=setup)


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys\nsys.exit()"])
def test_a_program_may_end_itself_by_exit_and_quit(end):
    assert printed(f"print(5)\n{end}\nprint(6)", "5").score == 1
    assert printed("print(5)\nexit(3)", "5").score == 0


def test_a_long_output_may_consist_of_characters_of_several_bytes():
    assert printed("print('\u5b57' * 1_500_000)", "\u5b57" * 1_500_000).score == 1


def test_a_reference_is_checked_under_the_settings_of_the_run():
    row = {"tests": [{"input": "", "output": "5"}], "solution": "held = bytearray(600 << 20)\nprint(5)"}
    assert "MemoryError" in gold_problem("code_stdin", row, {})
    assert gold_problem("code_stdin", row, {"memory_mb": 800, "thinking": True}) == ""
    row = {"entry_point": "f", "asserts": ["assert f() == 5"], "code": "held = bytearray(200 << 20)\ndef f(): return 5"}
    assert gold_problem("code_func", row, {}) == ""
    assert "MemoryError" in gold_problem("code_func", row, {"memory_mb": 64})
