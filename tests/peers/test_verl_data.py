"""Our converted data in verl's own data set, and our graders in its reward loop, as far as they go without a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

import trew.integrations.verl.rewards as rewards
from trew.cli.data import convert
from trew.data.files import write_rows

ROWS = [
    {"prompt": "What is 2 + 2 ?", "gold": 4, "level": 1, "meta": {}, "tags": ["a"]},
    {"prompt": "What is 3 * 3 ?", "gold": "9", "level": 2, "meta": None, "tags": []},
    {"prompt": [{"role": "system", "content": "Be short"}, {"role": "user", "content": "1 / 2 ?"}], "gold": "0.5"},
]
WORDS = [word for row in ROWS for word in str(row["prompt"]).split()] + ["boxed", "4", "9", "5"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words as tokens, and a chat template."""
    words = Tokenizer(
        WordLevel({word: i for i, word in enumerate(["[unk]", *dict.fromkeys(WORDS)])}, unk_token="[unk]")
    )
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unk]", pad_token="[unk]", eos_token="[unk]")
    made.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    return made


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_verl_reads_what_we_convert(tmp_path: Path, suffix: str):
    source, out = tmp_path / "rows.jsonl", tmp_path / f"verl.{suffix}"
    write_rows(source, ROWS)
    convert(str(source), str(out), to="verl", data_source="mine")
    settings = {"max_prompt_length": 64, "filter_overlong_prompts": True, "filter_overlong_prompts_workers": 1}
    config = OmegaConf.create(settings | {"cache_dir": str(tmp_path / "cache")})
    found = RLHFDataset(data_files=str(out), tokenizer=tokenizer(), config=config)
    assert len(found) == len(ROWS)  # verl drops rows whose template fails, with no more than a line of text
    [batch] = DataLoader(found, batch_size=3, collate_fn=collate_fn)
    assert list(batch["data_source"]) == ["mine"] * 3
    assert [row["ground_truth"] for row in batch["reward_model"]] == ["4", "9", "0.5"]
    assert [int(i) for i in batch["index"]] == [0, 1, 2]
    assert batch["raw_prompt"][2][0]["content"] == "Be short"
    assert batch["extra_info"][0]["level"] == 1
    back = tmp_path / "back.jsonl"
    convert(str(out), str(back), to="trew")
    assert back.exists()


@pytest.mark.parametrize("path", ["pkg://trew.integrations.verl.rewards", rewards.__file__])
def test_our_graders_in_verl_s_reward_loop(path: str):
    settings = {"custom_reward_function": {"path": path, "name": "compute_score", "reward_kwargs": {
        "rewards": [{"name": "gsm8k", "weight": 2.0, "args": {"mode": "flexible"}}]}}}  # fmt: skip
    config = OmegaConf.create({"reward": settings, "data": {"reward_fn_key": "data_source"}})
    function = get_custom_reward_fn(config)
    words = tokenizer()
    manager = get_reward_manager_cls("naive")(config, words, function)
    for answer, expected in (("4", 2.0), ("9", 0.0)):
        ids = torch.tensor([words.encode(answer)])
        data = DataProto.from_dict(
            {"responses": ids, "attention_mask": torch.ones_like(ids)},
            {"data_source": np.array(["mine"], dtype=object), "extra_info": np.array([{"index": 0}], dtype=object),
             "reward_model": np.array([{"style": "rule", "ground_truth": "4"}], dtype=object)},
        )  # fmt: skip
        found = asyncio.run(scored(manager, data))
        assert found["reward_score"] == expected
        assert found["reward_extra_info"] == {"score": expected, "judged": 1.0, "gsm8k": expected / 2}


async def scored(manager, data):
    manager.loop = asyncio.get_running_loop()
    return await manager.run_single(data)
