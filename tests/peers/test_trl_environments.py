"""One environment class in TRL and in trew, with the same scripted replies: equal tokens, masks and rewards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import tiny
import trl_environments
from test_episodes import Scripted
from trew.env.hosts import Hosts
from trew.env.load import Spec
from trew.env.tools import recognised
from trew.rollout import Renderer
from trew.rollout.bridge import Bridges
from trew.rollout.episodes import Episodes, Limits
from trew.rollout.generate import generate
from trew.types import Prompt, Sampling

TEMPLATES = Path(trl.__file__).with_name("chat_templates")
ROW = {"prompt": [{"role": "user", "content": "Count."}], "target": 3}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def call(name: str, arguments: str = "{}") -> str:
    return CALL.format(name, arguments)


SCRIPTS = [
    [call("increment", '{"times": 3}'), "Done."],
    [call("increment"), "Well: " + call("facts"), "I give up."],
    [call("increment", '{"times": -1}') + "\n" + call("increment", '{"times": 3}'), "It is 3."],
    ["I do not know."],
]
"""Calls that succeed, calls that fail, two calls at once, and none."""


def tokenizer(name: str):
    made = tiny.tokenizer(pad=True)
    made.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return made


def theirs(name: str) -> tuple[dict, list[float]]:
    """What TRL makes of the scripts: the batch, and the rewards."""
    spoken = tokenizer(name)
    model = tiny.model("llama", max_position_embeddings=8192)
    folder = tempfile.mkdtemp(prefix="trew-peers-")
    arguments = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", max_completion_length=4096, save_strategy="no",
        per_device_train_batch_size=len(SCRIPTS), num_generations=len(SCRIPTS), disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=arguments, processing_class=spoken, environment_factory=trl_environments.Counter,
        train_dataset=Dataset.from_list([ROW]),
    )  # fmt: skip
    trainer.model.train()
    seen: list[list[int]] = []
    turns = [0] * len(SCRIPTS)

    def scripted(prompt_ids, *_, **__):
        which = range(len(SCRIPTS)) if not seen else [_of(ids, seen, said) for ids in prompt_ids]
        found = []
        for i, ids in zip(which, prompt_ids, strict=True):
            reply = [*spoken(SCRIPTS[i][turns[i]])["input_ids"], spoken.eos_token_id]
            turns[i] += 1
            if i == len(seen):
                seen.append([])
                said.append([])
            seen[i] = [*ids, *reply]
            said[i] = reply
            found.append(reply)
        return found, None

    said: list[list[int]] = []
    trainer._generate_single_turn = scripted
    batch = trainer._generate_and_score_completions([dict(ROW) for _ in SCRIPTS])
    return batch, list(trainer._logs["rewards"]["Counter"])[-len(SCRIPTS) :]


def _of(ids, seen, said) -> int:
    """Which sample's history continues with ``ids``."""
    [found] = [i for i, before in enumerate(seen) if ids[: len(before)] == before and len(ids) > len(before)]
    return found


def ours(name: str) -> tuple:
    """The group that trew makes of the scripts."""
    renderer = Renderer(tokenizer(name))
    hosts = Hosts(Spec(f"trl:{trl_environments.__file__}:Counter"), size=1)
    try:
        episodes = Episodes(
            Scripted(renderer, lambda request, turn: SCRIPTS[request.sample][turn]), hosts, Bridges(renderer),
            limits=Limits(turns=8, tokens=8192, observation=4096), ends=renderer.stop_ids,
            format=recognised(renderer.apply),
        )  # fmt: skip
        prompt = Prompt("p", messages=tuple(ROW["prompt"]), columns={"target": ROW["target"]})
        [group] = generate(episodes, [prompt], n=len(SCRIPTS), sampling=Sampling(max_tokens=512))
        return group.rollouts
    finally:
        hosts.close()


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_the_same_class_gives_the_same_tokens_masks_and_rewards(name, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    batch, rewards = theirs(name)
    rollouts = ours(name)
    for i, rollout in enumerate(rollouts):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
        ids = batch["completion_ids"][i][batch["completion_mask"][i].bool()]
        mask = batch["tool_mask"][i][batch["completion_mask"][i].bool()].bool()
        assert rollout.prompt_ids.tolist() == prompt.tolist()
        assert rollout.token_ids.tolist() == ids.tolist()
        assert torch.equal(torch.from_numpy(rollout.sampled.copy()), mask)
        assert rollout.turns[-1].reward == rewards[i]
    assert rewards == [1.0, 0.0, 1.0, 0.0]
