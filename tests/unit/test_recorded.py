"""Tables of rollouts are read back exactly as the run had them, or refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollouts_help import rollout
from trew.cli.train import replay_settings
from trew.config import ClusterConfig, Config, apply_overrides, parse, validate
from trew.errors import ReplayError
from trew.objective import preset
from trew.rollout import StepRollouts
from trew.rollout.endings import ModelFacts
from trew.rollout.replay import ReplayRollouts
from trew.runs.recorded import RecordedRollouts
from trew.runs.rollouts import EFFECTS, Sampler, write_rollouts
from trew.types import Group, Prompt, Rollout, Score, ScoredGroup, Span, Turn

SAMPLER = Sampler("vllm", "bfloat16")


def turn(
    context: list[int], answer: list[int], spans: list[tuple[int, int]], *, known: bool = True, **more: Any
) -> Turn:
    values = (np.arange(len(answer)) * 0.1 - 1).astype(np.float32)
    bounds = [0, *(end for _, end in spans)]
    return Turn(
        np.array(context, np.int64), np.array(answer, np.int64), values, values * 2 if known else None,
        -values if known else None, tuple(Span(v, bounds[i], end) for i, (v, end) in enumerate(spans)),
        more.get("text", "t"), more.get("finish", "stop"), more.get("state"),
    )  # fmt: skip


def step() -> StepRollouts:
    """Three groups: one of several turns and versions, one that was dropped, one whose engine reports little."""
    several = Rollout(
        (
            turn([1, 2], [3, 4, 5], [(0, 2), (1, 3)], text="call", finish="tool_call", state="start"),
            turn([6], [], []),
            turn([7, 8], [9], [(2, 1)], text="end"),
        ),
        "failed", "the tool did not answer",
    )  # fmt: skip
    cut = Rollout((turn([1, 2], [4], [(2, 1)], finish="length"),), "truncated")
    lacking = Rollout((turn([5], [6, 7], [(2, 2)], known=False, state="alone"),))
    empty = Rollout((turn([5], [], [], known=False),))
    question = Prompt("p/1", messages=({"role": "user", "content": "2+2?"},), columns={"gold": [4, None]})
    first = ScoredGroup(
        Group(question, (several, cut)),
        (
            Score(0.1, parts={"a": 0.1, "b": None}, extracted="4", seconds=0.25, steps=((2, 0.1), (4, -1e-17)),
                  statuses={"a": "scored", "b": "not_applicable"}, part_seconds={"a": 0.125, "b": 0.0}),
            Score(None, "timeout", {"a": None, "b": None}, statuses={"a": "timeout", "b": "timeout"}),
        ),
    )  # fmt: skip
    second = ScoredGroup(Group(Prompt("p/2", text="x"), (rollout([3]), rollout([4]))), (Score(1.0), Score(1.0)))
    third = ScoredGroup(Group(Prompt("p/3", text="y"), (lacking, empty)), (Score(1 / 3), Score(0.0, "no_answer")))
    return StepRollouts((third, first), (first, second, third), {"p/1": math.nan, "p/3": 0.5})


def write(folder: Path, rollouts: StepRollouts, number: int = 1) -> Path:
    (folder / "rollouts").mkdir(exist_ok=True)
    path = folder / "rollouts" / f"{number:06d}.parquet"
    write_rollouts(
        path,
        rollouts.sampled,
        step=number,
        trained_on=rollouts.trained_on,
        baselines=rollouts.baselines,
        sampler=SAMPLER,
    )
    return path


def plain(value: Any) -> Any:
    """Values that can be compared: arrays with their types, NaN as text."""
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.tolist())
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def test_everything_comes_back(tmp_path):
    wanted = step()
    write(tmp_path, wanted)
    recorded = RecordedRollouts(tmp_path)
    found = recorded.read(1)
    assert plain(found) == plain(wanted)
    assert found.trained_on[0] is found.sampled[2], "the table of a replay names groups by identity"
    assert recorded.sampler(1) == SAMPLER
    assert all(
        a.flags.writeable for g in found.sampled for r in g.group.rollouts for t in r.turns for a in (t.token_ids,)
    )


def test_tables_with_and_without_what_the_update_did_are_the_same_rollouts(tmp_path):
    wanted = step()
    path = write(tmp_path, wanted)
    tokens = [len(r.token_ids) for scored in wanted.trained_on for r in scored.group.rollouts]
    effects = {name: [np.full(n, 0.5, np.float32) for n in tokens] for name in EFFECTS}
    write_rollouts(
        path, wanted.sampled, step=1, trained_on=wanted.trained_on, baselines=wanted.baselines, sampler=SAMPLER,
        effects=effects,
    )  # fmt: skip
    assert plain(RecordedRollouts(tmp_path).read(1)) == plain(wanted)
    table = pq.read_table(path)
    lists = table["weights"].to_pylist()
    # Sampled are the groups p/1, p/2 and p/3; p/2 was dropped, and the last completion has no token.
    assert lists == [[0.5] * 7, [0.5], None, None, [0.5] * 2, None]
    pq.write_table(table.drop_columns(list(EFFECTS)), path)  # as earlier versions wrote it
    assert plain(RecordedRollouts(tmp_path).read(1)) == plain(wanted)


def test_steps_in_which_nothing_was_sampled(tmp_path):
    write(tmp_path, step(), 1)
    write(tmp_path, step(), 3)
    with pytest.raises(ReplayError, match=r"000002\.parquet: is missing"):
        RecordedRollouts(tmp_path).read(2)
    rows = [{"step": 1, "groups_sampled": 3}, {"step": 2, "bad_steps": 1}, {"step": 3, "groups_sampled": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RecordedRollouts(tmp_path).read(2) == StepRollouts((), ())
    RecordedRollouts(tmp_path).check(3)
    with pytest.raises(ReplayError, match=r"got 4, but .* has rollouts of 3 steps"):
        RecordedRollouts(tmp_path).check(4)
    # The row says that something was sampled.
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 2, "groups_sampled": 2}) + "\n")
    with pytest.raises(ReplayError, match="is missing"):
        RecordedRollouts(tmp_path).read(2)


def test_a_fingerprint_changes_with_the_content(tmp_path):
    wanted = step()
    write(tmp_path, wanted, 1)
    before = RecordedRollouts(tmp_path).fingerprint(1)
    write(tmp_path, wanted, 1)
    assert RecordedRollouts(tmp_path).fingerprint(1) == before
    write(tmp_path, dataclasses.replace(wanted, baselines={"p/1": 0.25, "p/3": 0.5}), 1)
    assert RecordedRollouts(tmp_path).fingerprint(1) != before


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path):
    """A page of a table has a checksum; what is left is the footer, whose damage shows in types, counts or texts."""
    wanted = plain(step())
    path = write(tmp_path, step())
    whole = path.read_bytes()
    silent = []
    for at in range(4, len(whole) - 8, 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            if plain(RecordedRollouts(tmp_path).read(1)) != wanted:
                silent.append(at)
        except ReplayError:
            pass
    assert not silent


def column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.drop_columns(["versions"]), "older version of trew"),
        (lambda t: t.slice(1), "completion 1 of group 0 is out of order"),
        (lambda t: pa.concat_tables([t.slice(0, 4)]), "groups that were trained on are missing"),
        (lambda t: column(t, "step", [2] * 6), "it holds step 2"),
        (lambda t: column(t, "token_ids", [[1]] * 6), "for 1 tokens"),
        (lambda t: column(t, "turns", [None] * 6), "do not cover its 7 tokens"),
        (lambda t: column(t, "versions", [[]] * 6), "do not cover"),
        (lambda t: column(t, "prompt_ids", [[-1]] * 6), "negative"),
        (lambda t: column(t, "trained_group", [1, 0, None, None, 0, 0]), "are of several"),
        (lambda t: column(t, "uid", [None] * 6), "column uid has empty entries"),
        (lambda t: t.set_column(0, "step", pa.array([1.0] * 6)), "column step is not one"),
    ],
)
def test_tables_that_contradict_themselves(tmp_path, change, said):
    path = write(tmp_path, step())
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(ReplayError, match=said) as error:
        RecordedRollouts(tmp_path).read(1)
    assert str(path) in str(error.value)


def test_groups_are_counted_by_the_run(tmp_path):
    write(tmp_path, step())
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "groups_sampled": 4}) + "\n")
    with pytest.raises(ReplayError, match=r"3 groups, where metrics\.jsonl counts 4"):
        RecordedRollouts(tmp_path).read(1)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all"])
def test_what_is_no_table(tmp_path, content):
    path = write(tmp_path, step())
    path.write_bytes(content)
    for read in (
        RecordedRollouts(tmp_path).read,
        RecordedRollouts(tmp_path).fingerprint,
        RecordedRollouts(tmp_path).check,
    ):
        with pytest.raises(ReplayError, match=r"000001\.parquet: cannot be read"):
            read(1)


def test_a_folder_without_tables(tmp_path):
    with pytest.raises(ReplayError, match="give the folder of a run"):
        RecordedRollouts(tmp_path)


class Tables:
    """Rollouts of three steps, as they were recorded; every step has some of versions 0 and 1."""

    def __init__(self) -> None:
        self.mark = ""

    def read(self, number: int) -> StepRollouts:
        groups = tuple(
            ScoredGroup(
                Group(Prompt(f"p{i}", text="x"), (rollout([3, 4], version=0), rollout([5], version=1))),
                (Score(float(i > 0)), Score(0.0)),
            )
            for i in range(2)
        )
        return StepRollouts(groups, groups)

    def fingerprint(self, number: int) -> str:
        return f"{self.mark}{number}"


def replay(tables: Tables, *, follows: bool = True, dynamic: bool = False, vocabulary: int = 9) -> ReplayRollouts:
    objective = preset("dapo" if dynamic else "grpo")
    return ReplayRollouts(
        tables, follows=follows, config=Config(model="m"), objective=objective, correct=lambda score: score.value == 1,
        facts=ModelFacts(vocabulary, positions=4),
    )  # fmt: skip


def versions(found: StepRollouts) -> list[int]:
    return [span.version for g in found.trained_on for r in g.group.rollouts for span in r.versions]


def test_versions_of_other_weights_never_equal_one_of_this_run():
    assert versions(replay(Tables()).next(1)) == [0, 1, 0, 1]
    found = replay(Tables(), follows=False).next(1)
    assert versions(found) == [0, -1, 0, -1]
    assert all(any(g is s for s in found.sampled) for g in found.trained_on)


def test_an_objective_that_drops_groups_drops_recorded_ones():
    found = replay(Tables(), dynamic=True).next(1)
    assert ([g.group.prompt.uid for g in found.trained_on], len(found.sampled)) == (["p1"], 2)


def test_tokens_that_the_model_does_not_have():
    with pytest.raises(ReplayError, match="step 1 has token 5, but the model's vocabulary has 5"):
        replay(Tables(), vocabulary=5).next(1)
    source = replay(Tables())
    source.facts = ModelFacts(9, positions=2)
    with pytest.raises(ReplayError, match="of 3 tokens, but the model has 2 positions"):
        source.next(1)


def test_a_state_holds_the_rollouts_so_far():
    tables = Tables()
    source, other = replay(tables), replay(tables)
    for number in (1, 2):
        source.next(number)
        source.trained(number, number)
    state = source.state()
    other.load_state(state)
    assert other.state() == state
    tables.mark = "changed"
    with pytest.raises(ReplayError, match="steps 1 to 2"):
        replay(tables).load_state(state)


def test_a_replay_leaves_out_the_settings_of_servers():
    servers = {"rollout": "vllm", "servers": 2, "staleness": 1, "in_flight": "finish", "sync": "files"}
    ranks = {"learner": 2, "shard": "fsdp", "restarts": 1}
    table: dict[str, Any] = {"cluster": {**servers, "server_args": {"max_num_seqs": 8}, **ranks}}
    asked = replay_settings(Path("run"))
    apply_overrides(table, [f"{key}={value}" for key, value in asked.items()])
    config = parse({"model": "m", "out": "r", **table})
    assert validate(config) == []
    assert config.cluster == ClusterConfig(learner=2, shard="fsdp", restarts=1)
    assert config.rollout.replay == str(Path("run").resolve())
