"""TRL's own features under our trainer: adapters, tools, environments, and what TRL makes of them in the batch."""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
import torch
import trl_help
from datasets import Dataset
from peer_compare import GROUPS, TOLERANCE, WRONG, apart, noise
from test_trl_rewards import scripted
from test_trl_trainer import GRPOTrainer, objective, run
from torch import Tensor
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_chat_template

import tiny
import trew
from trew.errors import ConfigError
from trew.integrations.trl import rewards, step

REWARDS = (1.0, 0.0, 0.5, 0.2, 0.1, 0.9, 1.0, 0.3)
LORA = peft.LoraConfig(
    r=4, lora_alpha=8, target_modules=["v_proj", "o_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
)


def of_batch(policy: Any, inputs: dict[str, Tensor], *, adapter: bool = True) -> Tensor:
    """Log-probs with the adapter, or those of the base model."""
    if adapter:
        return trl_help.forward(policy, inputs)[0]
    with policy.disable_adapter(), torch.no_grad():
        return trl_help.forward(policy, inputs)[0]


class TestAdapters:
    def made(self, chosen: trew.Objective, **settings: Any) -> Any:
        functions, rollout = scripted(REWARDS)
        return trl_help.trainer(
            settings, kind=functools.partial(GRPOTrainer, objective=chosen), reward_funcs=functions,
            rollout_func=rollout, peft_config=LORA,
        )  # fmt: skip

    @pytest.mark.parametrize("chosen", [objective("trw-logistic", beta=0.2), objective("gtpo", beta=0.2, kl="k2")])
    def test_the_reference_is_the_model_without_its_adapter(self, chosen):
        made = self.made(chosen)
        assert made.ref_model is None
        with torch.no_grad():
            for i, (name, parameter) in enumerate(made.model.named_parameters()):
                if "lora_B" in name:
                    parameter.copy_(noise(i, *parameter.shape, size=0.1))  # which is 0 at first
        inputs = made._prepare_inputs([{"prompt": trl_help.PROMPTS[g]} for g in GROUPS])
        made.model.zero_grad()
        made._compute_loss(made.model, inputs).backward()
        gradient = trl_help.gradient(made.model)
        order = {"rewards": inputs[step.REWARDS].double(), "group_ids": inputs[step.GROUPS]}
        for adapter, near in ((False, True), (True, False)):
            anchored = {**order, "ref_logprobs": of_batch(made.model, inputs, adapter=adapter).detach()}
            ours = trl_help.ours(chosen, made.model, inputs, **anchored)[1]
            assert apart(ours, gradient) <= TOLERANCE if near else apart(ours, gradient) >= WRONG

    def test_a_run_moves_the_adapter_alone(self):
        def low(completion_ids: list, **_: Any) -> list[float]:
            return [sum(t < 128 for t in ids) / len(ids) for ids in completion_ids]

        kind = functools.partial(GRPOTrainer, objective=objective("trw-logistic", beta=0.01))
        made = run(kind, {"max_steps": 30, "learning_rate": 3e-2, "num_generations": 8}, rows=16, reward_funcs=[low],
                   peft_config=LORA)  # fmt: skip
        start = dict(trl_help.model().named_parameters())
        seen = 0
        for name, parameter in made.model.named_parameters():
            own = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if "lora_" in name:
                assert parameter.requires_grad
                assert parameter.any()
            else:
                assert parameter.equal(start[own])
                seen += 1
        assert seen == len(start)
        logged = [entry for entry in made.state.log_history if "reward" in entry]
        first, last = (sum(entry["reward"] for entry in part) / 5 for part in (logged[:5], logged[-5:]))
        assert last > first + 0.05
        assert logged[-1]["kl"] > 0


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>'


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


class Room:
    """An environment with one tool and a reward of its own."""

    def reset(self, **_: Any) -> None:
        return None

    def look(self) -> str:
        """Looks around."""
        return "a door"

    def get_reward(self) -> float:
        return 1.0


class TestTools:
    def made(self, chosen: trew.Objective, *, reward_funcs: Any, **more: Any) -> Any:
        """A trainer whose first completion of each pair calls the tool, by TRL's own loop."""
        tokenizer = tiny.tokenizer(pad=True)
        tokenizer.chat_template = qwen3_chat_template
        args = GRPOConfig(
            f"{trl_help.folder()}/tools", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            per_device_train_batch_size=4, num_generations=2, max_completion_length=320,
        )  # fmt: skip
        policy = trl_help.model()
        policy.config.max_position_embeddings = 4096
        prompts = [[{"role": "user", "content": text}] for text in trl_help.PROMPTS]
        made = GRPOTrainer(
            policy, reward_funcs, args, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer, objective=chosen, **more,
        )  # fmt: skip
        asked = []

        def generated(prompt_ids: list, *_: Any, **__: Any) -> tuple[list, None]:
            asked.append(len(prompt_ids))
            texts = ["7<|im_end|>"] * len(prompt_ids)
            if len(asked) == 1:
                texts = [CALL if i % 2 == 0 else "no idea<|im_end|>" for i in range(len(prompt_ids))]
            return [tokenizer(text)["input_ids"] for text in texts], None

        made._generate_single_turn = generated
        made.model.train()
        made.current_gradient_accumulation_steps = 1
        return made

    def test_what_a_tool_says_carries_no_loss(self):
        def judged(completions: list, **_: Any) -> list[float]:
            return [float(messages[-1]["content"] == "7") for messages in completions]

        chosen = objective("trw-logistic")
        made = self.made(chosen, reward_funcs=[judged], tools=[add])
        inputs = made._prepare_inputs([{"prompt": [{"role": "user", "content": p}]} for p in "aabb"])
        tools = inputs["tool_mask"] == 0
        text = made._tokenizer.batch_decode([ids[t] for ids, t in zip(inputs["completion_ids"], tools, strict=True)])
        assert sum("<tool_response>\n7\n" in said for said in text) == 2
        assert not (inputs[step.MASK] & tools).any()
        assert (inputs[step.MASK] == (inputs["completion_mask"].bool() & ~tools)).all()
        made.model.zero_grad()
        made._compute_loss(made.model, inputs).backward()
        gradient = trl_help.gradient(made.model)
        given = {"rewards": inputs[step.REWARDS].double(), "group_ids": inputs[step.GROUPS], "max_length": 320}
        for mask, near in ((None, True), (inputs["completion_mask"].bool(), False)):
            ours = trl_help.ours(chosen, made.model, inputs, mask=mask, **given)[1]
            assert apart(ours, gradient) <= TOLERANCE if near else apart(ours, gradient) >= WRONG

    def test_an_environment_s_reward_counts(self):
        made = self.made(objective("dapo"), reward_funcs=None, environment_factory=Room)
        made._prepare_inputs([{"prompt": [{"role": "user", "content": p}]} for p in "aabb"])
        assert made._metrics["train"]["rewards/Room/mean"] == [1.0]

    def test_an_environment_s_reward_that_would_be_dropped(self):
        stepped = rewards.steps(lambda completions, **_: [[] for _ in completions])
        with pytest.raises(ConfigError, match="get_reward among them"):
            self.made(objective("grpo-process"), reward_funcs=[stepped], environment_factory=Room)
