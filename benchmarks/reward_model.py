"""Iterative GRPO on a learned reward, on a CPU: does the reward model agree with the verifier, and does the policy get
better by the verifier, which it never sees?

    python benchmarks/reward_model.py [--seeds 0 1 2] [--rounds 2] [--json benchmarks/results/reward_model.json]

The task is to write four digits backwards. The policy is a small transformer (0.2 M parameters, random weights) that
was first taught the task by examples, and stopped while it fails about half of the time. Then, per seed,

    learned   trew iterate: the reward is a reward model, which was trained on pairs of the policy's own completions
    noise     as many steps with a reward that is a fixed random number for each text: what sharpening alone would do
    verifier  as many steps with the verifier itself as reward: what could be reached

Accuracies are of 200 held-out prompts with 4 completions each at temperature 1, by the verifier, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import trew
from demo import machine
from trew.config import RewardConfig, load
from trew.iterate import iterate, load_recipe
from trew.training.start import train
from trew.utils.console import Silent

DIGITS = 4
RECIPE = """
model = "{folder}/base"
steps = {steps}
device = "cpu"
seed = {seed}

[data]
task = "prompts"
train = "{folder}/train.jsonl"
eval = "{folder}/eval.jsonl"

[rollout]
prompts = 32
completions = 8
max_tokens = 6

[objective]
preset = "grpo"
beta = 0.04

[learner]
lr = 1e-4

[eval]
size = 200
samples = 4
temperature = 1.0

[checkpoint]
every = 0
"""
ITERATE = """
[iterate]
rounds = {rounds}
first_prompts = 2000
prompts = 512
pairs_per_prompt = 8
first_epochs = 10
first_lr = 1e-3
epochs = 2

[iterate.verifier]
name = "arithmetic" # the last number of the reply is the answer

[iterate.learner]
lr = 1e-4
batch = 64
"""
NOISE = """
import hashlib


def noise(prompts, completions, **columns):
    texts = [f"{p}|{c}" for p, c in zip(prompts, completions, strict=True)]
    return [hashlib.blake2b(t.encode(), digest_size=1).digest()[0] / 255 for t in texts]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of the policy, per round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(one_seed(Path(folder), seed=seed, rounds=args.rounds, steps=args.steps))
        for line in lines(runs[-1]):
            print(line, flush=True)
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trew": trew.__version__}
        result = {
            "date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions,
            "threads": torch.get_num_threads(), "seeds": args.seeds, "recipe": RECIPE.strip(),
            "iterate": ITERATE.strip(), "rounds": args.rounds, "steps_per_round": args.steps, "runs": runs,
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def one_seed(folder: Path, *, seed: int, rounds: int, steps: int) -> dict[str, Any]:
    """The three runs of a seed."""
    start = time.perf_counter()
    loss = make_base(folder / "base", seed=seed)
    make_data(folder, seed=seed)
    (folder / "noise.py").write_text(NOISE)
    recipe = folder / "recipe.toml"
    recipe.write_text((RECIPE + ITERATE).format(folder=folder, seed=seed, rounds=rounds, steps=steps))
    learned = iterate(load_recipe(recipe, out=folder / "rounds"), display=Silent())
    plain = folder / "plain.toml"
    plain.write_text(RECIPE.format(folder=folder, seed=seed, steps=rounds * steps))
    others = {}
    for name, rewards in {
        "noise": (
            RewardConfig(name=f"{folder}/noise.py:noise"),
            RewardConfig(name="arithmetic", weight=0.0),
        ),
        "verifier": (RewardConfig(name="arithmetic"),),
    }.items():
        config = dataclasses.replace(load(plain), rewards=rewards, out=str(folder / name))
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, correct_reward="arithmetic"))
        others[name] = train(config, display=Silent())["accuracy_after"]
    return {
        "seed": seed, "base_loss": loss, "before": learned["accuracy_before"], "learned": learned["accuracy_after"],
        **others, "rows": learned["rows"], "seconds": time.perf_counter() - start,
    }  # fmt: skip


def lines(run: dict[str, Any]) -> list[str]:
    """A seed's figures as text."""

    def show(i: dict[str, float]) -> str:
        return f"{i['mean']:.3f} ({i['low']:.3f} to {i['high']:.3f})"

    out = [f"seed {run['seed']}, {run['seconds']:.0f} s: accuracy by the verifier before {show(run['before'])}"]
    out += [f"  trained on {name:<9} {show(run[name])}" for name in ("learned", "noise", "verifier")]
    for row in run["rows"]:
        auc, after = row["reward_before"]["auc"], row["reward_after"]["auc"]
        out.append(f"  round {row['round']}: AUC on held-out pairs, before the update {show(auc)}, after {show(after)}")
    return out


# --------------------------------------------------------------------------------------------------------------------
# The task and the policy that half knows it


def make_data(folder: Path, *, seed: int) -> None:
    """5,000 training and 200 held-out prompts, none twice."""
    draw = random.Random(seed)
    numbers = draw.sample(range(9**DIGITS), 5200)
    rows = [json.dumps({"prompt": f"{digits(n)}>", "answer": digits(n)[::-1]}) + "\n" for n in numbers]
    (folder / "train.jsonl").write_text("".join(rows[:5000]))
    (folder / "eval.jsonl").write_text("".join(rows[5000:]))


def digits(number: int) -> str:
    """A number below 9**DIGITS as digits from 1 to 9."""
    return "".join(str(number // 9**i % 9 + 1) for i in range(DIGITS))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", "<unk>", ">", *"0123456789"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    from tokenizers import decoders

    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def make_base(folder: Path, *, seed: int, target: float = 0.45) -> float:
    """Teaches a small transformer by examples until it samples about ``target`` of the answers right; its last loss."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = random.Random(seed + 1)
    loss = torch.tensor(0.0)
    for step in range(4000):
        asked = [digits(draw.randrange(9**DIGITS)) for _ in range(128)]
        ids = torch.tensor([tokenizer(f"{a}>{a[::-1]}")["input_ids"] + [1] for a in asked])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) <= DIGITS, -100)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # exp(-loss x tokens) is about the chance of a whole answer being sampled.
        if step % 5 == 0 and float(torch.exp(-loss.detach() * (DIGITS + 1))) >= target:
            break
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float(loss.detach())


if __name__ == "__main__":
    main()
