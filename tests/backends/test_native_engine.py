"""All that holds for the engine, with the compiled kernels."""

from __future__ import annotations

import pytest

import test_rollout_engine
import tiny
from test_rollout_engine import (  # noqa: F401
    test_a_special_token_can_be_a_stop_string,
    test_a_stop_string_ends_the_completion_and_is_cut,
    test_a_stop_token_ends_the_completion_and_stays_in_it,
    test_bfloat16_autocast_stays_close_and_reports_float32,
    test_draws_do_not_depend_on_the_batch,
    test_end_tokens_of_the_generation_configuration_count,
    test_greedy_equals_transformers_generate,
    test_groups_keep_order_and_carry_prompt_and_version,
    test_logprobs_and_entropies_agree_with_the_plain_forward,
    test_modes_come_back_after_an_error,
    test_more_samples_extend_the_group,
    test_one_token_is_enough,
    test_output_that_is_not_finite_names_the_prompt,
    test_progress_counts_completions,
    test_sampling_logprobs_are_those_of_the_cut_distribution,
    test_seed_uid_and_sample_number_all_change_the_draws,
    test_training_goes_on_as_if_nothing_had_been_generated,
    test_weights_are_read_anew_each_time,
)
from trew.backends.cpu import build
from trew.backends.cpu.backend import CpuBackend

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="no compiler")


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setattr(test_rollout_engine, "WIDTHS", tiny.wide)
    monkeypatch.setattr(test_rollout_engine, "BACKEND", CpuBackend)
