"""GRPO on one page: a language model learns mental arithmetic. Needs torch and transformers, nothing else.

    python examples/one_file.py --model path/or/hub-id --steps 30

One step: sample completions, score them, compare each with its group, move the policy. Per token t of completion i,
with r_t = pi(y_t) / pi_old(y_t) and A_i = (R_i - mean(R)) / std(R) over the completions of one prompt:

    loss = - mean_i mean_t [ min(r_t A_i, clip(r_t, 1 - eps, 1 + eps) A_i) - beta (e^d - 1 - d) ]    d = log pi_ref / pi

Left out, and in the library: batches of prompts and a cache while sampling, packed rows and micro-batches, minibatches,
temperatures, end strings, bfloat16, schedules, evaluation, checkpoints, and every check. Sizes here are for a look.
"""

from __future__ import annotations

import argparse
import copy
import random
import re

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def problem(rng: random.Random) -> tuple[str, int]:
    """A question and its answer."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    operator, answer = rng.choice([("+", a + b), ("*", a * b)])
    return f"What is {a} {operator} {b}? Answer with the number only.", answer


def reward(text: str, answer: int) -> float:
    """1 if the last number of the reply is the answer, else 0."""
    numbers = re.findall(r"\d{1,9}", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def encode(tokenizer, question: str) -> Tensor:
    """(P,) token ids of the question, as a chat turn where the tokenizer has a template."""
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": question}]
        question = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return torch.tensor(tokenizer(question, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def sample(model, prompt: Tensor, *, n: int, max_tokens: int, ends: Tensor, generator: torch.Generator) -> list[Tensor]:
    """``n`` completions of ``prompt``; each ends with the first of ``ends``, or after ``max_tokens``."""
    rows = prompt.repeat(n, 1)
    for _ in range(max_tokens):
        probabilities = model(rows).logits[:, -1].float().softmax(-1)
        rows = torch.cat([rows, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        if torch.isin(rows[:, len(prompt) :], ends).any(1).all():
            break
    completions = []
    for row in rows[:, len(prompt) :]:
        end = torch.isin(row, ends).nonzero().flatten()
        completions.append(row[: end[0] + 1] if len(end) else row)
    return completions


def logprobs(model, prompt: Tensor, completion: Tensor) -> Tensor:
    """(T,) log pi(y_t | prompt, y_<t). The logits that predict a token stand one position before it."""
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, completion[:, None])[:, 0]


def advantages(rewards: Tensor) -> Tensor:
    """(prompts, completions): how far each is above its group, in standard deviations; 0 where all are equal."""
    centred = rewards - rewards.mean(1, keepdim=True)
    varied = rewards.amax(1, keepdim=True) > rewards.amin(1, keepdim=True)
    return torch.where(varied, centred / rewards.std(1, keepdim=True), 0.0)


def sequence_loss(
    new: Tensor, *, old: Tensor, ref: Tensor | None, advantage: Tensor, eps: float, beta: float
) -> Tensor:
    """The loss of one completion: mean over its tokens. All log-probs are (T,), and only ``new`` has a gradient."""
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)
    if ref is not None:
        gain = gain - beta * ((ref - new).exp() - 1 - (ref - new))
    return -gain.mean()


def update(
    model, optimizer, samples: list[tuple[Tensor, Tensor]], scaled: Tensor, *,
    olds: list[Tensor], refs: list[Tensor | None], eps: float, beta: float,
) -> float:  # fmt: skip
    """One optimizer step on (prompt, completion) pairs; returns the loss. One pair at a time, to save memory."""
    total = 0.0
    for (prompt, completion), advantage, old, ref in zip(samples, scaled, olds, refs, strict=True):
        new = logprobs(model, prompt, completion)
        loss = sequence_loss(new, old=old, ref=ref, advantage=advantage, eps=eps, beta=beta) / len(samples)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(args: argparse.Namespace) -> None:
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()  # eval: no dropout, ever
    reference = copy.deepcopy(model).requires_grad_(False) if args.beta > 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    configured = model.generation_config.eos_token_id
    eos = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    ends = torch.tensor([i for i in eos if i is not None], dtype=torch.int64)
    sizes = {"n": args.completions, "max_tokens": args.max_tokens}

    for step in range(1, args.steps + 1):
        samples, rewards, text = [], [], ""
        for question, answer in (problem(rng) for _ in range(args.prompts)):
            prompt = encode(tokenizer, question)
            for completion in sample(model, prompt, ends=ends, generator=generator, **sizes):
                text = tokenizer.decode(completion, skip_special_tokens=True)
                samples.append((prompt, completion))
                rewards.append(reward(text, answer))
        scaled = advantages(torch.tensor(rewards).view(args.prompts, args.completions)).flatten()
        with torch.no_grad():
            olds = [logprobs(model, *pair) for pair in samples]
            refs = [logprobs(reference, *pair) if reference is not None else None for pair in samples]
        for _ in range(args.inner_updates):
            loss = update(model, optimizer, samples, scaled, olds=olds, refs=refs, eps=args.eps, beta=args.beta)
        print(
            f"step {step}  reward {sum(rewards) / len(rewards):.3f}  loss {loss:+.4f}  last reply {text!r}", flush=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id")
    counts = {"steps": 30, "prompts": 8, "completions": 8, "max-tokens": 12, "inner-updates": 2, "seed": 0}
    for flag, default in {**counts, "lr": 2e-5, "eps": 0.2, "beta": 0.0}.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default, help=f"default {default}")
    train(parser.parse_args())
