"""The benchmarks' own arithmetic and checks; tests/peers has a whole run next to TRL."""

from __future__ import annotations

import argparse
import contextlib
import copy
import doctest
import importlib
import json
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

ROOT = Path(__file__).parents[2]
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True}  # fmt: skip


@pytest.fixture
def module(monkeypatch):
    """A file of benchmarks/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_everything_that_is_imported_is_there(module, name):
    """Most of these run by hand only: one that has lost what it imports would not be seen."""
    if name in ("work_trl", "learning_trl"):
        pytest.importorskip("trl", exc_type=ImportError)
    assert module(name).__doc__


def test_weights_are_those_of_the_model(module):
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, shape in module("work").SHAPES.items():
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**shape))
        layers = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
        assert module("floor").weights(shape) == (layers, model.lm_head.weight.numel()), name


def test_arithmetic_of_a_step(module):
    """Two prompts of three tokens, two completions of two each: counted by hand."""
    work = module("work").Work(shape=TINY, prompts=2, group=2, prompt_tokens=3, completion_tokens=2)
    body, head = module("floor").weights(TINY)
    needs = module("floor").arithmetic(work)
    pair = 4 * 32 * 2
    assert needs["prefill"]["flops"] == 2 * body * 6 + 2 * head * 2 + pair * 2 * (1 + 2 + 3)
    assert needs["decode"]["flops"] == 4 * (2 * (body + head) + pair * (3 + 1))  # each row feeds one token
    fed = 6 + 4
    assert needs["train"]["flops"] == 6 * body * fed + 6 * head * (2 + 4) + 3 * pair * (12 + 4 * 4)
    assert needs["train"]["logits"] == 2 * head * (2 + 4)
    assert needs["decode"]["bytes"] == 4 * (body + head) + 2 * 16 * 2 * 4 * (2 * 3 + 4 * 1)


def test_completions_end_where_they_are_made_to(module):
    end = module("work").EndAt([2, 1, 4], prompt_tokens=3, end=7)
    for made in range(4):
        scores = end(torch.zeros(3, 3 + made), torch.zeros(3, 8))
        ending = [row for row, length in enumerate([2, 1, 4]) if length == made + 1]
        assert scores[:, 7].isfinite().nonzero().flatten().tolist() == ending
        assert scores.argmax(1)[ending].eq(7).all()


def test_other_work_is_refused(module):
    step, work = module("step"), module("work").Work(shape=TINY, prompts=1, group=2)
    row = {"prompt_tokens": 6, "completion_tokens": 4, "grad_norm": 0.5}
    same = {"ours": {"steps": [row, dict(row)]}, "peer": {"steps": [row | {"grad_norm": 0.50001}, dict(row)]}}
    step.check_same(same, work)
    for key, value in (("completion_tokens", 5), ("prompt_tokens", 7), ("grad_norm", 0.51)):
        other = copy.deepcopy(same)
        other["peer"]["steps"][0][key] = value
        with pytest.raises(SystemExit, match="not the same work"):
            step.check_same(other, work)


def test_disturbed_steps_are_left_out_where_there_are_others(module):
    step, work = module("step"), module("work").Work(shape=TINY, prompts=1, group=2)

    def pair(ours: float, theirs: float, foreign: float) -> dict:
        def side(seconds: float) -> dict:
            one = {"phases": {"generate": seconds / 2, "total": seconds}, "completion_tokens": 4, "prompt_tokens": 6,
                   "foreign_cpu": foreign}  # fmt: skip
            return {"steps": [one | {"phases": {"total": 99.0}}, one], "loaded_bytes": 1, "peak_bytes": 3}

        return {"ours": side(ours), "peer": side(theirs)}

    found = step.row("tiny", "fixed-fp32", "hf", work, [pair(1.0, 3.0, 0.0), pair(8.0, 8.0, 1.0)])
    assert found["seconds"] == {"ours": 1.0, "peer": 3.0}
    assert found["ratio"] == 3.0
    assert found["ratio_range"] == [3.0, 3.0]
    assert found["phases"]["ours"] == {"generate": 0.5, "rest": 0.5}
    assert step.row("tiny", "fixed-fp32", "hf", work, [pair(8.0, 16.0, 1.0)])["ratio"] == 2.0


def forked(command: list[Any]) -> None:
    """Runs a benchmark's process as a fork of this one, which has imported what it needs: that takes longest."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            sys.argv = [str(part) for part in command[1:]]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(("patience", "runs"), [(0.0, 2), (300.0, 4)])
def test_pairs_that_others_disturbed_are_measured_again_by_those_who_wait(module, monkeypatch, patience, runs):
    step = module("step")
    busy = {side: {"steps": [{"foreign_cpu": 1.0}] * 2} for side in ("ours", "peer")}
    monkeypatch.setattr(step, "measure", lambda *_: busy)
    args = argparse.Namespace(repeats=2, patience=patience, peer="trl")
    assert len(step.measured(None, None, args)) == runs


def test_our_side_runs(module, monkeypatch, tmp_path):
    """With one short setting."""
    out, step = tmp_path / "step.json", module("step")
    settings = ["--models", "tiny", "--settings", "ragged-fp32", "--repeats", "1", "--steps", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["step.py", *settings, "--json", str(out)])
    monkeypatch.setattr(step, "run", forked)
    step.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert set(row["phases"]["ours"]) == {"generate", "old", "train", "rest"}  # old: the canary's
    assert 1 < row["work"]["mean_completion"] < 64  # ragged: ends were drawn
    assert row["memory"]["ours"]["peak_bytes"] >= row["memory"]["ours"]["loaded_bytes"] > 0


def test_a_setting_of_another_peer_is_refused(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step.py", "--peer", "none", "--settings", "16x8-fp32"])
    with pytest.raises(SystemExit, match="2"):
        module("step").arguments()
    assert "got 16x8-fp32, --peer none accepts fixed-fp32" in capsys.readouterr().err


def test_an_unknown_setting_is_refused(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step.py", "--settings", "fixed-fp33"])
    with pytest.raises(SystemExit, match="2"):
        module("step").arguments()
    assert "got fixed-fp33, accepts fixed-fp32" in capsys.readouterr().err


@pytest.mark.parametrize("peer", ["trl", "vllm"])
def test_without_its_environment_the_peer_is_refused(module, monkeypatch, capsys, tmp_path, peer):
    monkeypatch.setattr(module("step"), "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["step.py", "--peer", peer])
    with pytest.raises(SystemExit, match="2"):
        module("step").arguments()
    assert f"make .venv-{peer}/.installed" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- ranks and servers


def cluster(module, monkeypatch, *args: str) -> Any:
    """cluster.py, with these arguments."""
    monkeypatch.setattr(sys, "argv", ["cluster.py", "--servers", "stand-in", "--model", "tiny", *args])
    return module("cluster")


def runs(module, seconds: float, peak: int, weight: float) -> list[Any]:
    weights = {"w": torch.full((3,), weight)}
    return [module("cluster").Measured([seconds, 9.0, seconds], peak, peak // 2, weights, [0.0], 0.0)] * 2


def test_two_ranks_are_judged_by_time_and_memory(module, monkeypatch, tmp_path):
    own = cluster(module, monkeypatch)
    found = [runs(module, 2.0, 1000, 1.0), runs(module, 3.2, 600, 1.0), runs(module, 2.5, 900, 1.0)]
    monkeypatch.setattr(own, "in_turn", lambda sides, args: found)
    time, memory = own.ranks(own.arguments(), tmp_path)
    assert (time["value"], time["range"], memory["value"]) == (1.6, [1.6, 1.6], 0.6)
    assert "MISSED" in own.shown(time)
    assert "met" in own.shown(memory)
    assert time["detail"]["two processes apart over one"] == 1.25
    names = ["learner-0.toml", "learner-2.toml", "learner-0a.toml", "learner-0b.toml"]
    texts = [(tmp_path / "ranks" / name).read_text() for name in names]
    assert [re.findall(r"(?m)^learner = \d", text) for text in texts] == [[], ["learner = 2"], [], []]
    assert ["threads = 2" in text for text in texts] == [True, False, False, False]
    assert [int(re.search(r"(?m)^prompts = (\d)", text).group(1)) for text in texts] == [4, 4, 2, 2]
    assert len({re.search(r"(?m)^out = .*", text).group() for text in texts}) == 4, "they run at once"


def test_bits_are_counted(module, monkeypatch, tmp_path):
    own = cluster(module, monkeypatch)
    sides = [runs(module, 2.0, 1000, 1.0), runs(module, 2.0, 1000, 1.0)]
    monkeypatch.setattr(own, "in_turn", lambda recipes, args: sides)
    assert own.one(own.arguments(), tmp_path)[1]["value"] == 0
    sides[1] = runs(module, 2.0, 1000, 1.0 + 2**-23)  # the last bit of each of three
    assert own.one(own.arguments(), tmp_path)[1]["value"] == 3


def test_parts_that_are_not_measured_stay(module, monkeypatch, tmp_path, capsys):
    out = tmp_path / "cluster.json"
    old = {"part": "ranks", "name": "slow", "value": 2.0, "target": 1.5, "unit": "x", "detail": {}}
    out.write_text(json.dumps({"rows": [old]}))
    own = cluster(module, monkeypatch, "--parts", "faults", "--json", str(out))
    new = {"name": "dead", "value": 0.1, "target": 2.0, "unit": "s", "detail": {}}
    monkeypatch.setitem(own.MEASURED, "faults", lambda args, scratch: [new])
    own.main()
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["slow", "dead"]
    assert "missed: slow" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value"), [("--parts", "one,two"), ("--servers", "sglang")])
def test_unknown_parts_and_servers_are_refused(module, monkeypatch, capsys, option, value):
    with pytest.raises(SystemExit, match="2"):
        cluster(module, monkeypatch, option, value).arguments()
    assert f"got {value.split(',')[-1]}, accepts" in capsys.readouterr().err


def test_a_publication_is_timed(module, monkeypatch, tmp_path):
    """On a stand-in in this process, which starts at once."""
    from fake_vllm import FakeVllm, serving
    from trew.rollout.vllm.endpoint import Endpoint

    house = module("cluster_servers")

    @contextlib.contextmanager
    def near(work: Any, model: Path) -> Iterator[Any]:
        socket = model.parent / "server.sock"
        with serving(FakeVllm(model), socket):
            yield Endpoint("http://localhost", socket), os.getpid

    monkeypatch.setattr(house, "stand_in", near)
    own = cluster(module, monkeypatch, "--repeats", "1")
    whole, paused = own.publish(own.arguments(), tmp_path)
    seconds = whole["runs"][0]
    assert min(seconds.values()) > 0
    moved = seconds["written"] + seconds["verified"] + seconds["paused"]
    assert whole["value"] == pytest.approx(moved / seconds["plain"])
    assert paused["value"] == pytest.approx(seconds["paused"] / moved)


def test_an_asynchronous_run_is_judged_by_what_it_could_be(module):
    own = module("cluster_async")
    rows = [{"seconds": 2.0, "waited_s": 0.5, "idle_s": 0.2, "age/0": 0.25, "age/1": 0.75}] * 3
    first, last = [{"seconds": 9.0}] * own.WARM_UP, [{"seconds": 0.1}]
    used = 6.0 * own.SERVERS * own.SLOTS / 5 * (own.WARM_UP + 4)
    found = own.figures(own.PacedRun(first + rows + last, paused_s=0.0, used_s=used, folder=Path()), 1)
    assert (found["seconds"], found["learning"], found["generation"]) == (2.0, 1.5, pytest.approx(6 / 5))
    assert (found["waits"], found["idle"], found["slots idle"]) == (0.25, 0.1, pytest.approx(0.4))
    assert found["ages"] == {"0": 0.25, "1": 0.75}


# ----------------------------------------------------------------------------------------------- learning beside a peer


def learned(side: str, seed: int, seconds: float, *accuracies: float) -> dict[str, Any]:
    """A finished run of one side whose steps all take ``seconds``, with an evaluation before and after each of them."""
    steps = [
        {"seconds": n * seconds, "processor_seconds": n * seconds / 2, "accuracy": accuracy, "rollouts": 8,
         "completion_tokens": 40, "prompts": f"{seed}-{n}"}
        for n, accuracy in enumerate(accuracies[:-1], 1)
    ]  # fmt: skip
    evaluations = [
        {"step": n, "seconds": n * seconds, "processor_seconds": n * seconds / 2, "accuracy": {"mean": accuracy}}
        for n, accuracy in enumerate(accuracies)
    ]
    budget = {"seed": seed, "steps": len(steps), "prompts": 2, "completions": 4, "minibatch_prompts": 1,
              "eval_every": 1, "eval_size": 200, "threads": 1, "peer_rows": 0, "overrides": []}  # fmt: skip
    load = {"foreign_cpu": 0.5, "before": [1, 1, 1], "after": [1, 1, 1]}
    return {"side": side, "seed": seed, "budget": budget, "steps": steps, "evaluations": evaluations, "load": load,
            "versions": {side: "1.0"}}  # fmt: skip


def test_learning_is_compared_within_pairs(module):
    """Counted by hand. Seed 2 has no pair and counts for its side alone."""
    rows = [
        learned("trew", 0, 10.0, 0.1, 0.2, 0.3), learned("trl", 0, 40.0, 0.1, 0.3, 0.2),
        learned("trew", 1, 10.0, 0.1, 0.1, 0.2), learned("trl", 1, 160.0, 0.1, 0.1, 0.1),
        learned("trew", 2, 40.0, 0.1, 0.2, 0.3),
    ]  # fmt: skip
    found = module("learning_results").summary(rows)
    ours, theirs, pairs = found["sides"]["trew"], found["sides"]["trl"], found["pairs"]
    assert (ours["runs"], theirs["runs"], pairs["pairs"]) == (3, 2, 2)
    assert ours["seconds"]["mean"] == pytest.approx((20 + 20 + 80) / 3)
    assert pairs["seconds_ratio"]["mean"] == pytest.approx(8.0)  # of 4 and 16
    assert pairs["seconds_ratio"]["low"] < 4 < 16 < pairs["seconds_ratio"]["high"]
    assert ours["reached"]["0.2"]["runs"] == 3
    assert theirs["reached"]["0.2"] == {
        "runs": 1, "seconds": {"mean": pytest.approx(20.0), "low": None, "high": None},
        "processor_seconds": {"mean": pytest.approx(10.0), "low": None, "high": None},
    }  # fmt: skip
    to = pairs["processor_seconds_to_0.2_ratio"]
    assert (to["pairs"], to["mean"]) == (1, pytest.approx(2.0))  # 5 and 10; seed 1 of TRL never reaches it
    assert pairs["accuracy_after_difference"]["mean"] == pytest.approx(-0.1)
    assert pairs["peer_steps_in_the_same_seconds"] == 0


def test_examples_of_learning(module):
    found = doctest.testmod(module("learning_results"))
    assert found.attempted > 0
    assert not found.failed


def test_the_clock_of_learning_leaves_evaluations_out(module, monkeypatch):
    sides, now = module("learning_sides"), [0.0]
    monkeypatch.setattr(sides.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sides.time, "process_time", lambda: now[0] / 2)
    curve = sides.Curve(sides.Budget.of(learned("trew", 0, 1.0, 0.1, 0.2)["budget"]))

    def evaluate(seconds: float) -> None:
        with curve.evaluating() as row:
            now[0] += seconds
            row["accuracy"] = {"mean": 0.5}

    now[0] += 100.0  # loading
    evaluate(7.0)
    now[0] += 3.0
    curve.step(scores=[1.0, 0.0], lengths=[2, 3], prompt_ids=[[1, 2]])
    evaluate(9.0)
    now[0] += 4.0
    curve.step(scores=[1.0, 1.0], lengths=[2, 2], prompt_ids=[[2, 1]])
    assert [(row["seconds"], row["processor_seconds"], row["accuracy"]) for row in curve.steps] == [
        (3.0, 1.5, 0.5), (7.0, 3.5, 1.0)
    ]  # fmt: skip
    assert [(row["step"], row["seconds"]) for row in curve.evaluations] == [(0, 0.0), (1, 3.0)]
    assert curve.steps[0]["prompts"] != curve.steps[1]["prompts"]


def learning(module, monkeypatch, tmp_path, *args: str) -> Any:
    """learning.py, with these arguments, its results in ``tmp_path``."""
    where = ["--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "learning.json")]
    monkeypatch.setattr(sys, "argv", ["learning.py", *where, *args])
    return module("learning")


def test_a_finished_run_of_learning_is_kept(module, monkeypatch, tmp_path):
    own = learning(module, monkeypatch, tmp_path, "--only", "trew", "--seeds", "0", "1", "--prompts", "2")
    args, asked = own.arguments(), []
    args.runs.mkdir()

    def run(args: Any, side: str, seed: int) -> None:
        asked.append((side, seed))
        own.file_of(args, side, seed).write_text(json.dumps(learned(side, seed, 1.0, 0.1, 0.2)))

    run(args, "trew", 0)
    own.conduct(args, run)
    assert asked == [("trew", 0), ("trew", 1)]
    args.only, args.hours = None, 0.0  # no time left
    own.conduct(args, run)
    assert len(asked) == 2
    args.hours = None
    own.conduct(args, run)
    assert asked[2:] == [("trl", 0), ("trl", 1)]
    assert own.order(0) != own.order(1)


SMALL = ("--steps", "1", "--prompts", "2", "--completions", "4", "--eval-every", "1")
"""The budget of :func:`learned` with one step."""


def test_runs_of_learning_are_taken_from_the_results_where_their_folder_is_gone(module, monkeypatch, tmp_path):
    own = learning(module, monkeypatch, tmp_path, "--only", "trew", "--seeds", "0", "1", "2", *SMALL)
    args = own.arguments()
    args.runs.mkdir()
    rows = [{"date": "2026-01-02", **learned(side, 0, 1.0, 0.1, 0.2)} for side in own.SIDES]
    args.json.write_text(json.dumps(own.result(args, rows)))
    args.seeds = [1]
    assert own.restore(args) == [0, 1, 2]
    for row in rows:
        assert own.kept(args, row["side"], 0) == {
            **{name: value for name, value in row.items() if name not in ("side", "seed")},
            "versions": {"trew": "1.0", "trl": "1.0"},
        }  # fmt: skip
    args.seeds = [0, 1]
    assert [row["date"] for row in own.result(args, own.finished(args))["rows"]] == ["2026-01-02"] * 2


def test_results_of_learning_with_another_budget_are_left_alone(module, monkeypatch, tmp_path):
    own = learning(module, monkeypatch, tmp_path, "--only", "trew", "--seeds", "0", *SMALL)
    args = own.arguments()
    args.runs.mkdir()
    args.json.write_text(json.dumps(own.result(args, [learned("trew", 0, 1.0, 0.1, 0.2)])))
    args.prompts = 4
    assert own.restore(args) == []
    assert not list(args.runs.iterdir())


@pytest.mark.parametrize(("key", "value"), [("prompts", "other"), ("rollouts", 7)])
def test_other_work_beside_a_peer_is_refused(module, key, value):
    pair = {side: learned(side, 0, 1.0, 0.1, 0.2) for side in ("trew", "trl")}
    module("learning").check_same(pair, 0)
    pair["trl"]["steps"][0][key] = value
    with pytest.raises(SystemExit, match=f"not the same work: {key}"):
        module("learning").check_same(pair, 0)


def test_another_evaluation_beside_a_peer_is_refused(module):
    pair = {side: learned(side, 0, 1.0, 0.1, 0.2) for side in ("trew", "trl")}
    pair["trl"]["evaluations"][0]["accuracy"]["mean"] = 0.2
    with pytest.raises(SystemExit, match="not the same evaluation"):
        module("learning").check_same(pair, 0)


@pytest.mark.parametrize(
    ("args", "told"),
    [(["--minibatch-prompts", "3"], "got 3, accepts a divisor of --prompts, 4"),
     (["--peer-rows", "5"], "got 5, accepts a divisor of the completions of an optimizer step, 12"),
     (["--steps", "9"], "has another budget")],
)  # fmt: skip
def test_an_impossible_budget_is_refused(module, monkeypatch, capsys, tmp_path, args, told):
    own = learning(module, monkeypatch, tmp_path, "--only", "trew", *args)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "trew-0.json").write_text(json.dumps(learned("trew", 0, 1.0, 0.1, 0.2)))
    with pytest.raises(SystemExit, match="2"):
        own.arguments()
    assert told in capsys.readouterr().err


def test_our_side_of_learning_runs(module, monkeypatch, tmp_path):
    """A short run of a tiny model, evaluated before and after, and the page's part made from it."""
    import tiny

    tiny.save(tmp_path / "lm")
    own = learning(
        module, monkeypatch, tmp_path, "--only", "trew", "--seeds", "1", "--steps", "2", "--prompts", "2",
        "--completions", "4", "--eval-size", "3", "--set", f"model={tmp_path / 'lm'}", "--set", "chat_template=plain",
    )  # fmt: skip
    monkeypatch.setattr(own, "start", lambda command, environment: forked(command))
    own.main()
    found = json.loads((tmp_path / "learning.json").read_text())
    (row,) = found["rows"]
    assert [at["step"] for at in row["evaluations"]] == [0, 2]
    assert row["evaluations"][1]["seconds"] == pytest.approx(row["steps"][1]["seconds"], abs=0.5)
    assert [at["rollouts"] for at in row["steps"]] == [8, 8]
    assert 0 < row["steps"][0]["seconds"] < row["steps"][1]["seconds"]
    text, image = module("learning_results").page(found), module("learning_results").picture(found)
    assert "1 of trew" in text
    assert "No seed has been run on both sides yet" in text
    assert "no pair yet of seed 1" in text
    assert image.startswith("<svg")


# ------------------------------------------------------------------------------------------------------------ crashes


ENTRIES: list[dict[str, Any]] = [
    {"begun": 0, "version": 0, "mark": 0},
    *({"issued": n, "uid": f"p{n}", "place": n, "step": 1, "attempt": 0, "published": 0} for n in range(4)),
    *({"finished": n, "versions": [0]} for n in range(4)),
    {"trained": 1, "version": 1, "tickets": [0, 1, 2, 3]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "versions", "expected"),
    [
        ([], [0] * 4, (0, 0, 0)),
        ([{"trained": 1, "version": 1, "tickets": [3]}], [0] * 4, (1, 0, 0)),
        ([{**ENTRIES[1], "issued": 4}], [0] * 4, (0, 1, 0)),
        ([{**ENTRIES[1], "issued": 4}, {"dropped": 4, "why": "no signal", "replaced": False}], [0] * 4, (0, 0, 0)),
        ([{"begun": 0, "version": 0, "mark": 9}], [0] * 4, (0, 4, 0)),
        ([], [0, 0, 0, -2], (0, 0, 1)),
    ],
)
def test_what_kills_have_cost_is_read_from_the_files(module, tmp_path, more, versions, expected):
    own = module("cluster_crash")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in [*ENTRIES, *more]))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "age_max": 0}) + "\n")
    table = {"uid": [f"p{n}" for n in range(4)], "sample": [0] * 4, "policy_version": versions}
    pq.write_table(pa.table(table), tmp_path / "rollouts" / "000001.parquet")
    found = own.judged(tmp_path, SimpleNamespace(steps=1, staleness=1))
    assert tuple(found[name] for name in ("trained twice", "lost", "beyond the bound")) == expected


@pytest.mark.nightly
def test_everything_about_ranks_and_servers_runs(module, monkeypatch, tmp_path):
    """Real runs of trew train, and servers that are killed and stopped."""
    out = tmp_path / "cluster.json"
    cluster(module, monkeypatch, "--repeats", "1", "--steps", "1", "--async-steps", "8", "--json", str(out)).main()
    rows = json.loads(out.read_text())["rows"]
    pairs = ["one", "ranks", "publish", "faults", "async", "ledger"]
    assert [row["part"] for row in rows] == [part for part in pairs for _ in range(4 if part == "async" else 2)]
    assert rows[1]["value"] == 0
    assert all(row["value"] <= row["target"] for row in rows if row["part"] == "faults")


def test_the_page_is_current(module):
    stale = [p.name for p, text in module("figures").files().items() if p.read_text(encoding="utf-8") != text]
    assert not stale, "run benchmarks/figures.py, look at what changed, and commit it"
