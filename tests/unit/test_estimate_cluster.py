"""The map of ranks and servers: who is where, and whether that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from test_estimate import config, saved
from trew.cli.main import main
from trew.config import ClusterConfig, Config, DataConfig
from trew.config.cluster import server_option
from trew.estimate.cluster import GIB, VERSIONS, ClusterMap, Device, Fleet, cluster_map, table
from trew.estimate.sizes import sizes_of
from trew.models import loading
from trew.objective import preset
from trew.rollout.vllm import launch
from trew.weights.files import version_size

NODE = Fleet(1, 8, 80 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model"), "smollm")


def mapped(model: str, fleet: Fleet = NODE, **cluster: Any) -> ClusterMap:
    made: Config = replace(config(model), cluster=ClusterConfig(**cluster))
    return cluster_map(made, objective=preset("grpo"), prompt=12, held_out=0, fleet=fleet)


def who(found: ClusterMap) -> list[list[str]]:
    return [[tenant.who for tenant in device.tenants] for device in found.devices]


def gpu(found: ClusterMap, number: int = 0) -> Device:
    return found.devices[number]


def test_ranks_have_the_first_gpus_and_servers_the_last(model):
    found = mapped(model, learner=4, rollout="vllm", servers=2, server_gpus=2)
    assert who(found)[:8] == [
        *([f"rank {i}"] for i in range(4)),
        ["server 0"],
        ["server 0"],
        ["server 1"],
        ["server 1"],
    ]
    assert found.fits
    assert found.sequences is not None
    assert found.sequences > 0


def test_0_ranks_are_all_gpus_that_servers_leave(model):
    found = mapped(model, learner=0, rollout="vllm", servers=1, server_gpus=2)
    assert who(found)[:8] == [*([f"rank {i}"] for i in range(6)), ["server 0"], ["server 0"]]
    none_left = mapped(model, learner=0, rollout="vllm", servers=8)
    assert not none_left.fits
    assert "none is left" in none_left.problems[0]


def test_too_few_gpus_are_a_problem_that_names_both_numbers(model):
    found = mapped(model, learner=8, rollout="vllm", servers=1)
    assert not found.fits
    assert "the first node needs 9 GPUs (8 ranks, 1 servers of 1), and has 8" in found.problems[0]
    uneven = mapped(model, Fleet(2, 8, 80 * GIB), learner=5)
    assert any("accepts a multiple of the 2 nodes; or set cluster.shard = 'fsdp'" in p for p in uneven.problems)


@pytest.mark.parametrize("shard", ["fsdp", "none"])
def test_nodes_may_have_different_numbers_of_ranks_unless_they_shard_inside(model, shard):
    found = mapped(model, Fleet(2, 2, 80 * GIB), learner=3, shard=shard)
    assert found.fits, found.problems
    assert who(found)[:4] == [["rank 0"], ["rank 1"], ["rank 2"], []]
    # Fewer ranks than nodes: only those that there are.
    few = mapped(model, Fleet(4, 2, 80 * GIB), learner=2, shard=shard)
    assert who(few)[:8] == [["rank 0"], [], ["rank 1"], [], [], [], [], []]


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offloading_saves_nothing_where_there_is_no_gpu(model, offload):
    none, some = (mapped(model, Fleet(1, cpu_bytes=64 * GIB), learner=2, offload=how) for how in ("none", offload))

    def parts(there: Any) -> list[dict[str, dict[str, int]]]:
        # Without this process, which is measured each time.
        phases = (tenant.parts for tenant in gpu(there).tenants)
        return [{name: {k: v for k, v in of.items() if k != "process"} for name, of in one.items()} for one in phases]

    assert parts(some) == parts(none)


def test_shards_divide_what_each_rank_keeps(model):
    """Weights, moments and gradients by the ranks that share them: all of them, those of a node, or none."""

    def kept(ranks: int, fleet: Fleet = NODE, **how: Any) -> tuple[int, ...]:
        (phase,) = (gpu(mapped(model, fleet, learner=ranks, **how)).tenants[0].parts["training"],)
        return tuple(phase[name] for name in ("weights", "optimizer", "gradients"))

    whole = kept(2, shard="none")
    assert whole[1] == 2 * whole[0] == 2 * whole[2]
    assert kept(4) == tuple(-(-size // 4) for size in whole)
    assert kept(16, Fleet(2, 8, 80 * GIB)) == tuple(-(-size // 8) for size in whole), "hsdp across nodes"
    assert kept(16, Fleet(2, 8, 80 * GIB), shard="fsdp") == tuple(-(-size // 16) for size in whole)
    assert kept(4, offload="optimizer")[1] == 0
    assert kept(4, offload="all") == (0, 0, 0)


def test_every_rank_has_its_whole_critic(model):
    made = replace(config(model), cluster=ClusterConfig(learner=2, shard="none"))
    objectives = preset("grpo", beta=0.0), preset("ppo")
    alone, taught = (cluster_map(made, objective=each, prompt=12, held_out=0, fleet=NODE) for each in objectives)
    s = sizes_of(made)
    count = s.weights - (0 if s.tied else s.head) + s.hidden
    for number in range(2):
        parts, before = (gpu(found, number).tenants[0].parts for found in (taught, alone))
        assert {phase["critic"] for phase in parts.values()} == {12 * count}
        assert parts["training"]["gradients"] >= 4 * count
        assert sum(parts["training"].values()) >= sum(before["training"].values()) + 12 * count
    away = replace(made, learner=replace(made.learner, optimizer="adamw-offload"))
    kept = [cluster_map(away, objective=each, prompt=12, held_out=0, fleet=NODE).devices[-1] for each in objectives]
    assert kept[1].need - kept[0].need == 2 * 8 * count


@pytest.mark.parametrize("kind", ["llama", "smollm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_for_servers_are_as_large_as_they_are_published(tmp_path, kind, dtype):
    """A head that is tied to the embedding is there twice, another one once."""
    of_run = replace(config(saved(tmp_path, kind), dtype=dtype), cluster=ClusterConfig(rollout="vllm", servers=1))
    found = cluster_map(of_run, objective=preset("grpo"), prompt=12, held_out=0, fleet=Fleet(cpu_bytes=64 * GIB))
    published = next(t for t in found.devices[0].tenants if t.who == "weights for servers")
    assert published.peak == VERSIONS * version_size(loading.load_config(of_run.model), dtype)


def test_ranks_that_learn_demonstrations_sample_nothing(model):
    """Generating would take all weights whole on every rank."""
    made = replace(config(model), data=DataConfig(task="demonstrations"), cluster=ClusterConfig(learner=2))
    for fleet in (NODE, Fleet(cpu_bytes=64 * GIB)):
        rank = cluster_map(made, objective=preset("sft"), prompt=12, held_out=0, fleet=fleet).devices[0].tenants[0]
        assert list(rank.parts) == ["training"]


def test_moments_in_8_bits_are_as_small_in_the_map(model):
    def moments(optimizer: str) -> int:
        made = replace(config(model), cluster=ClusterConfig(learner=2, shard="none"))
        made = replace(made, learner=replace(made.learner, optimizer=optimizer))
        found = cluster_map(made, objective=preset("grpo"), prompt=12, held_out=0, fleet=NODE)
        return gpu(found).tenants[0].parts["training"]["optimizer"]

    assert 0.25 * moments("adamw") <= moments("adamw-8bit") < 0.26 * moments("adamw")


def test_layers_are_gathered_in_bfloat16_and_embedding_and_head_in_float32(model):
    def gathered(dtype: str, phase: str) -> int:
        made = config(model)
        made = replace(made, cluster=ClusterConfig(learner=2), learner=replace(made.learner, dtype=dtype))
        found = cluster_map(made, objective=preset("grpo"), prompt=12, held_out=0, fleet=NODE)
        return gpu(found).tenants[0].parts[phase]["gathered"]

    s = sizes_of(config(model))
    for phase, layers in (("generating", s.linear), ("training", 2 * s.linear // s.layers)):
        assert gathered("float32", phase) == 4 * (s.weights - s.linear + layers)
        assert gathered("float32", phase) - gathered("bfloat16", phase) == 2 * layers


def test_weights_that_are_gathered_in_bfloat16_are_not_cast_again(model):
    """In one process, or with whole copies, products cast float32 weights."""

    def activations(**cluster: Any) -> int:
        made = config(model)
        made = replace(made, cluster=ClusterConfig(**cluster), learner=replace(made.learner, dtype="bfloat16"))
        found = cluster_map(made, objective=preset("grpo"), prompt=12, held_out=0, fleet=NODE)
        return gpu(found).tenants[0].parts["training"]["activations"]

    saved = activations(learner=2, shard="none") - activations(learner=2)
    assert saved >= 2 * sizes_of(config(model)).linear


def test_ranks_share_what_a_step_and_an_evaluation_sample(model):
    """Prompt by prompt, as they are dealt out: 9 prompts over 2 ranks are up to 5."""

    def cached(ranks: int, *, prompts: int, held_out: int, phase: str) -> int:
        made = config(model)
        made = replace(made, kernels="plain", cluster=ClusterConfig(learner=ranks, shard="none"))
        made = replace(made, rollout=replace(made.rollout, prompts=prompts, completions=2))
        found = cluster_map(made, objective=preset("grpo"), prompt=12, held_out=held_out, fleet=NODE)
        return gpu(found).tenants[0].parts[phase]["cache"]

    alone = cached(1, prompts=5, held_out=0, phase="generating")
    assert cached(2, prompts=9, held_out=0, phase="generating") == alone
    # An evaluation has one completion of each prompt.
    assert cached(2, prompts=2, held_out=20, phase="evaluating") == alone
    assert cached(2, prompts=2, held_out=20, phase="generating") == alone // 5


def test_ranks_share_the_activations_of_a_step(model):
    """Two prompts of two completions are one micro-batch: each of two ranks has one prompt, each of four one completion
    and its prompt again."""

    def training(ranks: int) -> dict[str, int]:
        return dict(gpu(mapped(model, learner=ranks)).tenants[0].parts["training"])

    one, two, four = (training(ranks)["activations"] for ranks in (1, 2, 4))
    assert 0.4 * one < two < 0.6 * one
    assert 0.5 * two < four < two


def test_what_gpus_do_not_keep_is_in_the_memory_of_their_node(model):
    def memory(**how: Any) -> Device:
        return mapped(model, learner=4, **how).devices[-1]

    assert memory().name == "memory"
    assert memory(offload="all").need > memory(offload="optimizer").need > memory().need


def test_ranks_and_servers_that_take_turns_share_a_gpu_and_leave_it_for_memory(model):
    apart = mapped(model, learner=1, rollout="vllm", servers=1)
    turns = mapped(model, learner=1, rollout="vllm", servers=1, colocate=True)
    assert who(turns)[0] == ["rank 0", "server 0"]
    assert gpu(turns).need == max(tenant.peak for tenant in gpu(turns).tenants)
    kept, before = (found.devices[-1].tenants[0].parts["always"] for found in (turns, apart))
    assert kept["optimizer"] == 2 * kept["weights"] > 0
    assert "weights" not in before


def test_a_server_with_a_share_of_its_own_may_have_the_gpu_of_a_rank(model):
    """As a run lets it; both are there at once."""
    alone = Fleet(1, 1, 80 * GIB)
    found = mapped(model, alone, learner=1, rollout="vllm", servers=1, server_args={"gpu-memory-utilization": 0.4})
    assert who(found)[0] == ["rank 0", "server 0"]
    assert found.fits
    assert gpu(found).need == sum(tenant.peak for tenant in gpu(found).tenants) > 0.4 * 80 * GIB
    assert "gpu-memory-utilization" in mapped(model, alone, learner=1, rollout="vllm", servers=1).problems[0]


def test_options_of_servers_count_however_their_names_are_written(model):
    """vLLM takes both."""
    found = [mapped(model, rollout="vllm", servers=1, server_args={name: 0.4})
             for name in ("gpu-memory-utilization", "gpu_memory_utilization")]  # fmt: skip
    assert found[0] == found[1] != mapped(model, rollout="vllm", servers=1)
    args = ClusterConfig(server_args={"max_num_seqs": 3})
    assert (server_option(args, "max-num-seqs", 9), server_option(ClusterConfig(), "max-num-seqs", 9)) == (3, 9)


def test_a_model_that_is_too_large_does_not_fit(model):
    small = Fleet(1, 2, 1 << 20)
    found = mapped(model, small, learner=2)
    assert not found.fits
    assert "DOES NOT FIT" in "\n".join(table(found))
    served = mapped(model, small, learner=1, rollout="vllm", servers=1)
    assert any("leaves no memory for keys and values" in problem for problem in served.problems)


def test_a_server_on_cpus_has_the_cache_that_it_is_started_with(tmp_path):
    """For prompts as long as the data may have, and of free memory an eighth at most, which all servers share."""
    made = config(saved(tmp_path, "llama", num_hidden_layers=8), rollout={"batch": 8192, "max_tokens": 300})
    folder, found = Path(made.model), []
    for servers, free in ((1, 64 * GIB), (1, 24 * GIB), (2, 24 * GIB)):
        of_run = replace(made, cluster=ClusterConfig(rollout="vllm", servers=servers))
        fleet = Fleet(cpu_bytes=free)
        device = cluster_map(of_run, objective=preset("grpo"), prompt=12, held_out=0, fleet=fleet).devices[0]
        found.append(next(t for t in device.tenants if t.who == "server 0").parts["serving"]["cache"] // GIB)
        table = json.loads((folder / "config.json").read_text())
        assert found[-1] == launch.cache_gib(of_run, table, free=free)
    assert found[0] > found[1] > found[2] == 2


def test_without_gpus_everybody_shares_one_memory(model):
    found = mapped(model, Fleet(cpu_bytes=64 * GIB), learner=2, rollout="vllm", servers=1)
    assert who(found) == [["rank 0", "rank 1", "server 0", "weights for servers"]]
    assert found.devices[0].need == sum(tenant.peak for tenant in found.devices[0].tenants)
    text = "\n".join(table(mapped(model, learner=6, rollout="vllm", servers=2)))
    assert "GPU 0 to GPU 5" in text
    assert "rank 0 to 5" in text


def test_nodes_without_gpus_have_memories_of_their_own(model):
    found = mapped(model, Fleet(2, cpu_bytes=64 * GIB), learner=4, rollout="vllm", servers=1)
    first, second = who(found)
    assert first == ["rank 0", "rank 1", "server 0", "weights for servers"]
    assert second == ["rank 2", "rank 3"]
    assert [device.name for device in found.devices] == ["node 0, CPU", "node 1, CPU"]
    assert found.fits
    (problem,) = mapped(model, Fleet(2, cpu_bytes=64 * GIB), learner=3).problems
    assert problem.startswith("cluster.learner: got 3 with cluster.shard = 'auto', which shards inside each node, acc")


def test_ranks_that_the_recipe_keeps_off_gpus_are_not_on_them(model):
    made = replace(config(model), device="cpu", cluster=ClusterConfig(learner=2))
    found = cluster_map(made, objective=preset("grpo"), prompt=12, held_out=0, fleet=NODE)
    assert who(found) == [["rank 0", "rank 1"]]
    assert found.devices[0].name == "CPU"


def run(*args: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *args])
    return ended.value.code


def recipe(tmp_path: Any, model: str, cluster: str) -> str:
    path = tmp_path / "r.toml"
    path.write_text(
        f"""model = {json.dumps(model)}
        [data]
        task = "arithmetic"
        [rollout]
        prompts = 2
        completions = 2
        max_tokens = 8
        [objective]
        preset = "grpo"
        [cluster]
        {cluster}"""
    )
    return str(path)


def test_the_command_shows_the_map_and_says_by_its_code_whether_it_fits(model, tmp_path, capsys):
    path = recipe(tmp_path, model, "learner = 2")
    assert run(path) == 0, "several ranks are always shown as a map"
    assert "rank 1" in capsys.readouterr().out
    assert run(path, "--cluster", "--gpus", "1", "--gpu-gib", "80", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert "has 1" in found["problems"][0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "2"], "--gpus: has no effect without --cluster"),
        (["--cluster", "--nodes", "0"], "got 0 and None, accepts 1 or more machines"),
        (["--cluster", "--gpu-gib", "80"], "give --gpus too"),
        (["--cluster", "--gpus", "2", "--gpu-gib", "-1"], "--gpu-gib: got -1.0, accepts GiB above 0"),
        (["--cluster", "--gpus", "2", "--gpu-gib", "inf"], "--gpu-gib: got inf, accepts GiB above 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(model, tmp_path, capsys, flags, said):
    assert run(recipe(tmp_path, model, ""), *flags) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_generation_on_servers_is_not_counted_for_the_learner(model, tmp_path, capsys):
    path = recipe(tmp_path, model, 'rollout = "vllm"\nservers = 1')
    assert run(path) == 0
    out = capsys.readouterr().out
    assert "servers are not counted: trew plan --cluster shows them" in out
    assert "cache" not in out
