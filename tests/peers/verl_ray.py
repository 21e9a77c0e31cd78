"""verl's own processes on a local Ray cluster without a GPU: what they know of trew, and what they make of a batch.

python verl_ray.py JOB.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync


@ray.remote
class Looks:
    """A process that imports verl as its workers do."""

    def names(self) -> tuple[list[str], list[str], int]:
        from verl.trainer.ppo import core_algos

        return list(core_algos.POLICY_LOSS_REGISTRY), list(core_algos.ADV_ESTIMATOR_REGISTRY), os.getpid()


def composed(keys: list[str]) -> Any:
    """verl's configuration with these overrides."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=keys)


def scored(config: Any, job: dict[str, Any]) -> list[float]:
    """The scores of verl's reward worker."""
    width = max(map(len, job["responses"]))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in job["responses"]])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in job["responses"]])
    rows = [{"style": "rule", "ground_truth": gold} for gold in job["golds"]]
    data = DataProto.from_dict(
        {"responses": ids, "attention_mask": mask},
        {"data_source": np.array(job["sources"], dtype=object),
         "reward_model": np.array(rows, dtype=object),
         "extra_info": np.array([{"index": i} for i in range(len(rows))], dtype=object)},
    )  # fmt: skip
    worker = ray.remote(RewardLoopWorker).remote(config)
    return [float(found["reward_score"]) for found in ray.get(worker.compute_score_batch.remote(data))]


def advantages(config: Any, job: dict[str, Any], scores: list[float]) -> list[list[float]]:
    """What verl's trainer puts into its transfer queue for the actor."""
    lengths = [len(row) for row in job["responses"]]

    def nested(rows: list[list[float]]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    fields = {"response_mask": nested([[1] * n for n in lengths]),
              "rm_scores": nested([[0.0] * (n - 1) + [s] for n, s in zip(lengths, scores, strict=True)]),
              "rollout_log_probs": nested([[-1.0] * n for n in lengths]),
              "old_log_probs": nested([[-1.0] * n for n in lengths])}  # fmt: skip
    made = TensorDict(fields, batch_size=len(lengths))
    made["uid"] = verl.utils.tensordict_utils.NonTensorStack.from_list(job["uids"])
    keys = [f"{uid}_{i}_0" for i, uid in enumerate(job["uids"])]
    trainer = object.__new__(PPOTrainerSync)  # its constructor wants GPUs
    trainer.config = config
    batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=made, tags=[{} for _ in keys])
    trainer._compute_advantage(batch, {})
    found = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])["advantages"]
    return [row.tolist() for row in found.unbind()]


def main(job: dict[str, Any]) -> None:
    """Starts the cluster as ``main_ppo`` does, and asks."""
    config = composed(job["keys"])
    runtime = OmegaConf.merge(get_ppo_ray_runtime_env(config), config.ray_kwargs.ray_init.runtime_env)
    ray.init(num_cpus=4, runtime_env=OmegaConf.to_container(runtime), include_dashboard=False, log_to_driver=False)
    losses, estimators, process = ray.get(Looks.remote().names.remote())
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    scores = scored(config, job)
    found = {"losses": losses, "estimators": estimators, "another": process != os.getpid(), "scores": scores,
             "advantages": advantages(config, job, scores)}  # fmt: skip
    Path(job["out"]).write_text(json.dumps(found))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
