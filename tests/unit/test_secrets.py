"""What is taken for a secret, and what of a run's files is masked: values of texts, never trew's own words."""

from __future__ import annotations

import json
import tomllib

import pyarrow.parquet as pq
import pytest

from test_track_run import scored
from trew.config import Config, RewardConfig, choices, dumps, parse
from trew.config.schema import ObjectiveConfig
from trew.errors import ConfigError
from trew.runs import RunFolder, read_config, redact_config
from trew.runs.folder import decode_row
from trew.utils.secrets import MASK, can_be_secret, redact, redact_names, token

ORDINARY = {
    "METRIC_KEY": "accuracy", "SORT_KEY": "rollout", "MAX_TOKENS": "100000", "GROUP_KEY": "eval_accuracy",
    "CACHE_KEY": "smollm2-135m-instruct", "PATH_KEY": "/home/somebody/data/train.jsonl", "BEST_KEY": "reward/odd",
    "TOKENIZERS_PARALLELISM": "false", "OPTIMIZER_KEY": "adamw-offload", "SEED_TOKEN": "20240101",
    "MONKEY_NAME": "x7!q9Zk2", "KEYBOARD": "de-latin1-x9Q2", "MONKEYS": "hf_x9Q2aaaaaa",
}  # fmt: skip
SECRET = {
    "OPENAI_API_KEY": "sk-canary-1", "HF_TOKEN": "hf_canary_2", "WANDB_API_KEY": "0123456789abcdef0123456789",
    "DB_PASSWORD": "correct-horse", "MY_SECRET": "hunter2", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
    "api_key": "550e8400-e29b-41d4-a716-446655440000", "my-token": 'x"9\\canary',
}  # fmt: skip


@pytest.fixture
def ordinary(monkeypatch):
    for name, value in ORDINARY.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_words_and_numbers_are_no_secrets(name):
    assert not can_be_secret(name, ORDINARY[name])


@pytest.mark.parametrize("name", SECRET)
def test_what_looks_like_a_secret_is_one(name):
    assert can_be_secret(name, SECRET[name])


def test_the_words_of_a_run_stay_what_they_are(ordinary, tmp_path):
    config = Config(model="m", steps=100000, rewards=(RewardConfig(name="/odd.py:odd"),))
    with RunFolder.open(tmp_path / "r") as run:
        run.write_config(dumps(config))
        run.log({"step": 1, "accuracy": 0.5, "eval_accuracy": 0.5, "rollout": "accuracy"})
        run.write_summary({"accuracy": {"mean": 1.0}, "rollout": 100000})
    assert parse(tomllib.loads(read_config(tmp_path / "r") or "")) == config
    row = decode_row((tmp_path / "r" / "metrics.jsonl").read_text())
    assert row == {"step": 1, "accuracy": 0.5, "eval_accuracy": 0.5, "rollout": "accuracy"}
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["rollout"] == 100000


def test_keys_numbers_and_choices_stay_and_values_of_texts_go(monkeypatch):
    """Even where a password is all of these."""
    monkeypatch.setenv("A_PASSWORD", "20240101")
    monkeypatch.setenv("B_PASSWORD", "adamw-8bit")
    monkeypatch.setenv("C_PASSWORD", "microbatch_tokens")
    config = parse({
        "model": "hub/20240101", "seed": 20240101,
        "learner": {"optimizer": "adamw-8bit", "microbatch_tokens": 20240101},
        "data": {"args": {"note": "it is microbatch_tokens"}},
    })  # fmt: skip
    after = parse(tomllib.loads(redact_config(dumps(config))))
    assert after.model == f"hub/{MASK}"
    assert after.data.args == {"note": f"it is {MASK}"}
    assert (after.seed, after.learner) == (config.seed, config.learner)
    assert redact({"microbatch_tokens": ["microbatch_tokens", 20240101]}) == {"microbatch_tokens": [MASK, 20240101]}


def test_a_column_of_data_is_still_json_with_a_secret_in_it(monkeypatch, tmp_path):
    monkeypatch.setenv("A_PASSWORD", "20240101")
    with RunFolder.open(tmp_path / "r") as run:
        path = run.write_rollouts(1, [scored("it is 20240101", gold=20240101, note="20240101")])
    row = pq.read_table(path).to_pylist()[0]
    assert json.loads(row["columns"]) == {"gold": 20240101, "note": MASK}
    assert row["completion"] == f"it is {MASK}"


def test_secrets_in_prompts_names_are_masked_and_no_prompt_is_lost(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary_2")
    named = {"hf_canary_2": 0.5, "a": 1.0, "[redacted]": 0.0, "x/hf_canary_2/3": 0.25}
    masked = redact_names(named)
    assert list(masked.values()) == list(named.values())
    assert not any("canary" in name for name in masked)


def test_choices_are_those_of_the_schema():
    assert {"adamw-8bit", "bfloat16", "truncate", "skip"} <= choices()
    assert choices(ObjectiveConfig) == frozenset()


@pytest.mark.parametrize("given", ["", "abcdefghijklmnop", "abcdefghijklmnop\n", "abcdefghijklmnop\r\n"])
def test_a_token_that_came_out_of_a_file_is_that_of_the_file(monkeypatch, given):
    """As it was, its line break was refused by what writes requests, in a message with the whole token."""
    monkeypatch.setenv("TREW_SERVER_TOKEN", given)
    assert token("TREW_SERVER_TOKEN") == given.strip()
    monkeypatch.delenv("TREW_SERVER_TOKEN")
    assert token("TREW_SERVER_TOKEN") == ""


@pytest.mark.parametrize("given", ["\u201cabcdefghijklmnop\u201d", "abcdefgh\nijklmnop", "abcdefgh ijklmnop"])
def test_a_token_that_no_request_can_carry_is_refused_and_not_shown(monkeypatch, given):
    monkeypatch.setenv("TREW_SERVER_TOKEN", given)
    with pytest.raises(ConfigError, match=r"TREW_SERVER_TOKEN: got a token of 1[78] characters") as error:
        token("TREW_SERVER_TOKEN")
    assert "abcdefgh" not in str(error.value)
