"""A real TRL trainer around a two-layer model, and trew on the same model and the same batch."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peer_compare import GROUPS, LENGTHS, MAX_LENGTH, noise, ragged_mask
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

import tiny
import trew

PROMPTS = ("ab", "cdefg")
GENERATIONS = 4


@functools.cache
def folder() -> str:
    """Where the policy lies on disk: with beta > 0 a trainer loads its reference from there."""
    path = tempfile.mkdtemp(prefix="trew-peers-")
    tiny.save(path)
    return path


def model() -> Any:
    """The policy, in float64."""
    policy = tiny.model("llama").double()
    policy.config._name_or_path = folder()
    return policy


def trainer(
    settings: dict[str, Any],
    *,
    kind: Any = GRPOTrainer,
    config: Any = GRPOConfig,
    rows: int = len(LENGTHS),
    **more: Any,
) -> Any:
    """A trainer of TRL as a user makes it, in training mode, ready for its loss to be called."""
    given = {"per_device_train_batch_size": rows, "num_generations": GENERATIONS, "learning_rate": 0.1} | settings
    arguments = config(
        output_dir=f"{folder()}/out", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        max_completion_length=MAX_LENGTH, temperature=1.0, save_strategy="no", disable_tqdm=True, **given,
    )  # fmt: skip
    given_functions = more.pop("reward_funcs", [lambda completions, **_: [0.0] * len(completions)])
    made = kind(
        model=model(), reward_funcs=given_functions, args=arguments, processing_class=tiny.tokenizer(pad=True),
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}), **more,
    )  # fmt: skip
    made.model.train()
    made.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    return made


def batch(*, advantages: str = "sequence", holes: bool = False) -> dict[str, Tensor]:
    """What ``_compute_loss`` is given: ragged prompts and completions, and advantages of both signs."""
    rows, width, prompt = len(LENGTHS), max(LENGTHS), 5
    draw = torch.Generator().manual_seed(1)
    prompt_mask = torch.arange(prompt)[None, :] >= torch.tensor([prompt - len(PROMPTS[g]) for g in GROUPS])[:, None]
    completion_mask = ragged_mask().long()
    out = {
        "prompt_ids": torch.randint(0, 256, (rows, prompt), generator=draw),
        "prompt_mask": prompt_mask.long(),
        "completion_ids": torch.randint(0, 256, (rows, width), generator=draw),
        "completion_mask": completion_mask,
        "advantages": noise(2, rows) if advantages == "sequence" else noise(2, rows, width),
    }
    if holes:
        out["tool_mask"] = ragged_mask(holes=True).long()
    out["num_items_in_batch"] = loss_mask(out).sum()
    return out


def loss_mask(inputs: dict[str, Tensor]) -> Tensor:
    """Tokens that carry loss."""
    return (inputs["completion_mask"] * inputs.get("tool_mask", torch.ones(()))).bool()


def forward(policy: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the completion and entropies, (B, T), by a plain forward pass in float64."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    start = inputs["prompt_ids"].shape[1] - 1
    table = policy(input_ids=ids, attention_mask=attention).logits[:, start:-1].log_softmax(-1)
    logprobs = table.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
    return logprobs, -(table.exp() * table).sum(-1)


def gradient(policy: Any) -> Tensor:
    """All parameters' gradients, as one vector."""
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def theirs(made: Any, inputs: dict[str, Tensor], *, parts: int = 1) -> tuple[Tensor, Tensor]:
    """TRL's loss and gradient; in ``parts`` micro-batches of one optimizer step."""
    made.model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    size = len(inputs["completion_ids"]) // parts
    for start in range(0, parts * size, size):
        rows = {k: v[start : start + size] if v.dim() else v for k, v in inputs.items()}
        loss = made._compute_loss(made.model, rows)
        loss.backward()
        total += loss.detach()
    return total, gradient(made.model)


def ours(
    objective: Any, policy: Any, inputs: dict[str, Tensor], *, mask: Tensor | None = None, **fields: Any
) -> tuple[Tensor, Tensor, Any]:
    """trew's loss and gradient on the same batch, and all it returned; ``fields`` replace the advantages."""
    policy.zero_grad()
    logprobs, entropies = forward(policy, inputs)
    entropies = entropies if objective.entropy_bonus.active else entropies.detach()
    names = {"old_per_token_logps": "old_logprobs", "ref_per_token_logps": "ref_logprobs",
             "sampling_per_token_logps": "rollout_logprobs"}  # fmt: skip
    given = {"group_ids": torch.tensor(GROUPS), "max_length": MAX_LENGTH, "entropies": entropies}
    given |= {mine: inputs[name].double() for name, mine in names.items() if name in inputs}
    given |= fields or {"advantages": inputs["advantages"]}
    made = trew.TokenBatch.from_padded(logprobs=logprobs, mask=loss_mask(inputs) if mask is None else mask, **given)
    output = objective.loss(made)
    output.loss.backward()
    return output.loss.detach(), gradient(policy), output
