"""What a run says first, in processes of their own: whether there is a compiler is looked for once."""

from __future__ import annotations

import pytest

import tiny

RECIPE = """
model = "model"
steps = 1
device = "cpu"
data.task = "arithmetic"
rollout = { prompts = 2, completions = 2, max_tokens = 4 }
eval.size = 2
checkpoint.every = 0
"""


@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (
            {"CC": "no-such-compiler"},
            [],
            "because there is no C compiler 'no-such-compiler', which CC names; correct CC, or unset it, for",
        ),
        ({"TREW_NATIVE": "0"}, [], "because TREW_NATIVE=0 switches it off\n"),
        ({"CC": "no-such-compiler"}, ["--set", "kernels=plain"], ""),
    ],
    ids=["no compiler", "switched off", "plain was asked for"],
)
def test_a_run_says_that_it_takes_the_plain_path(change, settings, says, tmp_path, server):
    tiny.save(tmp_path / "model")
    (tmp_path / "r.toml").write_text(RECIPE)
    said = server.run("train", "r.toml", *settings, cwd=tmp_path, **change)
    (headline,) = (line for line in said.splitlines(keepends=True) if line.startswith("grpo: "))
    assert ("on the plain path of PyTorch" in headline) == bool(says)
    assert says in headline
