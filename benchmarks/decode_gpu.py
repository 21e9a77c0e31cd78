"""How far a decoding step and a training pass are from what a GPU could do at best, on a model shaped as Qwen2.5-0.5B.

    python benchmarks/decode_gpu.py [--json FILE]            on a GPU
    python benchmarks/decode_gpu.py --device cpu --small     whether it runs

Decoding: 64 rows in bfloat16, 512 prompt tokens each; the seconds of one token step, draws included, are those of
completions of 384 tokens less those of 128, by 256. The floor is the bytes that a step must read (all weights and each
row's keys and values, in bfloat16) over the rate of a copy. Three decoders: ours with CUDA graphs, the same without
them, and the model's own forward. Training: a whole step, optimizer included, on one micro-batch of 8,192 tokens; its
arithmetic over the measured rate of torch's bfloat16 products, as a share of the seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import step
from floor import arithmetic, copy_rate, product_rates, weights
from trew.config import LearnerConfig
from trew.learner import Learner
from trew.models.anatomy import Transformer, describe
from trew.objective import TokenBatch, preset
from trew.rollout.engine import Request
from trew.rollout.torch_engine.decode import Schedule
from trew.rollout.torch_engine.decoder import Decoder
from trew.rollout.torch_engine.plain import ForwardDecoder
from trew.types import Prompt, Sampling, TrainingSample
from work import Work

SHAPE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
LOW = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.threads, args.peer = 0, "none"
    shape, scale = (SMALL, 16) if args.small else (SHAPE, 1)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=4096)).eval()
    limits = {"copy": copy_rate(args.device), "products": product_rates(LOW, args.device)[1]}
    found = {"limits": limits, "decoding": decoding(model, shape, args, limits, scale)}
    found["training"] = training(model, shape, args, limits, scale)
    print(f"copy {limits['copy'] / 1e9:.0f} GB/s, products {limits['products'] / 1e12:.2f} TFLOP/s")
    for name, row in found["decoding"]["by"].items():
        print(f"{name:<8} {1e3 * row['seconds']:.3f} ms a token step, {row['over_floor']:.2f} x the floor")
    train = found["training"]
    print(f"training {train['tokens']} tokens: {train['seconds']:.3f} s, {train['share']:.0%} of the products' rate")
    if args.json:
        args.json.write_text(json.dumps(step.head(args) | found, indent=1) + "\n")


def decoding(
    model: Any, shape: dict[str, Any], args: argparse.Namespace, limits: dict[str, float], scale: int
) -> dict[str, Any]:
    rows, prompt, short, long = (n // scale for n in (64, 512, 128, 384))
    body, head = weights(shape)
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * model.config.hidden_size // (
        shape["num_attention_heads"]
    )  # fmt: skip
    read = 2 * (body + head + rows * (prompt + (short + long) / 2) * token)
    floor = read / limits["copy"]
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, shape["vocab_size"], (rows, prompt), generator=draw).tolist()
    by: dict[str, dict[str, float]] = {}
    for name in ("graphs", "eager", "forward"):
        if name == "graphs" and args.device == "cpu":
            continue
        run = Run(model, prompts, name, args.device, room=prompt + long)
        for tokens in (short, long):  # graphs are recorded, libraries warmed
            run.seconds(tokens)
        best = {tokens: min(run.seconds(tokens) for _ in range(args.repeats)) for tokens in (short, long)}
        seconds = (best[long] - best[short]) / (long - short)
        by[name] = {"seconds": seconds, "over_floor": seconds / floor}
        del run
    return {"rows": rows, "prompt": prompt, "tokens": [short, long], "bytes": read, "floor": floor, "by": by}


class Run:
    """Completions of one length by one decoder; buffers and graphs stay for the next."""

    def __init__(self, model: Any, prompts: list[list[int]], name: str, device: str, *, room: int) -> None:
        self.model, self.prompts, self.device = model, prompts, torch.device(device)
        self.static: Any = None
        if name != "forward":
            from trew.backends.cuda_graphs.graphs import Graphs
            from trew.backends.cuda_graphs.static_model import StaticModel

            self.parts = describe(model, adapters=True)
            assert isinstance(self.parts, Transformer), self.parts
            graphs = Graphs.on(self.device) if name == "graphs" else Graphs(None)
            self.static = StaticModel(self.parts, slots=len(prompts), columns=room, dtype=LOW, graphs=graphs)

    def seconds(self, tokens: int) -> float:
        sampling = Sampling(max_tokens=tokens, seed=0)
        rows = len(self.prompts)
        cast = contextlib.nullcontext()
        if self.static is not None:
            from trew.backends.cuda_graphs.static import StaticDecoder

            assert self.static.begin(self.parts)
            decoder: Decoder = StaticDecoder(self.static)
        else:
            decoder = ForwardDecoder(self.model, slots=rows, max_tokens=tokens)
            cast = torch.autocast(self.device.type, dtype=LOW)
        schedule = Schedule(
            decoder, sampling=sampling, slots=rows, stop_ids=frozenset(), stop_strings=(), decode=str,
            device=self.device,
        )  # fmt: skip
        requests = [Request(str(i), Prompt(str(i), text=""), 0, sampling) for i in range(rows)]
        schedule.add((np.array(ids), [request]) for ids, request in zip(self.prompts, requests, strict=True))
        start = self._time()
        with torch.no_grad(), cast:
            finished = 0
            while schedule.unfinished:
                finished += len(schedule.advance())
            assert finished == rows
        assert self.static is None or self.static.graphs.failed is None, self.static.graphs.failed
        return self._time() - start

    def _time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def training(
    model: Any, shape: dict[str, Any], args: argparse.Namespace, limits: dict[str, float], scale: int
) -> dict[str, Any]:
    groups, size, prompt, completion = 2, 8, 512 // scale, 448 // scale
    total = groups * (prompt + size * completion)
    rng = np.random.default_rng(0)
    samples = [
        TrainingSample(ids, rng.integers(0, shape["vocab_size"], completion), group)
        for group, ids in enumerate(rng.integers(0, shape["vocab_size"], (groups, prompt)))
        for _ in range(size)
    ]
    count = len(samples)
    batch = TokenBatch(
        logprobs=torch.zeros(count * completion), mask=torch.ones(count * completion, dtype=torch.bool),
        sequence_ids=torch.arange(count).repeat_interleave(completion),
        group_ids=torch.tensor([s.group for s in samples]), rewards=torch.arange(count).float() % 2,
        max_length=completion,
    )  # fmt: skip
    config = LearnerConfig(dtype="bfloat16", microbatch_tokens=total)
    learner = Learner(model, config=config, objective=preset("dr-grpo"), optimizer_steps=args.repeats + 1)
    seconds = []
    for _ in range(args.repeats + 1):  # the first one warms up
        if args.device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        learner.step(samples, learner.objective.prepare(batch))
        if args.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    work = Work(shape=shape, prompts=groups, group=size, prompt_tokens=prompt, completion_tokens=completion)
    needs = arithmetic(work)["train"]["flops"]
    best = min(seconds[1:])
    return {"tokens": total, "seconds": best, "flops": needs, "share": needs / limits["products"] / best}


if __name__ == "__main__":
    main()
