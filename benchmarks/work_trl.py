"""TRL's side of step.py, a process in TRL's own environment: work_trl.py WORK MODEL OUT OURS writes one JSON file.

A GRPOTrainer as its users make it. ``OURS`` is what our side wrote for the same work: completions end where ours did,
and the first step, the warm-up, learns from our completions, so that loss and gradient norm can be compared.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from work import Clock, EndAt, Load, Watch, Work, end_ids, rewards, texts


class Steps(TrainerCallback):
    """Closes a step after its last inner update: the time since the one before is its own, whatever was done in it."""

    def __init__(self, clock: Clock, inner: int):
        self.clock, self.inner, self.start, self.load = clock, inner, clock.time(), Load()
        self.rows: list[dict[str, Any]] = []
        self.seen: dict[str, float] = defaultdict(float)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.clock.wrap(objects["optimizer"], "step", "optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.inner:
            return
        now = self.clock.time()
        phases = self.clock.take() | {"total": now - self.start}
        seen = {k: v / self.inner if k in ("loss", "grad_norm") else v for k, v in self.seen.items()}
        self.rows.append({"phases": phases, **seen, "foreign_cpu": self.load.foreign()})
        self.start, self.load, self.seen = now, Load(), defaultdict(float)


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    work, model, out = Work.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    ours = json.loads(Path(sys.argv[4]).read_text())
    if work.threads:
        torch.set_num_threads(work.threads)
    trainer = make(work, model)
    watch, clock = Watch(work.device), Clock(work.device)
    steps = Steps(clock, work.inner)
    hook_generation(trainer, work, ours["rollouts"], steps)
    hook_phases(trainer, clock, steps)
    trainer.add_callback(steps)
    trainer.train()
    out.write_text(json.dumps({"steps": steps.rows, **watch.result()}))


def make(work: Work, model: Path) -> GRPOTrainer:
    """The trainer. Unless the work asks for its defaults, precision and micro-batch are given and nothing is
    recomputed; the rest is the same objective as ours: the paper's GRPO loss."""
    given: dict[str, Any] = {"per_device_train_batch_size": min(8, work.sequences)}
    if not work.peer_defaults:
        given = {
            "per_device_train_batch_size": work.peer_rows or work.sequences, "gradient_checkpointing": False,
            "bf16": work.dtype == "bfloat16",
        }  # fmt: skip
    given["gradient_accumulation_steps"] = work.sequences // given["per_device_train_batch_size"]
    end = work.shape["vocab_size"] - 1
    args = GRPOConfig(
        output_dir=str(model / "trl"), use_cpu=work.device == "cpu", report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1_000_000, max_steps=(1 + work.steps) * work.inner, shuffle_dataset=False,
        num_generations=work.group, max_completion_length=work.completion_tokens, learning_rate=1e-6,
        lr_scheduler_type="constant", loss_type="grpo", beta=work.beta, num_iterations=work.inner, epsilon=0.2,
        use_bias_correction_kl=False,
        # At fixed lengths the end token is one that the model cannot draw.
        generation_kwargs={"eos_token_id": end if work.ragged else end + 1}, **given,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model), args=args, processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=[lambda completions, **_: rewards(len(completions))],
        train_dataset=Dataset.from_dict({"prompt": texts(work)}),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.eos_token_ids = [args.generation_kwargs["eos_token_id"]]
    return trainer


def hook_generation(trainer: Any, work: Work, ours: list[list[list[list[int]]]], steps: Steps) -> None:
    """Completions of the first step become ours; in all steps they end where ours did."""
    generate, single_turn = trainer.model.generate, trainer._generate_single_turn
    eos, calls = trainer.eos_token_ids, iter(range(1 + work.steps))

    def generated(**kwargs: Any) -> torch.Tensor:
        step = next(calls)
        trainer.eos_token_ids = eos
        rows = [row for group in ours[step] for row in group]
        if work.ragged:
            lengths = [len(row) for row in rows]
            kwargs["logits_processor"] = [EndAt(lengths, prompt_tokens=work.prompt_tokens, end=eos[0])]
        ids = generate(**kwargs)
        if step == 0:
            width = max(map(len, rows))
            trainer.eos_token_ids = end_ids(work) if work.ragged else eos
            pad = torch.full((len(rows), width), work.shape["vocab_size"] - 1)
            for i, row in enumerate(rows):
                pad[i, : len(row)] = torch.tensor(row)
            ids = torch.cat([ids[:, : work.prompt_tokens], pad.to(ids.device)], dim=1)
        return ids

    def counted(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        completion_ids, logprobs = single_turn(prompt_ids, *args, **kwargs)
        steps.seen["prompt_tokens"] += sum(map(len, prompt_ids))
        steps.seen["completion_tokens"] += sum(map(len, completion_ids))
        return completion_ids, logprobs

    trainer.model.generate, trainer._generate_single_turn = generated, counted


def hook_phases(trainer: Any, clock: Clock, steps: Steps) -> None:
    clock.wrap(trainer, "_generate", "generate")

    def whose(model: Any, *_: Any, **__: Any) -> str:
        return "ref" if model is trainer.ref_model else "old"

    clock.wrap(trainer, "_get_per_token_logps_and_entropies", whose)  # inside compute_loss it is part of forward
    compute, clip = trainer.compute_loss, trainer.accelerator.clip_grad_norm_

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        steps.seen["loss"] += float(loss.detach())
        return loss

    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        steps.seen["grad_norm"] += float(norm)
        return norm

    trainer.compute_loss, trainer.accelerator.clip_grad_norm_ = compute_loss, clip_grad_norm_
    clock.wrap(trainer, "compute_loss", "forward")
    clock.wrap(trainer.accelerator, "backward", "backward")
    clock.wrap(trainer.accelerator, "clip_grad_norm_", "optimizer")


if __name__ == "__main__":
    main()
