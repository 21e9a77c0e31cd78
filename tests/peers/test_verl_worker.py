"""verl's real actor worker, FSDP2 over two ranks on a CPU, takes a step with our losses: the step that trew takes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl_cpu
from peer_compare import TOLERANCE, WRONG, apart
from transformers import AutoModelForCausalLM

import tiny
import trew
from trew.integrations.verl import offer

LENGTHS = (5, 3, 1, 4, 2, 5, 3, 4)
MAX_LENGTH, RATE, RANKS = 6, 64.0, 2  # a large rate, so that the rounding of the weights does not hide the step
# Mean over tokens, over sequences with a KL, by a constant, a ratio of the sequence, and one to the sampler.
PRESETS = ("dapo", "grpo", "dr-grpo", "gspo", "trw-logistic", "aipo")
SEVERAL = {"ppo_mini_batch_size": 2, "ppo_epochs": 3, "rate": 0.5}
DYNAMIC = ("dapo", "gspo")  # with micro-batches by tokens, not by rows


def actor(name: str, *, rate: float = RATE, **more) -> dict:
    """verl's configuration of the actor with what the preset needs."""
    optim = {"_target_": "verl.workers.config.FSDPOptimizerConfig", "lr": rate, "optimizer": "SGD", "weight_decay": 0.0,
             "clip_grad": 1e9, "total_training_steps": 10}  # fmt: skip
    plain = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = {"_target_": "verl.workers.config.FSDPEngineConfig", "use_torch_compile": False, "mixed_precision": plain,
              "use_dynamic_bsz": name in DYNAMIC}  # fmt: skip
    policy = {"_target_": "verl.workers.config.PolicyLossConfig", "loss_mode": f"trew-{name}"}
    made = {"_target_": "verl.workers.config.FSDPActorConfig", "strategy": "fsdp2", "rollout_n": 2, "optim": optim,
            "ppo_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": name in DYNAMIC, "fsdp_config": engine,
            "policy_loss": policy, "ppo_mini_batch_size": len(LENGTHS) // 2} | more  # fmt: skip
    for key, value in offer(trew.preset(name)).settings:
        if "rollout_correction" in key:
            policy["rollout_correction"] = {"bypass_mode": True}
        elif key.startswith("actor_rollout_ref.actor."):
            word = key.rpartition(".")[2]
            made[word] = {"use_kl_loss": True, "loss_scale_factor": MAX_LENGTH}.get(word, value)
            made[word] = float(value) if word == "kl_loss_coef" else made[word]
    return made


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What both are given; the first two sequences have no advantage, so that a micro-batch has none."""
    folder = tmp_path_factory.mktemp("worker")
    tiny.save(folder / "model", pad=True)
    draw = random.Random(0)

    def per_token(make):
        return [[make() for _ in range(n)] for n in LENGTHS]

    wide = [[0.0 if i < 2 else draw.gauss(0, 1)] * n for i, n in enumerate(LENGTHS)]
    made = {
        "model": str(folder / "model"), "out": str(folder / "out.pt"), "prompts": [[7, 8, 9] for _ in LENGTHS],
        "responses": per_token(lambda: draw.randrange(200)), "mask": per_token(lambda: 1), "advantages": wide,
        "actors": {name: actor(name) for name in PRESETS} | {"several": actor("trw-logistic", **SEVERAL)},
    }  # fmt: skip
    now = policy(made)[1].tolist()
    near = [[[x + draw.gauss(0, 0.3) for x in row[:n]] for row, n in zip(now, LENGTHS, strict=True)] for _ in range(2)]
    return made | {"old_log_probs": near[0], "ref_log_prob": near[1]}


@pytest.fixture(scope="module")
def steps(job):
    """What verl's worker makes of it, in processes of its own that import verl alone."""
    path = Path(job["out"]).with_name("job.json")
    path.write_text(json.dumps(job))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={RANKS}", verl_cpu.__file__, str(path)]  # fmt: skip
    env = os.environ | {"VERL_USE_EXTERNAL_MODULES": "trew.integrations.verl", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert not done.returncode, done.stderr[-3000:]
    return torch.load(job["out"], weights_only=False)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


PER_ROW = ("prompts", "responses", "mask", "advantages", "old_log_probs", "ref_log_prob")


def policy(job, model=None):
    """The model, and the log-probabilities (B, T) of its answers."""
    model = model or AutoModelForCausalLM.from_pretrained(
        job["model"], attn_implementation="eager", dtype=torch.float32
    )
    ids = [p + r for p, r in zip(job["prompts"], job["responses"], strict=True)]
    logits = model(input_ids=padded(ids), attention_mask=padded([[1] * len(row) for row in ids])).logits
    start, responses = len(job["prompts"][0]), padded(job["responses"])
    return model, logits[:, start - 1 : -1].log_softmax(-1).gather(2, responses[..., None]).squeeze(2)


def own(job, objective, *, model=None, rows=None):
    """The model with the gradient of trew's loss on these rows of the batch."""
    rows = range(len(LENGTHS)) if rows is None else rows
    job = job | {key: [job[key][i] for i in rows] for key in PER_ROW}
    model, logprobs = policy(job, model)
    old = padded(job["old_log_probs"])
    sampler = {"rollout_logprobs": old} if "rollout_logprobs" in objective.needs else {}
    batch = trew.TokenBatch.from_padded(
        logprobs=logprobs, mask=padded(job["mask"]), advantages=padded(job["advantages"]), old_logprobs=old,
        ref_logprobs=padded(job["ref_log_prob"]), group_ids=torch.arange(len(rows)) // 2, max_length=MAX_LENGTH,
        **sampler,
    )  # fmt: skip
    # What a filter drops of them is verl's to drop, before the loss.
    objective.replace(keep=()).loss(batch).loss.backward()
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_of_the_worker(name, job, steps):
    def gradient(objective):
        return torch.cat([value.grad.flatten() for value in own(job, objective).parameters()])

    before, after = policy(job)[0].named_parameters(), steps[name]["weights"]
    theirs = torch.cat([(value.detach() - after[key]).flatten() / RATE for key, value in before])
    mine = gradient(trew.preset(name))
    assert apart(mine, theirs) <= TOLERANCE
    assert apart(gradient(trew.preset(name, aggregate="seq-mean-token-sum")), theirs) >= WRONG


def test_several_steps_of_the_worker(job, steps):
    # Three passes over two mini-batches; a rank has half of the rows, and half of each mini-batch.
    def trained(**changes):
        model = None
        for _ in range(SEVERAL["ppo_epochs"]):
            for rows in ((0, 1, 4, 5), (2, 3, 6, 7)):
                model = own(job, trew.preset("trw-logistic", **changes), model=model, rows=rows)
                with torch.no_grad():
                    for value in model.parameters():
                        value -= SEVERAL["rate"] * value.grad
                model.zero_grad()
        return torch.cat([value.detach().flatten() for value in model.parameters()])

    order = [name for name, _ in policy(job)[0].named_parameters()]
    theirs = torch.cat([steps["several"]["weights"][name].flatten() for name in order])
    # Each of the six steps adds its rounding: 1.07e-5 was seen, by processor.
    assert apart(trained(), theirs) <= 3 * TOLERANCE
    assert apart(trained(aggregate="token-mean"), theirs) >= WRONG


def test_its_metrics_are_there(steps):
    for name in PRESETS:
        metrics = steps[name]["metrics"]
        assert "actor/pg_loss" in metrics
        assert {"actor/trew/ratio", "actor/trew/weight", "actor/trew/clip_share"} <= set(metrics)
