"""trew rewards test and score, and the known answers that they use."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import tiers
from rewards_help import group, write
from scorer_help import save_scorer
from trew.cli.main import run
from trew.config import RewardConfig, load
from trew.data import load_task
from trew.errors import ConfigError, DataError, SandboxError
from trew.rewards import RewardSet, grade
from trew.rewards.builtin.kinds import KINDS
from trew.rewards.known_answers import known_answers, solve
from trew.rewards.remote.match import described
from trew.rewards.reward_checks import try_reward
from trew.rewards.sandbox import boundary
from trew.training.episodes import rewards_of
from trew.types import Prompt

NUMBERS = [{"answer": "72"}, {"answer": "-3.5"}, {"answer": 0}, {"answer": "1,200"}, {"answer": "a + b\n#### 0.25"}]
CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("gsm8k", [*NUMBERS, {"answer": "1/3"}], {}),
    ("gsm8k", NUMBERS, {"mode": "flexible"}),
    ("gsm8k", NUMBERS, {"thinking": True}),
    ("arithmetic", NUMBERS, {}),
    ("arithmetic", NUMBERS, {"thinking": True}),
    ("countdown", [{"nums": [8, 2, 1], "target": 15}, {"nums": [1, 1], "target": 50}, {"nums": [7], "target": 7}], {}),
    ("countdown", [{"nums": [3, 9, 4, 25], "target": 52}], {"require_all": False}),
    ("format", [{}], {}),
    ("format", [{}], {"prefilled": "<think>\n"}),
    ("format", [{}], {"template": "…<a>…</a>…"}),
    ("soft_overlong", [{}], {"max_completion_len": 100, "soft_punish_cache": 20}),
    ("repetition", [{}], {"ngram_size": 4, "max_penalty": 0.5}),
    ("math", [{"answer": gold} for gold in ("72", "-3.5", r"\frac{1}{3}", "[1,2)", "(3,4)", "x^2+1", r"\text{A}")], {}),
    ("math", [{"answer": "72"}, {"answer": r"\{1,2\}"}], {"require_boxed": False, "thinking": True}),
]
SLOWER: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("code_stdin", [{"tests": [{"input": "1", "output": "2"}], "solution": "print(int(input()) + 1)"}], {}),
    ("code_func", [{"entry_point": "f", "asserts": ["assert f(1) == 2"], "code": "def f(x):\n    return x + 1"}], {}),
    ("reasoning_gym", [], {}),  # its rows come from the package: tests of that kind
    ("cosine", [], {}),  # asks another reward: refused alone
]


TRIED = {f"{kind}-{i}": (kind, rows, args) for i, (kind, rows, args) in enumerate([*CASES, *SLOWER]) if rows}
TRIED_ALWAYS = ("gsm8k-0", "arithmetic-3", "math-12", "code_func-15")


@pytest.mark.parametrize("case", tiers.some(TRIED, TRIED_ALWAYS))
def test_built_ins_pass_their_own_trial(case: str) -> None:
    kind, rows, args = TRIED[case]
    rewards = RewardSet.from_config([RewardConfig(name=kind, args=args)])
    prompts = [Prompt(f"{i}", text="?", columns=row) for i, row in enumerate(rows)]
    try:
        checks = try_reward(rewards, prompts)
    except SandboxError as error:
        pytest.skip(str(error))
    assert [(check.what, check.examples[:3]) for check in checks if not check.holds] == []
    names = [check.what for check in checks]
    assert names[-4:] == [
        "3 repeats give the same",
        "another thread gives the same",
        "another process gives the same",
        "time per completion",
    ]
    if kind not in ("soft_overlong", "repetition"):
        assert "hostile texts score 0 in bounded time" in names
    if kind in ("gsm8k", "arithmetic", "math") or (kind == "format" and "template" not in args):
        assert "wrappers do not matter" in names
    assert "s per 1,000 completions" in checks[-1].numbers


def test_every_kind_has_probes_of_both_outcomes() -> None:
    for kind, rows, args in CASES:
        made = [probe for row in rows for probe in known_answers(kind, row, args)]
        assert len({probe.score for probe in made}) >= 2, kind
    # What an environment gives is not graded from text.
    assert {kind for kind, _, _ in [*CASES, *SLOWER]} == set(KINDS) - {"environment"}
    with pytest.raises(ConfigError, match="whether the answer is right"):
        RewardSet.from_config([RewardConfig(name="cosine", args={"max_len": 9})])


@pytest.mark.parametrize(
    ("gold", "mutations"),
    [
        ("72", {"#### 73", "#### -72", "#### 720", "#### 82"}),
        ("-2.5", {"#### -1.5", "#### 2.5", "#### -25", "#### -3.5"}),
        ("900", {"#### 901", "#### -900", "#### 9000", "#### 800"}),
    ],
)
def test_mutations_of_numbers(gold: str, mutations: set[str]) -> None:
    made = {probe.text for probe in known_answers("gsm8k", {"answer": gold}, {}) if probe.family == "mutation"}
    assert mutations <= made


def test_mutations_of_pairs_and_intervals() -> None:
    made = {p.what: p.text for p in known_answers("math", {"answer": "[1,2)"}, {})}
    assert made["the ends exchanged"] == r"\boxed{[2,1)}"
    assert made["another kind of end"] == r"\boxed{(1,2]}"
    assert "another kind of end" not in {p.what for p in known_answers("math", {"answer": "(1,2)"}, {})}


def test_solve() -> None:
    for numbers, target in (([8, 2, 1], 15), ([3, 7, 25], 46), ([1, 5, 5, 5], 24), ([3, 3, 8, 8], 24)):
        found = solve(numbers, Fraction(target))
        assert found is not None
        assert grade("countdown", f"<answer>{found}</answer>", numbers=numbers, target=target).score == 1.0
    assert solve([1, 1], Fraction(3)) is None


# ------------------------------------------------------------------------------------------------- trew rewards test


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_command_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"})
    assert run(["rewards", "test", "gsm8k", "--data", data, "--set", "mode=flexible"]) == 0
    out = capsys.readouterr().out
    assert "no problems in 2 rows" in out
    assert "none wrong of" in out
    assert "p99" in out


def test_command_test_finds_bad_golds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"prompt": "?", "answer": "2"}, {"prompt": "?", "answer": "two \x1b[m"})
    assert run(["rewards", "test", "gsm8k", "--data", data]) == 1
    out = capsys.readouterr().out
    assert "row 2 (d:1): reward 'gsm8k': gold 'two" in out
    assert "\x1b" not in out


FUNCTIONS = """
    import itertools
    counter = itertools.count()
    import os, time

    def good(completions, answer):
        return [float(c.split()[-1:] == [a]) for a, c in zip(answer, completions)]

    def generous(completions, answer):
        return [float(a in c) for a, c in zip(answer, completions)]

    def unsteady(completions):
        return [next(counter) for _ in completions]

    def relative(completions):
        mean = sum(map(len, completions)) / len(completions)
        return [len(c) / mean for c in completions]

    def constant(completions):
        return [1.0] * len(completions)

    def hashed(completions):
        return [float(hash(c) % 1000) for c in completions]

    def fragile(completions):
        return [float(len(c.encode("utf-8"))) for c in completions]

    def hangs(completions):
        if any("(((((" in c for c in completions):
            time.sleep(1000)
        return [float(len(c)) for c in completions]
"""


@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("good", []),
        ("generous", ["answers with one thing changed score less than the gold"]),
        ("unsteady", ["3 repeats give the same", "values do not depend on the batch"]),
        ("relative", ["values do not depend on the batch"]),
        ("constant", ["values differ between answers"]),
        ("hashed", ["another process gives the same"]),
        ("fragile", ["hostile texts get a number in bounded time"]),
    ],
)
def test_trial_of_functions(tmp_path: Path, name: str, failed: list[str]) -> None:
    rewards = RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, FUNCTIONS)}:{name}")])
    prompts = [group(uid=str(i), answer=str(10**i)).prompt for i in range(3)]
    assert [check.what for check in try_reward(rewards, prompts) if not check.holds] == failed


def test_a_trial_ends_what_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"prompt": "1 + 1?", "answer": "2"})
    spec = f"{write(tmp_path, FUNCTIONS)}:hangs"
    assert run(["rewards", "test", spec, "--data", data, "--timeout-s", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"]
    assert "did not return within 1 s; for prompt" in found["warnings"][0]
    assert [check["what"] for check in found["checks"]][-1] == "time per completion"
    with pytest.raises(ConfigError, match="--timeout-s: got -1"):
        run(["rewards", "test", spec, "--data", data, "--timeout-s", "-1"])
    (tmp_path / "config.json").write_text("{}")  # as in the folder of a reward model
    with pytest.raises(ConfigError, match=r"timeout_s: got 5\.0, but it is for functions in files"):
        run(["rewards", "test", str(tmp_path), "--data", data, "--timeout-s", "5"])


def test_command_test_of_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"prompt": "1 + 1?", "answer": "2"})
    spec = f"{write(tmp_path, FUNCTIONS)}:good"
    assert run(["rewards", "test", spec, "--data", data]) == 0
    assert "2 different, from 0 to 1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--limit: got 0"):
        run(["rewards", "test", spec, "--data", data, "--limit", "0"])


def test_golds_that_can_never_score_fail_the_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        """
        def f(completions, answer, **kwargs):
            return [float("," not in a and c == a) for c, a in zip(completions, answer)]
        """,
    )
    data = jsonl(tmp_path / "d.jsonl", *({"prompt": "?", "answer": a} for a in ("7", "1,200", "8", "3,000")))
    assert run(["rewards", "test", f"{path}:f", "--data", data]) == 1
    said = capsys.readouterr().out
    assert "FAILED  the gold can score" in said
    assert "2 rows of 4" in said
    assert "1,200" in said
    assert "3,000" in said


def test_a_reward_that_asks_for_no_right_answer_need_not_give_golds_more(capsys: pytest.CaptureFixture[str]) -> None:
    """The function and the command of recipes/custom_reward.toml: the gold 9 is shorter than the wrong answer 10."""
    spec = str(Path(__file__).parents[2] / "recipes" / "custom_reward.py")
    rows = ["--task", "arithmetic", "--limit", "50"]
    assert run(["rewards", "test", f"{spec}:brief", *rows, "--set", "characters=12"]) == 0
    assert "gold scores" not in capsys.readouterr().out
    assert run(["rewards", "test", f"{spec}:close", *rows]) == 0  # -14 is not 14
    assert "ok      the gold can score" in capsys.readouterr().out


def test_a_constant_reward_is_told_what_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "def f(completions, **kwargs):\n    return [0.0 for c in completions]\n")
    turns = [{"role": "user", "content": "?"}]
    data = jsonl(tmp_path / "d.jsonl", {"prompt": turns, "answer": "7", "level": "1"})
    assert run(["rewards", "test", f"{path}:f", "--data", data]) == 1
    said = capsys.readouterr().out
    for words in ("columns there are: answer, level", "as it was found there: '7'", "lists of messages", "boxed"):
        assert words in said


# ------------------------------------------------------------------------------------------------ trew rewards score


def test_command_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = jsonl(
        tmp_path / "d.jsonl",
        {"uid": "a", "prompt": "?", "completion": ["#### 2", "#### 3"], "answer": "2"},
        {"prompt": [{"role": "user", "content": "?"}], "answer": "4",
         "completion": [{"role": "assistant", "content": "4"}]},
        {"completion": "#### 5", "uid": None},
        {"completion": "#### 6", "uid": None},
    )  # fmt: skip
    out = tmp_path / "out.jsonl"
    assert run(["rewards", "score", "gsm8k", "--data", data, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(r["uid"], r["sample"], r["score"], r["status"]) for r in rows] == [
        ("a", 0, 1.0, "scored"),
        ("a", 1, 0.0, "scored"),
        ("1", 0, 0.0, "no_answer"),
        ("2", 0, None, "not_applicable"),
        ("3", 0, None, "not_applicable"),
    ]
    assert rows[0]["extracted"] == "2"
    assert "0.3333" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already exists"):
        run(["rewards", "score", "gsm8k", "--data", data, "--out", str(out)])
    assert run(["rewards", "score", "gsm8k", "--data", data, "--out", str(out), "--overwrite"]) == 0


@pytest.mark.parametrize("out", ["folder.jsonl", "d.jsonl/out.jsonl"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_scored(tmp_path: Path, out: str) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"completion": "#### 2", "answer": "2"})
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"--out: .*folder"):
        run(["rewards", "score", "gsm8k", "--data", data, "--out", str(tmp_path / out), "--overwrite"])


def test_score_of_a_runs_rollouts(tmp_path: Path) -> None:
    from trew.runs.rollouts import write_rollouts

    rewards = RewardSet.from_config([RewardConfig(name="gsm8k")])
    write_rollouts(tmp_path / "000001.parquet", rewards.score([group("#### 72", "#### 7", answer="72")]), step=1)
    out = tmp_path / "out.parquet"
    args = ["--set", "max_completion_len=7", "soft_punish_cache=2"]
    data = str(tmp_path / "000001.parquet")
    assert run(["rewards", "score", "gsm8k", "--data", data, "--out", str(out)]) == 0
    import pyarrow.parquet as pq

    table = pq.read_table(out)
    assert table.column("score").to_pylist() == [1.0, 0.0]
    keys = pq.read_table(tmp_path / "000001.parquet").select(["uid", "sample", "completion"])
    assert table.select(["uid", "sample", "completion"]).to_pylist() == keys.to_pylist()
    assert run(["rewards", "score", "soft_overlong", "--data", data, "--out", str(tmp_path / "o.jsonl"), *args]) == 0
    lines = (tmp_path / "o.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [-1.0, -0.5]  # 7 and 6 tokens in these groups


def test_a_runs_rollouts_are_scored_as_the_run_scored_them_chats_too(tmp_path: Path) -> None:
    from trew.runs.rollouts import write_rollouts

    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    given = f"({chat!r}, [{{'role': 'assistant', 'content': 'yes'}}])"
    code = f"def f(prompts, completions, **_): return [float(x == {given}) for x in zip(prompts, completions)]"
    path = write(tmp_path, code)
    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:f")])
    made = group("yes", "no")
    made = dataclasses.replace(made, prompt=Prompt("p", messages=tuple(chat), columns={"answer": 1}))
    scored = rewards.score([made])
    rewards.close()
    write_rollouts(tmp_path / "000001.parquet", scored, step=1)
    out = tmp_path / "out.jsonl"
    assert run(["rewards", "score", f"{path}:f", "--data", str(tmp_path / "000001.parquet"), "--out", str(out)]) == 0
    again = [json.loads(line)["score"] for line in out.read_text().splitlines()]
    assert again == [score.value for score in scored[0].scores] == [1.0, 0.0]


def test_a_prompt_may_be_messages_as_a_json_string_or_an_empty_cell(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, f"def f(prompts, **_): return [float(p == {chat!r}) if p else 0.5 for p in prompts]")
    rows = [{"prompt": prompt, "completion": "x"} for prompt in (chat, json.dumps(chat), "hi", None)]
    data, out = jsonl(tmp_path / "d.jsonl", *rows, {"completion": "x"}), tmp_path / "out.jsonl"
    assert run(["rewards", "score", f"{path}:f", "--data", data, "--out", str(out)]) == 0
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0, 1.0, 0.0, 0.5, 0.5]


def test_scores_of_rows_with_one_completion_each_can_be_joined(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"uid": uid, "completion": text, "answer": "1"} for uid, text in (("a", "x"), ("b", "y"), ("a", "z"))
    ]
    lines.append({"uid": "a", "completion": ["v", "w"], "answer": "1"})
    data, out = jsonl(tmp_path / "d.jsonl", *lines), tmp_path / "o.jsonl"
    assert run(["rewards", "score", "gsm8k", "--data", data, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["uid"], row["sample"], row["completion"]) for row in rows] == [
        ("a", 0, "x"), ("b", 0, "y"), ("a", 1, "z"), ("a", 2, "v"), ("a", 3, "w")]  # fmt: skip


def test_score_refuses_what_would_write_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises((ConfigError, DataError), match="no rows"):
        run(["rewards", "score", "gsm8k", "--data", str(tmp_path / "empty.jsonl"), "--out", str(out)])
    data = jsonl(tmp_path / "d.jsonl", {"completion": "#### 5", "question": "?"})
    with pytest.raises(ConfigError, match=r"reward 'gsm8k'.* none of the 1 rows"):
        run(["rewards", "score", "gsm8k", "--data", data, "--out", str(out)])
    assert not out.exists()


def test_score_reads_tokens(tmp_path: Path) -> None:
    rows = [{"completion": "x", "token_ids": ids} for ids in ([1, 2, 3, 4], [1, 1, 1, 1])]
    data, out = jsonl(tmp_path / "d.jsonl", *rows), tmp_path / "out.jsonl"
    assert run(["rewards", "score", "repetition", "--data", data, "--out", str(out), "--set", "ngram_size=2"]) == 0
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == pytest.approx([0, -2 / 3])


def test_score_refuses_episodes_where_more_than_the_last_reply_is_read(tmp_path: Path) -> None:
    row = {"completion": "#### 5", "answer": "5", "token_ids": [1, 2], "rollout_status": "finished"}
    data = jsonl(tmp_path / "played.jsonl", {**row, "ending": "done"})
    path = write(
        tmp_path,
        "def f(completions):\n    return [1.0] * len(completions)\n"
        "def g(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n",
    )
    out = tmp_path / "out.jsonl"
    for reward in ("repetition", f"{path}:f"):
        with pytest.raises(ConfigError, match="got episodes of an environment, accepts completions of one turn"):
            run(["rewards", "score", reward, "--data", data, "--out", str(out)])
    assert not out.exists()
    for reward in ("gsm8k", f"{path}:g"):
        assert run(["rewards", "score", reward, "--data", data, "--out", str(out), "--overwrite"]) == 0
    # Elsewhere a column of this name means what its writer wants.
    for other in ({**row, "ending": ""}, {"completion": "x", "token_ids": [1], "ending": "happy"}):
        data = jsonl(tmp_path / "other.jsonl", other)
        assert run(["rewards", "score", "repetition", "--data", data, "--out", str(out), "--overwrite"]) == 0


def test_a_reward_model_scores_no_answers_without_their_prompts(tmp_path: Path) -> None:
    model, out = str(save_scorer(tmp_path / "model")), tmp_path / "out.jsonl"
    data = jsonl(tmp_path / "d.jsonl", {"question": "a", "completion": "x"}, {"question": "b", "completion": "x"})
    args = ["rewards", "score", model, "--data", data, "--out", str(out)]
    with pytest.raises(ConfigError, match=r"is a model, which reads prompts, but d\.jsonl line 1 has none"):
        run(args)
    assert run([*args, "--prompt-column", "question"]) == 0
    first, second = (json.loads(line)["score"] for line in out.read_text().splitlines())
    assert first != second


def test_score_calls_functions_with_about_a_steps_completions(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(completions):\n    return [float(len(completions))] * len(completions)\n")
    data = jsonl(tmp_path / "d.jsonl", *({"completion": ["a"] * 100} for _ in range(5)))
    out = tmp_path / "out.jsonl"
    assert run(["rewards", "score", f"{path}:f", "--data", data, "--out", str(out)]) == 0
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [300.0] * 300 + [200.0] * 200


def test_score_says_what_is_wrong(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"prompt": "?", "completions": "x"}, {"prompt": "?", "completions": 3})
    out = str(tmp_path / "out.jsonl")
    with pytest.raises(DataError, match=r"line 1: .*'completion' \(did you mean 'completions'\?\)"):
        run(["rewards", "score", "gsm8k", "--data", data, "--out", out])
    with pytest.raises(DataError, match=r"line 2: .*'completions'.* text"):
        run(["rewards", "score", "gsm8k", "--data", data, "--out", out, "--completion-column", "completions"])
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet"):
        run(["rewards", "score", "gsm8k", "--data", data, "--out", "x.csv"])
    data = jsonl(tmp_path / "e.jsonl", {"completion": "x"})
    with pytest.raises(ConfigError, match=r"reward 'soft_overlong'.* tokens"):
        run(["rewards", "score", "soft_overlong", "--data", data, "--out", out,
             "--set", "max_completion_len=9", "soft_punish_cache=1"])  # fmt: skip
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ('[environment]\nname = "guess"', ("environment",)),
        ('[environment]\nname = "guess"\n[[rewards]]\nname = "format"', ("environment", "format")),
        ('[data]\ntask = "arithmetic"\n[environment]\nname = "guess"', ("environment", "arithmetic")),
        ('[data]\ntask = "arithmetic"', ("arithmetic",)),
    ],
)
def test_a_host_has_the_rewards_that_a_run_of_its_recipe_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, names: tuple[str, ...]
) -> None:
    """What an environment gives is one of them: without it, runs refused every host of their own recipe."""
    served: list[RewardSet] = []
    monkeypatch.setattr("trew.cli.serve.serve_rewards", lambda rewards, *_: served.append(rewards) or 0)
    path = tmp_path / "r.toml"
    path.write_text(f'model = "lm"\nout = "runs/x"\n{table}\n')
    assert run(["rewards", "serve", "--recipe", str(path)]) == 0
    assert served[0].names == names
    config = load(path)
    assert not isinstance(config.data, tuple)
    defaults = () if config.numbered else load_task(config.data, eval_size=1, seed=0).default_rewards
    assert described(RewardSet.from_config(rewards_of(config, defaults)).rewards) == described(served[0].rewards)


def test_text_groups_have_lengths_alone() -> None:
    from trew.rewards.reward_checks import text_group

    made = text_group(Prompt("q", text="?"), ["a", "b"], lengths=[3, 0])
    assert [len(c) for c in made.rollouts] == [3, 0]
    assert made.rollouts[0].token_ids.tolist() == [0, 0, 0]
    assert made.rollouts[0].entropies is None


def test_published_rows_of_humaneval_are_scored_with_the_head_of_their_program(tmp_path: Path) -> None:
    """Without it answers that leave out its imports scored 0, and rows whose tests use its helpers had a bad gold."""
    try:
        boundary()
    except SandboxError as error:
        pytest.skip(str(error))
    head = "from typing import List\n\ndef one() -> int:\n    return 1\n\n"
    row = {
        "prompt": head + "def f(x: List[int]) -> int:\n    '''Adds 1.'''\n", "entry_point": "f",
        "canonical_solution": "    return x[0] + 1\n",
        "test": "def check(candidate):\n    assert candidate([1]) == 1 + one()\n",
        "completion": "```python\ndef f(x: List[int]) -> int:\n    return x[0] + 1\n```",
    }  # fmt: skip
    data, out = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    data.write_text(json.dumps(row) + "\n")
    assert run(["rewards", "score", "code_func", "--data", str(data), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["score"] == 1.0


def test_several_completions_of_a_row_have_a_list_of_tokens_each(tmp_path: Path) -> None:
    """Their tokens were dropped, so that rewards on tokens found none and gave 0."""
    data, out = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    command = ["rewards", "score", "repetition", "--data", str(data), "--out", str(out), "--overwrite"]
    data.write_text(json.dumps({"completion": ["a", "b"], "token_ids": [[1, 1, 1, 1, 1], [1, 2, 3]]}) + "\n")
    assert run([*command, "--set", "ngram_size=1"]) == 0
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [-0.8, 0.0]


@pytest.mark.parametrize("ids", [None, [1, 2], [[1], [2], [3]], [1.5, 2], [[1], "b"], "1 2", [True]])
def test_completions_whose_tokens_are_not_known_are_refused(tmp_path: Path, ids: Any) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"completion": ["a", "b"], "token_ids": ids}) + "\n")
    with pytest.raises((ConfigError, DataError), match="token_ids"):
        run(["rewards", "score", "repetition", "--data", str(data), "--out", str(tmp_path / "scores.jsonl")])
