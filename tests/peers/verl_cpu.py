"""verl's own actor worker on a CPU: its platform plug, its FSDP engine over gloo, one process per rank.

    torchrun ... verl_cpu.py JOB.json

takes one step with each of the job's actors and writes weights and metrics. verl has no CPU platform: this is one.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, set_platform


class OnCPU(PlatformBase):
    """What the worker asks of a device, for a CPU."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(
        max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0, memory_allocated=lambda: 0,
        memory_reserved=lambda: 0, empty_cache=lambda: None, synchronize=lambda: None, is_available=lambda: True,
        mem_get_info=lambda: (0, 0), get_device_name=lambda: "CPU",
        current_device=lambda: torch.device("cpu"), manual_seed=torch.manual_seed,
    )  # fmt: skip

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


def batch(job: dict[str, Any], actor: Any, rows: list[int]) -> Any:
    """The rows of one rank, as verl's trainer sends them to ``update_actor``."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    def nested(name: str, dtype: torch.dtype) -> Any:
        values = [torch.tensor(job[name][i], dtype=dtype) for i in rows]
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    whole, real = torch.int64, torch.float32
    fields = {"prompts": nested("prompts", whole), "responses": nested("responses", whole)}
    ids = [torch.tensor(job["prompts"][i] + job["responses"][i]) for i in rows]
    fields["input_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    fields["position_ids"] = torch.nested.as_nested_tensor([torch.arange(len(x)) for x in ids], layout=torch.jagged)
    fields["response_mask"] = fields["loss_mask"] = nested("mask", whole)
    fields |= {name: nested(name, real) for name in ("old_log_probs", "ref_log_prob", "advantages")}
    made = TensorDict(fields, batch_size=len(rows))
    size = actor.ppo_mini_batch_size * actor.rollout_n
    tu.assign_non_tensor(made, global_batch_size=size, mini_batch_size=size, epochs=actor.ppo_epochs, seed=1,
                         temperature=1.0, dataloader_kwargs={"shuffle": actor.shuffle},
                         calculate_entropy=False)  # fmt: skip
    return made


def step(job: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """One ``train_mini_batch``, put together as verl's ActorRolloutRefWorker does it: weights and metrics."""
    from hydra.utils import instantiate
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    actor = instantiate(settings, _convert_="partial")
    engine = actor.engine
    engine.micro_batch_size_per_gpu, engine.max_token_len_per_gpu = actor.ppo_micro_batch_size_per_gpu, 64
    engine.use_dynamic_bsz = actor.use_dynamic_bsz
    model = HFModelConfig(path=job["model"], use_remove_padding=False, enable_gradient_checkpointing=False,
                          override_config={"attn_implementation": "eager"})  # fmt: skip
    worker = TrainingWorker(TrainingWorkerConfig(
        model_type="language_model", model_config=model, engine_config=engine, optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint, profiler_config=None,
    ))  # fmt: skip
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    each = len(job["prompts"]) // ranks
    output = worker.train_mini_batch(batch(job, actor, list(range(rank * each, (rank + 1) * each))))
    state = worker.engine.module.state_dict()
    weights = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {"weights": weights, "metrics": dict(output["metrics"])}


def main(job: dict[str, Any]) -> None:
    """Every actor of the job, each from the model's own weights."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    torch.distributed.init_process_group("gloo")
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    found = {name: step(job, settings) for name, settings in job["actors"].items()}
    if torch.distributed.get_rank() == 0:
        torch.save(found, job["out"])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    set_platform(OnCPU())
    main(json.loads(Path(sys.argv[1]).read_text()))
