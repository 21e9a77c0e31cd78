"""Models whose weights no vLLM server would accept are refused before anything starts."""

from __future__ import annotations

import pytest
from tests import tiny

from trew.cli.main import main
from trew.weights import stored_names

RENAMED = {"mixtral": "experts.0.w1.weight", "gpt_neox": "embed_out.weight"}


def exit_code(command: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("kind", [*(kind for kind in tiny.KINDS if kind not in RENAMED), "mistral", "smollm3"])
def test_models_that_are_held_as_they_are_stored(tmp_path, kind):
    """Among them models with tied heads, which files do not hold."""
    assert stored_names.problems(str(tiny.save(tmp_path, kind))) == []


@pytest.mark.parametrize("kind", RENAMED)
def test_a_model_that_transformers_renames_is_refused_for_servers_alone(tmp_path, capsys, kind):
    model = tiny.save(tmp_path / "model", kind)
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'model = "{model}"\nsteps = 1\nout = "{tmp_path / "run"}"\n[data]\ntask = "arithmetic"\n[eval]\nsize = 8\n'
        "[rollout]\nprompts = 2\ncompletions = 2\nmax_tokens = 4\n"
    )
    assert exit_code(["train", str(recipe), "--dry-run"]) == 0
    capsys.readouterr()
    served = ["--set", 'cluster.rollout="vllm"', "cluster.servers=1"]
    assert exit_code(["train", str(recipe), "--dry-run", *served]) == 2
    said = capsys.readouterr().err
    assert "cluster.rollout: got 'vllm', accepts 'embedded' for this model" in said
    assert RENAMED[kind] in said
    assert not (tmp_path / "run").exists()
