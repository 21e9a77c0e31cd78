"""``reasoning-gym:NAME``: problems by seed, and grading that executes nothing and cannot be bought with noise."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiers
from trew.cli.data import prepare
from trew.cli.main import run
from trew.config import DataConfig, RewardConfig
from trew.data import Dataset, load_task, make_task
from trew.data.files import read_rows
from trew.data.tasks import puzzles
from trew.errors import ConfigError, DataError
from trew.rewards import RewardSet, grade
from trew.rewards.builtin import reasoning
from trew.rewards.builtin.reasoning import CASELESS, EXPRESSION, FORMULA, OURS, PACKAGE, same
from trew.rewards.builtin.reasoning_worker import NoFormula, is_expanded, read, untagged
from trew.rewards.known_answers import known_answers

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="the reasoning-gym package is not installed"
)


def made(name: str, *, n: int = 2, size: int = 4, seed: int = 0, **args: Any) -> Dataset:
    return load_task(DataConfig(task=f"reasoning-gym:{name}", args={"size": size, **args}), eval_size=n, seed=seed)


def judged(answer: str, gold: str, task: str, **facts: Any) -> float | None:
    puzzle = json.dumps({"task": task, **facts})
    return grade("reasoning_gym", f"Well. <answer>{answer}</answer>", gold, puzzle=puzzle).score


# ------------------------------------------------------------------------------------------------------------- the data


@needs_package
def test_problems_depend_on_the_seed_alone_and_evaluation_is_apart() -> None:
    one, again, other = (made("isomorphic_strings", n=10, size=20, seed=seed) for seed in (0, 0, 1))
    assert (one.train, one.eval) == (again.train, again.eval)  # this task follows the hash seed when left alone
    texts = [p.messages[0]["content"] for p in [*one.train, *one.eval]]
    assert len(set(texts)) == 30
    assert not set(texts) & {p.messages[0]["content"] for p in other.train}
    assert one.default_rewards == (RewardConfig(name="reasoning_gym"),)
    assert RewardSet.from_config(one.default_rewards).check_golds([*one.train, *one.eval]) == []
    assert one.fingerprint != other.fingerprint


@needs_package
@pytest.mark.parametrize(("end", "how"), [("kill -9 $$", "was ended by signal 9"), ("exit 3", "with exit status 3")])
def test_a_generator_that_is_ended_in_the_middle_is_told(end, how, tmp_path, monkeypatch) -> None:
    """What came before it would be a smaller data set."""
    entry = {"index": 0, "question": "1 + 1?", "answer": "2", "metadata": {}}
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(entry)}'\n{end}\n")
    other.chmod(0o755)
    monkeypatch.setattr(puzzles.sys, "executable", str(other))
    with pytest.raises(DataError, match=rf"{how} after 1 of them"):
        made("chain_sum")


@needs_package
def test_the_packages_settings_are_used_and_its_refusal_is_told() -> None:
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = made("chain_sum", config=small)
    assert all(abs(int(p.columns["gold"])) <= 18 for p in data.train)
    with pytest.raises(ConfigError, match=r"cannot make 'chain_sum' with.*min_terms"):
        made("chain_sum", config={"min_terms": -5})
    with pytest.raises(ConfigError, match=r"cannot make 'chain_sum'.*terms"):
        made("chain_sum", config={"terms": 3})
    with pytest.raises(ConfigError, match=r"'chan_sum' \(did you mean 'chain_sum'\?\)"):
        made("chan_sum")
    with pytest.raises(DataError, match="different problems"):
        made("chain_sum", n=250, config=small)


@pytest.mark.parametrize(
    ("task", "args", "says"),
    [
        ("reasoning-gym", {}, "without a name"),
        ("reasoning-gym:composite", {}, "not supported"),
        ("reasoning-gym:boxnet", {}, "no reference answers to check its grader with"),
        ("reasoning-gym:gcd", {"size": 0}, "data.args.size"),
        ("reasoning-gym:gcd", {"config": {"seed": 1}}, "data.args.config.seed"),
        ("reasoning-gym:gcd", {"puzzle": "lcm"}, "data.task says 'gcd'"),
        ("reasoning_gym:gcd", {}, "did you mean 'reasoning-gym'"),
    ],
)
def test_settings_are_checked(task: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_task(DataConfig(task=task, args=args))
    assert says in str(caught.value)


@needs_package
def test_the_package_refuses_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so by assert, which Python skips where it is told to optimize."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    with pytest.raises(ConfigError, match="min_terms must be positive"):
        made("chain_sum", config={"min_terms": -3, "max_terms": 2})


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'reasoning-gym>="):
        made("gcd")
    puzzle = json.dumps({"task": "jugs"})
    assert "pip install" in reasoning.row_problem("[]", {"puzzle": puzzle})
    verdict = grade("reasoning_gym", "<answer>[]</answer>", "[]", puzzle=puzzle)
    assert (verdict.score, verdict.status) == (None, "sandbox_error")
    assert judged("12", "12", "gcd") == 1  # most tasks are graded without it


@needs_package
def test_prepared_problems_are_the_same_when_read_again(tmp_path: Path) -> None:
    prepare("reasoning-gym:graph_color", out=str(tmp_path), set=("size=6",), eval_size=3, format="parquet")
    fresh = made("graph_color", n=3, size=6)
    config = DataConfig(task="reasoning-gym:graph_color", train=str(tmp_path))
    data = load_task(config, eval_size=3, seed=7)
    assert [p.messages for p in data.train] == [p.messages for p in fresh.train]
    assert [dict(p.columns) for p in data.eval] == [{"uid": p.uid, **p.columns} for p in fresh.eval]
    assert RewardSet.from_config(data.default_rewards).check_golds([*data.train, *data.eval]) == []
    with pytest.raises(DataError, match=r"reasoning-gym.*'graph_color'"):
        load_task(DataConfig(task="reasoning-gym:gcd", train=str(tmp_path)), eval_size=3, seed=0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"gold": "1", "puzzle": "{}"}, "JSON object with the task's name"),
        ({"gold": "1", "puzzle": "no"}, "JSON object with the task's name"),
        ({"gold": 1, "puzzle": '{"task": "gcd"}'}, "'gold' must be a string, got 1"),
        ({"gold": "1", "puzzle": None}, "'puzzle' must be a string, got null"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    good = {"question": "gcd of 2 and 4?", "gold": "2", "puzzle": '{"task": "gcd"}'}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (good, {"question": "q", **row})))
    with pytest.raises(DataError, match=r"train\.jsonl line 2") as caught:
        load_task(DataConfig(task="reasoning-gym:gcd", train=str(tmp_path)), eval_size=1, seed=0)
    assert says in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- the grading


@pytest.mark.parametrize(
    ("answer", "gold", "task", "score"),
    [
        ("1,214.00", "1214", "chain_sum", 1),
        ("+1214", "1214", "chain_sum", 1),
        ("1215", "1214", "chain_sum", 0),
        ("12 14", "1214", "chain_sum", 0),
        ("1214 or 1215", "1214", "chain_sum", 0),
        ("１２１４", "1214", "chain_sum", 0),
        ("1e3", "1000", "chain_sum", 1),
        ("9e9999", "1214", "chain_sum", 0),
        ("61", "0x3d", "bitwise_arithmetic", 1),
        ("0x3D", "0x3d", "bitwise_arithmetic", 1),
        ("2/4", "1/2", "dice", 1),
        ("1/0", "1/2", "dice", 0),
        ("False", "False", "game_of_life_halting", 1),
        ("True", "False", "game_of_life_halting", 0),
        ("anything", "True", "game_of_life_halting", 0),
        ("[1.0, '2', 3]", "['1.0', '2.0', '3']", "number_sorting", 1),
        ("['1.5', '2.0', '3']", "['1.0', '2.0', '3']", "number_sorting", 0),
        ("[1, 2]", "['1.0', '2.0', '3']", "number_sorting", 0),
        ("[[[[", "[[0,1],[1,0]]", "game_of_life", 0),
        ("[[0, 1], [1, 0]]", "[[0,1],[1,0]]", "game_of_life", 1),
        ("[[0,1],[1,0],[1]]", "[[0,1],[1,0]]", "game_of_life", 0),
        (" 1 2\n3   4 \n", "1 2\n3 4", "rotate_matrix", 1),
        ("1 2 3 4", "1 2\n3 4", "rotate_matrix", 0),
        ("Wife", "wife", "family_relationships", 1),
        ("cba", "CBA", "string_manipulation", 0),
        ("a,b ,  c", "a, b, c", "word_sorting", 1),
        ("the answer is wife", "wife", "family_relationships", 0),
        ("[ch for ch in 'EEB']", "EEB", "string_insertion", 0),
        ("['E','E','B']", "EEB", "string_insertion", 0),
        ("0.2344", "0.234375", "coin_flip", 1),
        ("0.2", "0.234375", "coin_flip", 0),
        ("0", "9.5e-05", "coin_flip", 0),
        ("15/64", "0.234375", "coin_flip", 1),
        ("8-3i", "8.0 - 3.0i", "complex_arithmetic", 1),
        ("8 + 3i", "8.0 - 3.0i", "complex_arithmetic", 0),
        ("nan", "8.0 - 3.0i", "complex_arithmetic", 0),
        ("5", "5.0 + 0.0i", "complex_arithmetic", 1),
        ('""', "", "polynomial_equations", 1),
        ("none", "", "polynomial_equations", 0),
    ],
)
def test_answers_are_compared_as_documented(answer: str, gold: str, task: str, score: float) -> None:
    assert judged(answer, gold, task) == score


def test_expressions_are_graded_by_ours() -> None:
    facts = {"metadata": {"numbers": [3, 7, 25, 50], "target": 500}}
    assert judged("50 * (3 + 7) + 25 - 25", "x", "countdown", **facts) == 0
    assert judged("(3 + 7) * 50", "x", "countdown", **facts) == 0  # 25 is not used
    assert judged("(25 - 7 - 3) * 50 - 250", "x", "countdown", **facts) == 0
    four = {"metadata": {"numbers": [4, 8, 6, 2]}}
    assert judged("4*8 - 6 - 2", "4*8 - 6 - 2", "puzzle24", **four) == 1
    assert judged("6*4 + 2 - 2", "x", "puzzle24", **four) == 0  # the package takes any four numbers in its range
    assert judged("__import__('os').system('true')", "x", "puzzle24", **four) == 0
    assert judged("9**9**9**9", "x", "puzzle24", **four) == 0


def test_any_of_several_boards_is_right() -> None:
    boards = {"metadata": {"valid_answers": ["_ Q\nQ _", "Q _\n_ Q"]}}
    assert judged("Q _\n_ Q", "_ Q\nQ _", "n_queens", **boards) == 1
    assert judged("Q Q\n_ _", "_ Q\nQ _", "n_queens", **boards) == 0


@needs_package
@pytest.mark.parametrize(
    ("answer", "gold", "task", "score"),
    [
        ("3*x**4/2 - 9*x**8/10 + C", "-9*x**8/10 + 3*x**4/2 + C", "simple_integration", 1),
        ("1.5x^4", "-9*x**8/10 + 3*x**4/2 + C", "simple_integration", 0),
        ("3*x^4/2 - 0.9*x^8", "-9*x**8/10 + 3*x**4/2 + C", "simple_integration", 1),
        ("3*x**4/2 - 9*x**8/10 + C*x", "-9*x**8/10 + 3*x**4/2 + C", "simple_integration", 0),
        ("3*x**4/2 - 9*x**8/10.0000001", "-9*x**8/10 + 3*x**4/2 + C", "simple_integration", 0),
        ("sin(x)**2/2 + 7", "-cos(x)**2/2 + C", "intermediate_integration", 1),
        ("-cos(2*x)/4", "-cos(x)**2/2 + C", "intermediate_integration", 1),
        ("log(Abs(x)) + C", "log(-x) + C", "intermediate_integration", 1),
        ("log(2*x)", "log(x) + C", "intermediate_integration", 1),
        ("exp(x)", "2*exp(x) + C", "intermediate_integration", 0),
        ("x**2 + 2*x + 1", "1 + 2*x + x**2", "polynomial_multiplication", 1),
        ("(x + 1)**2", "1 + 2*x + x**2", "polynomial_multiplication", 0),
        ("(x + 1)*(x + 1)", "1 + 2*x + x**2", "polynomial_multiplication", 0),
        ("x**2 + 2*x*y", "2*y*x + x**2", "polynomial_multiplication", 1),
        ("x**2 + 2*x*y + 5", "2*y*x + x**2", "polynomial_multiplication", 0),
        ("exec('x')", "x", "polynomial_multiplication", 0),
        ("(lambda: 1)()", "1", "polynomial_multiplication", 0),
        ("x.__class__", "x", "polynomial_multiplication", 0),
        ("'a'*9", "x", "polynomial_multiplication", 0),
    ],
)
def test_formulas_are_compared_by_value_and_never_executed(answer: str, gold: str, task: str, score: float) -> None:
    assert judged(answer, gold, task) == score


@pytest.mark.parametrize(
    ("limit", "most", "said"), [("CPU_S", 1.0, "of processor time"), ("MEMORY_BYTES", 1 << 26, "of memory")]
)
def test_settings_without_end_are_an_error_and_no_hang(limit, most, said, monkeypatch):
    monkeypatch.setattr(puzzles, limit, most)
    terms = {"min_terms": 10**9, "max_terms": 10**9}
    with pytest.raises(ConfigError, match=rf"data.args.config: .*'chain_sum'.*1000000000.* {said}"):
        made("chain_sum", config=terms)


def test_lists_that_are_nested_too_deeply_are_compared_as_text():
    puzzle = json.dumps({"task": "gcd"})
    for depth in (90, 900, 9000):
        gold = "[" * depth + "1" + "]" * depth
        texts = (gold, gold.replace("1", "2"), "1")
        assert [grade("reasoning_gym", f"<answer>{text}</answer>", gold, puzzle=puzzle).score for text in texts] == [
            1.0, 0.0, 0.0,
        ]  # fmt: skip


@needs_package
@pytest.mark.parametrize(
    ("answer", "gold", "task", "score"),
    [
        ("1/2", "$\\frac{1}{2}$", "fraction_simplification", 1),
        ("$\\frac{1}{2}$", "$1/2$", "fraction_simplification", 1),
        ("2/4", "$1/2$", "fraction_simplification", 0),
        ("1/2 or 1/3", "$1/2$", "fraction_simplification", 0),
        ("1/3 or 1/2", "$1/2$", "fraction_simplification", 0),
        ("Bo is a knave and Al is a knight", "Al is a knight, and Bo is a knave.", "knights_knaves", 1),
        ("Al is a knave, and Bo is a knave.", "Al is a knight, and Bo is a knave.", "knights_knaves", 0),
        ("Al is a knight, and Bo is a knave. or not", "Al is a knight, and Bo is a knave.", "knights_knaves", 0),
        ("0.5, -1.25", "-1.25, 0.5", "polynomial_equations", 1),
        ("0.5", "-1.25, 0.5", "polynomial_equations", 0),
        ("-1.25, 0.5, x", "-1.25, 0.5", "polynomial_equations", 0),
        ("nan, nan", "-1.25, 0.5", "polynomial_equations", 0),
    ],
)
def test_the_package_judges_only_answers_of_the_form_that_was_asked_for(
    answer: str, gold: str, task: str, score: float
) -> None:
    facts = {"simplified_numerator": 1, "simplified_denominator": 2, "numerator": 2, "denominator": 4}
    assert judged(answer, gold, task, metadata=facts) == score


@pytest.mark.parametrize("text", ["", "x +", "f(x)", "[x]", "x if x else x", "x and x", "True", "1j", "x[0]", "x := 3"])
def test_what_is_no_formula(text: str) -> None:
    with pytest.raises(NoFormula):
        read(text)


def test_expanded_means_no_sum_within_a_product() -> None:
    assert is_expanded(read("-3*x**2*y/4 + 2 - x"))
    for text in ("(x + 1)*2", "2*(x - y)", "(x + y)**2", "2/(x + 1)", "x**(1 + 1)"):
        assert not is_expanded(read(text))


@needs_package
@pytest.mark.parametrize(
    ("task", "right", "wrong"),
    [
        ("palindrome_generation", "abcba", "abcab"),
        ("prime_factorization", "7 × 5 × 7", "35 × 7"),
        ("shortest_path", None, "up up up"),
    ],
)
def test_tasks_with_many_answers_are_judged_by_the_package(task: str, right: str | None, wrong: str) -> None:
    if task == "palindrome_generation":
        gold, facts = "bacab", {"metadata": {"letters": list("aabbc"), "generated_palindrome": "bacab"}}
    elif task == "prime_factorization":
        gold, facts = "5 × 7 × 7", {"metadata": {}}
    else:
        prompt = made(task).train[0]
        gold, facts = prompt.columns["gold"], json.loads(prompt.columns["puzzle"])
        facts.pop("task")
    assert judged(right or gold, gold, task, **facts) == 1
    assert judged(wrong, gold, task, **facts) == 0


HOSTILE = [
    "9**9**9**9**9", "(" * 5000, "[" * 19_000, "1e999999999", "1/1" + "0" * 5000, "\x00", "\ud800", "{" * 9000,
    "x" * 10**6, "9" * 20_000, "-" * 3000 + "1", "__import__('os')._exit(1)", "exit()", "sin(" * 500 + "x" + ")" * 500,
    "x**x**x**x**9999", "<answer>", "nan", "inf", "nan + nani", "-0", "\u202e1", "A=1," * 3000, "1 " * 9000,
    "\n" * 9000, "~" * 4000 + "P",
]  # fmt: skip


def hostile_cases(task: str, gold: str, puzzle: str) -> list[tuple[str, str, dict[str, Any]]]:
    return [(f"<answer>{text}</answer>", gold, {"puzzle": puzzle}) for text in HOSTILE]


@needs_package
def test_hostile_answers_score_0_within_their_limit() -> None:
    golds = {"simple_integration": "x", "power_function": "1.57e-22", "complex_arithmetic": "1.0 + 2.0i",
             "coin_flip": "0.5", "game_of_life": "[[0]]", "sudoku": "1 2", "gcd": "4",
             "codeio": '{"a": 1}'}  # fmt: skip
    cases = [c for task, gold in golds.items() for c in hostile_cases(task, gold, json.dumps({"task": task}))]
    start = time.monotonic()
    verdicts = reasoning.grade_many(cases)
    assert {(v.score, v.status in ("scored", "no_answer")) for v in verdicts} == {(0, True)}
    assert time.monotonic() - start < 120


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(PACKAGE))
def test_hostile_answers_to_tasks_that_the_package_judges(task: str) -> None:
    columns = made(task, n=1, size=1).train[0].columns
    verdicts = reasoning.grade_many(hostile_cases(task, columns["gold"], columns["puzzle"]))
    assert {(v.score, v.status in ("scored", "no_answer")) for v in verdicts} == {(0, True)}


def test_the_last_answer_after_the_thought_counts() -> None:
    puzzle = json.dumps({"task": "gcd"})

    def score(text: str, **args: Any) -> tuple[float | None, str]:
        verdict = grade("reasoning_gym", text, "12", puzzle=puzzle, **args)
        return verdict.score, verdict.status

    assert score("<answer>11</answer><answer>12</answer>") == (1, "scored")
    assert score("<answer>12</answer><answer>11</answer>") == (0, "scored")
    assert score("<think><answer>12</answer></think> so") == (0, "no_answer")
    assert score("<answer>12") == (0, "no_answer")
    assert score("12") == (0, "no_answer")
    assert score("<answer></answer>") == (0, "no_answer")
    assert score("<answer>12</answer>", thinking=True) == (0, "no_answer")
    assert grade("reasoning_gym", "<answer>1</answer>", "1", puzzle="[]").status == "bad_gold"
    assert grade("reasoning_gym", "<answer>1</answer>", 1, puzzle=puzzle).status == "bad_gold"


def test_sets_of_tasks_do_not_contradict_each_other() -> None:
    assert not OURS & PACKAGE
    assert not CASELESS & (PACKAGE | EXPRESSION | FORMULA)


@needs_package
def test_every_package_grader_that_executes_text_is_replaced() -> None:
    """Read off the package's sources, so that a new version with another such grader fails here."""
    import inspect

    from reasoning_gym.factory import DATASETS

    executing = set()
    for name, (made_by, _) in DATASETS.items():
        source = inspect.getsource(made_by.score_answer)
        module = inspect.getsource(sys.modules[made_by.__module__])
        calls = any(f"{call}(" in source for call in ("eval", "exec", "parse_expr", "sympify"))
        if calls or ("verify_solution(" in source and "eval(" in module):
            executing.add(name)
    assert {"countdown", "string_insertion", "simple_integration", "bitwise_arithmetic"} <= executing
    assert executing <= OURS
    own = {name for name, (made_by, _) in DATASETS.items() if "score_answer" in vars(made_by)}
    assert own >= PACKAGE


def test_same_is_symmetric_and_linear_in_time() -> None:
    for a, b in (("1", "1.0"), ("a, b", "a ,b"), ("[1]", "['1']"), ("x\n\ny", "x\ny")):
        assert same(a, b)
        assert same(b, a)
    start = time.monotonic()
    assert not same("1," * 10_000, "12")
    assert not same("[" * 20_000, "[1]")
    assert time.monotonic() - start < 1


def test_tags_keep_what_json_has_no_word_for() -> None:
    spec = importlib.util.spec_from_file_location(
        "child", Path(reasoning.__file__).parents[2] / "data" / "tasks" / "puzzles_child.py"
    )
    assert spec is not None
    assert spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    value = {"a": (1, [2, {3: "x", "y": None}]), "s": {1, 2}, "b": True, "f": 0.5, "__odd": {"t": ()}}
    assert untagged(json.loads(json.dumps(child.tagged(value)))) == value


@needs_package
def test_rows_on_disk_say_which_version_made_them(tmp_path: Path) -> None:
    prepare("reasoning-gym:gcd", out=str(tmp_path), set=("size=2",), eval_size=1)
    [first, _] = read_rows(tmp_path / "train.jsonl")
    facts = json.loads(first.values["puzzle"])
    assert facts["task"] == "gcd"
    assert facts["version"]


# ---------------------------------------------------------------------------------------------------- known answers


@needs_package
@pytest.mark.parametrize(
    ("task", "least"),
    tiers.some(
        [("chain_sum", 11), ("countdown", 7), ("shortest_path", 7), ("word_sorting", 7)],
        ["chain_sum", "countdown"],
        name=lambda case: case[0],
    ),
)
def test_known_answers_get_their_known_scores(task: str, least: int) -> None:
    for prompt in made(task, size=6).train:
        tried = known_answers("reasoning_gym", prompt.columns, {})
        assert len(tried) >= least
        puzzle = prompt.columns["puzzle"]
        for probe in tried:
            score = grade("reasoning_gym", probe.text, prompt.columns["gold"], puzzle=puzzle).score
            assert (score or 0.0) == probe.score, probe


@needs_package
def test_the_reward_can_be_tried_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rewards", "test", "reasoning_gym", "--task", "reasoning-gym:chain_sum", "--limit", "5", "--json"]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
