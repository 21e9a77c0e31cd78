"""Models with two rotary tables: sequences stay within the length of the first one."""

import numpy as np
import pytest
from transformers import AutoConfig

import tiny
from trew.errors import EngineError
from trew.learner.autograd import AutogradRunner, by_sample
from trew.learner.runner import RunnerSettings
from trew.models import loading, positions
from trew.rollout.endings import facts_of
from trew.types import Prompt, TrainingSample

FACTORS = tiny.config("llama").head_dim // 2
LONG = {
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * FACTORS, "long_factor": [4.0] * FACTORS,
    },
}  # fmt: skip


def test_a_model_with_two_rotary_tables_has_the_positions_of_the_first(tmp_path):
    model = tiny.model("llama", **LONG)
    model.save_pretrained(tmp_path)
    assert loading.positions(str(tmp_path)) == facts_of(model).positions == 16
    with pytest.raises(EngineError, match="16 positions"):
        facts_of(model).check(Prompt("a", text="?"), [1] * 10, 7)
    assert positions.notes(model.config.to_dict())[0].startswith("model: of its 128 positions, 16 are used")
    assert positions.notes(tiny.config("llama").to_dict()) == []


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "codegen", "gpt_bigcode", "mpt"])
def test_the_context_length_is_found_whatever_the_family_calls_it(kind):
    """Beyond it these models fail in a table of positions."""
    length = "max_seq_len" if kind == "mpt" else "n_positions"
    table = AutoConfig.for_model(kind, **{length: 48}).to_dict()
    assert positions.positions_of(table) == 48
    assert positions.notes(table) == []


def test_a_prompt_that_leaves_gpt2_too_few_positions_is_refused():
    facts = facts_of(tiny.model("gpt2", max_position_embeddings=16))
    with pytest.raises(EngineError, match="16 positions"):
        facts.check(Prompt("a", text="?"), [1] * 10, 7)


def test_of_tables_for_kinds_of_layers_the_shortest_counts():
    table = {
        "max_position_embeddings": 64,
        "rope_scaling": {"sliding": {"rope_type": "default"}, "full": {"type": "su"}},
        "original_max_position_embeddings": 32,
    }
    assert positions.positions_of(table) == 32


@pytest.mark.parametrize(("length", "same"), [(16, True), (17, False)])
def test_beyond_them_log_probs_would_depend_on_what_stands_beside(length, same):
    """Why there is a limit: within it packing changes nothing."""
    rng = np.random.default_rng(0)

    def sample(tokens: int, group: int) -> TrainingSample:
        return TrainingSample(rng.integers(3, 64, 4), rng.integers(3, 64, tokens - 4), group)

    few, other = [sample(10, 0), sample(9, 0)], sample(length + 1, 1)
    runner = AutogradRunner(tiny.model("llama", **LONG), RunnerSettings(share_prompts=False, budget=1000))
    alone, beside = by_sample(runner, few), by_sample(runner, [*few, other])[: 6 + 5]
    assert (float((alone - beside).abs().max()) < 1e-4) is same
