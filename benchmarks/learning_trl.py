"""TRL's side of learning.py, a process in TRL's own environment: learning_trl.py BUDGET OUT SCRATCH writes a JSON file.

A GRPOTrainer as its users make it, with the prompts of trew's recipe in their order, and trew's grader as its reward.
Its evaluations, outside of the clock, are trew's: trew's engine generates with the weights that TRL trains.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from learning_sides import Budget, Curve
from trew.data.order import prompt_order
from trew.eval import evaluate
from trew.integrations.trl import rewards
from trew.models import backends, loading
from trew.objective.weight import Clip
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.training import planning
from trew.training.planning import Plan
from trew.types import Sampling


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    budget, out, scratch = Budget.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(budget.threads)
    plan, curve = planning.plan(budget.config(scratch)), Curve(budget)
    graded = Graded(plan)
    trainer = make(plan, budget, graded, scratch)
    trainer.add_callback(Steps(plan, curve, graded))
    sampled(trainer, graded)
    trainer.train()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    curve.write(out, versions=versions)


class Graded:
    """TRL's reward function: trew's grader. Keeps what a step's rollouts were, for the curve."""

    def __init__(self, plan: Plan) -> None:
        (reward,) = plan.config.rewards
        self.grade = rewards.of(reward.name, **reward.args)
        self.__name__ = reward.name
        self.scores: list[float] = []
        self.lengths: list[int] = []
        self.prompt_ids: list[Sequence[int]] = []

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        scores = self.grade(prompts, completions, completion_ids, **columns)
        self.scores, self.lengths = [float(score or 0.0) for score in scores], [len(ids) for ids in completion_ids]
        return scores


class Steps(TrainerCallback):
    """Evaluates before training and when due, and closes a step after its last update."""

    def __init__(self, plan: Plan, curve: Curve, graded: Graded) -> None:
        self.plan, self.curve, self.graded = plan, curve, graded

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.evaluate(objects["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        budget, graded = self.curve.budget, self.graded
        if state.global_step % budget.updates:
            return
        own = graded.prompt_ids[:: budget.completions]
        self.curve.step(scores=graded.scores, lengths=graded.lengths, prompt_ids=own)
        step = len(self.curve.steps)
        if step == budget.steps or (budget.eval_every and step % budget.eval_every == 0):
            self.evaluate(objects["model"])

    def evaluate(self, model: Any) -> None:
        """As trew evaluates in a run of the same recipe: the same problems, the same draws."""
        plan, config = self.plan, self.plan.config
        how = Sampling(
            max_tokens=config.eval.max_tokens or config.rollout.max_tokens, temperature=config.eval.temperature,
            stop=config.rollout.stop, seed=config.seed,
        )  # fmt: skip
        with self.curve.evaluating() as row:
            backend = backends.of(config, plan.device)
            engine = TorchEngine(model.eval(), plan.renderer, batch=config.rollout.batch, backend=backend)
            found = evaluate(
                functools.partial(generate, engine), plan.eval, plan.rewards, samples=config.eval.samples,
                sampling=how, correct=plan.correct,
            )  # fmt: skip
            row["accuracy"] = found.to_json()["accuracy"]
            model.train()


def make(plan: Plan, budget: Budget, graded: Graded, scratch: Path) -> GRPOTrainer:
    """The trainer: the recipe's settings under TRL's names, in float32 on the CPU, without recomputed activations."""
    config, folder, clip = plan.config, loading.folder(plan.config.model), plan.objective.weight
    assert isinstance(clip, Clip)
    accumulated = budget.update_rows // budget.rows
    args = GRPOConfig(
        output_dir=str(scratch), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, logging_steps=1_000_000, seed=budget.seed, shuffle_dataset=False,
        max_steps=budget.steps * budget.updates, per_device_train_batch_size=budget.rows,
        gradient_accumulation_steps=accumulated, steps_per_generation=accumulated * budget.updates,
        num_generations=budget.completions, max_completion_length=config.rollout.max_tokens,
        temperature=config.rollout.temperature, learning_rate=config.learner.lr,
        lr_scheduler_type=config.learner.schedule, weight_decay=config.learner.weight_decay,
        adam_epsilon=config.learner.adam_eps, max_grad_norm=config.learner.max_grad_norm,
        loss_type="grpo", beta=0.0, epsilon=clip.eps_low, epsilon_high=clip.eps_high,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder), args=args, processing_class=plan.renderer.tokenizer, reward_funcs=[graded],
        train_dataset=Dataset.from_list(drawn(plan, budget.steps * budget.prompts)),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def drawn(plan: Plan, count: int) -> list[dict[str, Any]]:
    """The first prompts that a run of the recipe draws, as TRL's rows."""
    prompts = [plan.train[i] for i in prompt_order(plan.config, plan.train).take(0, count)]
    return [{"prompt": [dict(message) for message in prompt.messages or ()], **prompt.columns} for prompt in prompts]


def sampled(trainer: Any, graded: Graded) -> None:
    """Has TRL's generation tell the token ids of its prompts."""
    single_turn = trainer._generate_single_turn

    def told(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        graded.prompt_ids = [list(map(int, ids)) for ids in prompt_ids]
        return single_turn(prompt_ids, *args, **kwargs)

    trainer._generate_single_turn = told


if __name__ == "__main__":
    main()
