"""Real ranks (gloo processes) take the step of one process, sharded or not, and all fail together."""

from __future__ import annotations

import copy
import string
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import learner_help
import ranks_work
import recipe_help
import tiers
import tiny
from ranks_help import Fleet, free_port, variables
from trew.config import LoraConfig
from trew.distributed import Ranks, sharding
from trew.distributed.ranks import Place
from trew.errors import LostRankError
from trew.models import lora
from trew.models.sharded import whole
from trew.objective import presets
from trew.runs import tensor_files
from trew.runs.tensor_files import FileError


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as started:
        yield started


def same(found: dict[str, Any], alone: dict[str, Any], *, tolerance: float = 1e-5, weights: float = 1e-5) -> None:
    assert len(found["outputs"]) == len(alone["outputs"])
    for got, want in zip(found["outputs"], alone["outputs"], strict=True):
        torch.testing.assert_close(got["logprobs"], want["logprobs"], rtol=0, atol=tolerance)
        assert got["loss"] == pytest.approx(want["loss"], rel=tolerance, abs=tolerance)
        assert got["norm"] == pytest.approx(want["norm"], rel=tolerance, abs=tolerance)
        assert got["metrics"].keys() == want["metrics"].keys()
        for key, (value, count) in want["metrics"].items():
            # A sample of the weights, which goes by shard; and prompts of groups that are split count once more.
            if key not in ("changed_share", "learner_tokens"):
                assert got["metrics"][key] == pytest.approx((value, count), rel=1e-3, abs=1e-4), key
    assert found["weights"].keys() == alone["weights"].keys()
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=0, atol=weights, msg=name)


CASES: dict[str, dict[str, Any]] = {
    "token": {"name": "dr-grpo"},
    "one micro-batch": {"name": "grpo", "microbatch_tokens": 4096},
    "sequence": {"name": "gspo"},
    "batch": {"name": "kl-cov"},
    "group": {"name": "pass-at-k"},
    "entropy bonus": {"name": "grpo", "objective": {"entropy_bonus": 0.05}},
    "tied": {"name": "dapo", "kind": "smollm"},
    "other norms": {"name": "dapo", "kind": "qwen3"},
    "logits": {"name": "grpo", "fused": False},
    "rows": {"name": "grpo", "share_prompts": False},
    "recomputing": {"name": "gspo", "gradient_checkpointing": True},
    "adapters": {"name": "grpo", "rank": 2},
    "reference": {"name": "grpo", "with_reference": True, "reference_mix": 0.5, "reference_every": 1},
    "offloaded moments": {"name": "grpo", "optimizer": "adamw-offload"},
    "moments in cpu memory": {"name": "grpo", "offloaded": True, "weight_decay": 0.1},
    "in turns with servers": {"name": "grpo", "moving": True, "with_reference": True},
    "decay and clipping": {"name": "grpo", "weight_decay": 0.1, "max_grad_norm": 0.01},
}


@pytest.mark.parametrize(("case", "size"), tiers.thinned(CASES, [2, 3], keep=2))
def test_sharded_ranks_take_the_step_of_one_process(fleet, case, size):
    arguments = {"count": 2, **CASES[case]}
    alone = ranks_work.steps(None, **arguments)
    found = fleet.run("ranks_work:steps", size, **arguments)
    for one in found:
        same(one, alone)
        assert one["path"] == alone["path"]
        if alone["reference"] is not None:
            torch.testing.assert_close(one["reference"], alone["reference"], rtol=0, atol=1e-5)
    first = found[0]["weights"]
    assert all(torch.equal(first[name], one["weights"][name]) for one in found for name in first)


@pytest.mark.parametrize("how", ["none", "fsdp"])
def test_weights_that_a_step_has_changed_are_counted_over_all_ranks(fleet, how):
    """Whole ones once; of sharded ones each rank watches as many as one process does of all."""
    arguments = {"name": "dr-grpo", "count": 1}
    ranks = [ranks_work.steps(None, **arguments), *fleet.run("ranks_work:steps", 2, how=how, **arguments)]
    alone, one, other = (rank["outputs"][0]["metrics"]["changed_share"] for rank in ranks)
    assert one == other
    least, most = (0.99, 1.01) if how == "none" else (1.3, 2.0)
    assert least * alone[1] < one[1] < most * alone[1]
    assert one[0] > 0.9 * one[1]


@pytest.mark.parametrize("budget", [24, 4096])
def test_the_gradient_is_that_of_one_process(fleet, budget):
    # With an eps this large Adam's steps are proportional to the gradient, not to its sign.
    arguments = {"name": "grpo", "count": 1, "lr": 1.0, "adam_eps": 1e3, "microbatch_tokens": budget}
    alone = ranks_work.steps(None, **arguments)
    for one in fleet.run("ranks_work:steps", 2, **arguments):
        same(one, alone, weights=2e-7)


def test_a_critic_s_step_is_that_of_one_process_and_equal_on_all_ranks(fleet):
    alone = ranks_work.critic_steps(None)
    found = fleet.run("ranks_work:critic_steps", 2)
    for one in found:
        for want, got in zip(alone["outputs"], one["outputs"], strict=True):
            torch.testing.assert_close(got["values"], want["values"], rtol=0, atol=1e-4)
            assert (got["loss"], got["norm"]) == pytest.approx((want["loss"], want["norm"]), rel=1e-3)
            for key, pair in want["metrics"].items():
                assert got["metrics"][key] == pytest.approx(pair, rel=1e-3, abs=1e-4), key
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(one["weights"][name], tensor, rtol=0, atol=1e-4, msg=name)
            assert torch.equal(one["weights"][name], found[0]["weights"][name]), name


@pytest.mark.parametrize("how", ["none", "offload"])
def test_replicas_and_shards_in_cpu_memory_take_it_too(fleet, how):
    for one in fleet.run("ranks_work:steps", 2, name="dapo", how=how):
        same(one, ranks_work.steps(None, name="dapo"))


def test_shards_inside_nodes_with_replicas_across_take_it_too(fleet, tmp_path):
    alone = ranks_work.steps(None, name="gspo", max_grad_norm=0.01)
    for one in fleet.run("ranks_work:steps", 4, nodes=2, name="gspo", how="hsdp", max_grad_norm=0.01):
        same(one, alone)
    # Every row is written once, whichever replica has it.
    how = {"folder": str(tmp_path), "how": "hsdp", "optimizer": "adamw"}
    written = fleet.run("ranks_work:stored", 4, nodes=2, **how)[0]
    found, _ = tensor_files.read(tmp_path, [path.name for path in tmp_path.iterdir()])
    assert found.keys() == written["tensors"].keys()
    assert all(torch.equal(whole(found[name]), tensor) for name, tensor in written["tensors"].items())


@pytest.mark.parametrize(("kind", "rank"), [("smollm", 0), ("qwen3", 0), ("llama", 2)])
def test_ranks_get_the_weights_that_rank_0_has_loaded(fleet, kind, rank):
    net = copy.deepcopy(learner_help.model(kind))
    if rank:
        lora.attach(net, LoraConfig(rank=rank), name="tiny", seed=0)
    want = sharding.tensors_of(net)
    tied = net.get_output_embeddings().weight is net.get_input_embeddings().weight
    for one in fleet.run("ranks_work:distributed", 3, kind=kind, rank=rank):
        assert one["tied"] == tied
        assert one["tensors"].keys() == want.keys()
        assert all(torch.equal(one["tensors"][name], tensor) for name, tensor in want.items())


LOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms with biases": {"kind": "gpt2"},
    "adapters": {"rank": 2, "lr": 1e-2},
    "reference": {"with_reference": True},
    "recomputing": {"gradient_checkpointing": True, "name": "gspo"},
    "shards in cpu memory": {"how": "offload"},
}


@pytest.mark.parametrize("case", tiers.some(LOW, ("norms with biases", "adapters", "reference")))
def test_in_bfloat16_ranks_are_as_near_as_rounding(fleet, case):
    arguments = {"name": "grpo", "dtype": "bfloat16", **LOW[case]}
    alone = ranks_work.steps(None, **arguments)
    (one, _) = fleet.run("ranks_work:steps", 2, **arguments)
    assert one["path"] == alone["path"]  # verified in float32, with weights that were gathered in bfloat16
    for (got, want), limit in zip(zip(one["outputs"], alone["outputs"], strict=True), (1e-6, 0.05), strict=True):
        assert float((got["logprobs"] - want["logprobs"]).abs().mean()) <= limit
        assert got["norm"] == pytest.approx(want["norm"], rel=max(limit, 1e-3))
    if alone["reference"] is not None:
        torch.testing.assert_close(one["reference"], alone["reference"], rtol=0, atol=0.3)
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(one["weights"][name], tensor, rtol=0, atol=4 * arguments.get("lr", 1e-4), msg=name)


def test_in_bfloat16_layers_are_gathered_in_it_and_gradients_summed_in_float32(fleet):
    (gathered, summed), (low, summed_low) = (
        fleet.run("ranks_work:traffic", 2, dtype=dtype)[0] for dtype in ("float32", "bfloat16")
    )
    outside = [p.numel() for name, p in learner_help.model().named_parameters() if ".layers." not in name]
    assert gathered.keys() == {"float32"}
    assert low["float32"] == 4 * sum(outside)  # embedding, norm and head, once
    assert 2 * low["bfloat16"] == gathered["float32"] - low["float32"]
    assert summed_low == summed


@pytest.mark.parametrize("name", tiers.one_in(16, sorted(presets())))
def test_every_preset_takes_the_step_of_one_process(fleet, name):
    alone = ranks_work.steps(None, name=name, count=1)
    for one in fleet.run("ranks_work:steps", 2, name=name, count=1):
        same(one, alone)


@pytest.mark.parametrize(("how", "fused"), tiers.thinned(["none", "fsdp"], [True, False], keep=2))
def test_score_norms_are_those_of_one_process(fleet, how, fused):
    alone = ranks_work.score_norms(None, how=how, fused=fused)
    assert (alone[1] > 0).all()
    for found in fleet.run("ranks_work:score_norms", 2, how=how, fused=fused):
        for got, want in zip(found, alone, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_the_same_ranks_give_the_same_bits(fleet):
    (first, _), (second, _) = (fleet.run("ranks_work:steps", 2, name="gspo") for _ in range(2))
    assert [o["loss"] for o in first["outputs"]] == [o["loss"] for o in second["outputs"]]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


@pytest.mark.parametrize(("name", "how"), tiers.thinned(["grpo", "gspo"], ["none", "fsdp"], keep=2))
def test_a_number_that_is_not_finite_on_one_rank_is_the_error_of_all(fleet, name, how):
    found = fleet.run("ranks_work:broken", 3, name=name, how=how)
    assert found[0]["error"] is not None
    assert all(one == found[0] for one in found)
    assert found[0]["version"] == 1  # nothing was applied before it


def test_ranks_that_disagree_are_named_and_nothing_is_applied(fleet):
    for said in fleet.run("ranks_work:disagreeing", 3):
        assert said.startswith("RankError: ranks disagree on loss: ")
        assert "on rank 0, 2;" in said
        assert "on rank 1." in said


@pytest.mark.parametrize(
    ("sizes", "optimizer"), tiers.thinned([(2, 1), (2, 3), (3, 2), (1, 2)], ["adamw", "adamw-offload"], keep=2)
)
def test_a_checkpoint_of_some_ranks_is_read_by_others(fleet, tmp_path, sizes, optimizer):
    before, after = sizes
    written = fleet.run("ranks_work:stored", before, folder=str(tmp_path), optimizer=optimizer)[0]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 2 * before
    found, _ = tensor_files.read(tmp_path, files)
    assert found.keys() == written["tensors"].keys()
    assert all(torch.equal(whole(found[name]), tensor) for name, tensor in written["tensors"].items())
    arguments = {"folder": str(tmp_path), "counters": written["counters"], "optimizer": optimizer}
    alone = ranks_work.restored(None, **arguments)
    for one in fleet.run("ranks_work:restored", after, **arguments):
        assert all(torch.equal(one["tensors"][name], tensor) for name, tensor in written["tensors"].items())
        assert one["version"] == 2
        assert one["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(one["weights"][name], tensor, rtol=0, atol=1e-5, msg=name)


def test_a_part_that_is_missing_or_twice_is_named(fleet, tmp_path):
    fleet.run("ranks_work:stored", 3, folder=str(tmp_path), optimizer="adamw")
    files = sorted(path.name for path in tmp_path.iterdir())
    for gone in files:
        with pytest.raises(FileError, match="rows"):
            tensor_files.read(tmp_path, [name for name in files if name != gone])
    again = tmp_path / "model.part-1-of-4.safetensors"
    again.write_bytes((tmp_path / "model.part-1-of-3.safetensors").read_bytes())
    with pytest.raises(FileError, match="missing or twice"):
        tensor_files.read(tmp_path, [*files, again.name])
    again.write_bytes(b"no header")
    with pytest.raises(FileError, match="is not a safetensors file"):
        tensor_files.read(tmp_path, [*files, again.name])


@pytest.mark.parametrize("size", [1, 3])
def test_sums_values_and_orders_are_equal_on_all_ranks(fleet, size):
    for one in fleet.run("ranks_work:sums", size):
        pair, count, ones = one["tensors"]
        assert pair.tolist() == [size, sum(range(size))]
        assert int(count) == sum(range(1, size + 1))
        assert ones.tolist() == [float(size)] * 3
        assert one["found"] == [{"rank": rank, "text": "é" * rank} for rank in range(size)]
        assert (one["sent"], one["empty"]) == (b"order" * 1000, b"")


def test_ranks_may_wait_for_each_other_longer_than_they_may_take_to_join(fleet):
    """gloo limits operations between two ranks by the limit for connecting, unless each is given its own."""
    assert fleet.run("ranks_work:late", 2, join_s=2, seconds=2.5) == [["orders", "completions"], ["orders"]]


TALK = """
def talk(row, seed):
    reply = yield str(seed % 100)
    for turn in range(3):
        reply = yield str(len(reply.text))
    return len(reply.text) / 8
"""


def test_what_is_held_for_later_turns_is_given_back_before_an_update(fleet, tmp_path):
    """Between the rounds of a step it stays: a later turn may come back to the same rank."""
    (tmp_path / "talk.py").write_text(TALK)
    stop = [*string.ascii_letters, *string.digits]
    text = recipe_help.recipe(
        "lm", steps=2, out="run", rewards=[], environment={"name": "talk.py:talk"}, cluster={"learner": 2},
        rollout={"stop": stop, "max_tokens": 8, "prompts": 8}, eval={"size": 2},
    )  # fmt: skip
    tiny.save(tmp_path / "lm")
    (tmp_path / "r.toml").write_text(text)
    _, follower = fleet.run("ranks_work:trained", 2, recipe=str(tmp_path / "r.toml"))
    assert any(follower["held"])
    assert follower["freed"] == [True, True]


INTERRUPTS: dict[str, dict[str, Any]] = {
    "while an answer is late": {"place": "after_grace", "after": "", "seconds": 2.0},
    "while no answer comes": {"place": "after_grace", "after": "", "seconds": None},
    "in an evaluation": {"place": "anywhere", "after": "", "seconds": None},
    "between the parts of an order": {"place": "anywhere", "after": "broadcast", "seconds": 0.0},
    "while weights are gathered": {"place": "anywhere", "after": "all_gather", "seconds": 0.0},
    "while weights are given up": {"place": "anywhere", "after": "get_rank", "seconds": 0.0},
}


@pytest.mark.parametrize("case", INTERRUPTS)
def test_an_interrupt_leaves_no_rank_waiting(fleet, case):
    """All ranks give up the round, and take the next order."""
    driver, *others = fleet.run("ranks_work:interrupted", 3, **INTERRUPTS[case])
    assert driver == {"said": "interrupted: here", "groups": [2] * 6, "ended": 2}
    assert others == [2, 2]


def test_nodes_with_different_numbers_of_ranks_are_refused_where_each_shards_by_itself(fleet, tmp_path):
    """They would disagree on who shares weights with whom, and wait for each other without end."""
    tiny.save(tmp_path / "lm")
    (tmp_path / "r.toml").write_text(recipe_help.recipe("lm", steps=1, out="run", cluster={"learner": 3}))
    said, *others = fleet.run("ranks_work:begun", 3, nodes=[2, 1], recipe=str(tmp_path / "r.toml"))
    assert "cluster.shard: got 'auto', which shards inside each node, but the launcher started [2, 1] ranks" in said
    assert others == ["end", "end"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_alone_says_so_instead_of_waiting_for_days(monkeypatch, rank):
    for name, value in variables(rank, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LostRankError, match=f"rank {rank} of 2 could not join the others within 1 s"):
        Ranks(Place(rank, 2, rank, 2), device="cpu", join_s=1, wait_s=60)
