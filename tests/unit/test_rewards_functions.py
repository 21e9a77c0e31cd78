"""Users' functions: how they are found, in which forms they are called, and what they may return."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from rewards_help import functions_of, group, write
from trew.cli.main import run
from trew.config import RewardConfig
from trew.errors import ConfigError, RewardError
from trew.rewards import RewardSet
from trew.rewards.reward_checks import try_reward
from trew.rewards.user.functions import UserFunction
from trew.rewards.user.session import Session
from trew.types import Group, Prompt


def loaded(tmp_path: Path, source: str, name: str = "f", **args: object) -> RewardSet:
    """In this process: how functions are called is the same in one of their own (test_rewards_process.py)."""
    return RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, source)}:{name}", args=args)], host=Session())


def values(rewards: RewardSet, *groups: Group, step: int = 0) -> list[float | None]:
    return [score.value for scored in rewards.score(groups, step=step) for score in scored.scores]


# ---------------------------------------------------------------------------------------------------- TRL's form

SEEN = """
    seen = []

    def f(prompts, completions, completion_ids, answer, level=None, **kwargs):
        seen.append((prompts, completions, completion_ids, answer, level, kwargs))
        return [float(a == c) for a, c in zip(answer, completions)]

    def report(completions, **kwargs):
        return seen
"""


def test_trl_call(tmp_path: Path) -> None:
    session = Session()
    rewards = RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, SEEN)}:f")], host=session)
    groups = [group("72", "7", uid="a", answer="72", level=1), group("8", uid="b", answer="8", extra="e")]
    assert values(rewards, *groups, step=3) == [1.0, 0.0, 1.0]
    [(prompts, completions, ids, answer, level, rest)] = session._functions[0].__globals__["seen"]
    assert prompts == ["question"] * 3
    assert completions == ["72", "7", "8"]
    assert ids == [[0, 1], [0], [0]]
    assert (answer, level) == (["72", "72", "8"], [1, 1, None])
    assert rest["extra"] == [None, None, "e"]
    assert rest["trainer_state"].global_step == 3
    assert set(rest) == {"extra", "trainer_state"}


def test_chat_completions_are_messages(tmp_path: Path) -> None:
    source = """
        def f(prompts, completions, **kwargs):
            assert [p[-1]["content"] for p in prompts] == ["question", "question"]
            assert all(c[0]["role"] == "assistant" and len(c) == 1 for c in completions)
            prompts[0][0]["content"] = "changed"  # its own copy
            return [len(c[0]["content"]) for c in completions]
    """
    rows = group("ab", "abc", chat=True)
    assert values(loaded(tmp_path, source), rows) == [2.0, 3.0]
    assert rows.prompt.messages == ({"role": "user", "content": "question"},)


def test_text_and_chat_prompts_mixed(tmp_path: Path) -> None:
    source = "def f(completions, **kwargs):\n    return [float(isinstance(c, list)) for c in completions]\n"
    assert values(loaded(tmp_path, source), group("a"), group("a", chat=True)) == [0.0, 1.0]


@pytest.mark.parametrize(
    "signature",
    ["completions", "prompts, completions", "completions, **kwargs", "prompts, completions, completion_ids, **columns",
     "completions, /", "prompts, completions, /, **kwargs", "*, completions", "*args, completions",
     "completions, answer",
     "completions, answer=None, unknown=3", "completions, log_metric=None, trainer_state=None"],
)  # fmt: skip
def test_only_accepted_keywords_are_passed(tmp_path: Path, signature: str) -> None:
    rewards = loaded(tmp_path, f"def f({signature}):\n    return [len(completions)] * len(completions)\n")
    assert values(rewards, group("a", "b", answer="x", other="y")) == [2.0, 2.0]


def test_a_positional_parameter_that_is_not_offered_keeps_its_place(tmp_path: Path) -> None:
    source = "def f(prompts, note=7, completions=None, /):\n    return [note + len(c) for c in completions]\n"
    assert values(loaded(tmp_path, source), group("a", "bc")) == [8.0, 9.0]


def test_kwargs_alone(tmp_path: Path) -> None:
    assert values(loaded(tmp_path, "def f(**kw):\n    return [len(c) for c in kw['completions']]\n"), group("abc")) == [
        3.0
    ]


def test_arguments_of_the_recipe(tmp_path: Path) -> None:
    source = "def f(completions, scale, bonus=0.0):\n    return [scale * len(c) + bonus for c in completions]\n"
    assert values(loaded(tmp_path, source, scale=2.0, bonus=1.0), group("abc")) == [7.0]
    with pytest.raises(ConfigError, match=r"args\.scal: f\(\) .*\(did you mean 'scale'\?\).* scale, bonus"):
        loaded(tmp_path, source, scal=2.0)
    with pytest.raises(ConfigError, match=r"args\.completions: "):
        loaded(tmp_path, source, completions=2.0)
    with pytest.raises(RewardError, match="column 'scale'"):
        loaded(tmp_path, source).score([group("a")])


def test_a_misspelt_argument_does_not_vanish_in_kwargs(tmp_path: Path) -> None:
    source = """
        def f(completions, scale=1.0, **kwargs):
            return [scale + kwargs.get("bonus", 0.0)] * len(completions)
    """
    with pytest.raises(ConfigError, match=r"args\.scal: f\(\) .*\(did you mean 'scale'\?\)"):
        loaded(tmp_path, source, scal=2.0)
    assert values(loaded(tmp_path, source, scale=2.0, bonus=1.0), group("a")) == [3.0]


def test_rows_without_a_required_column_are_not_applicable(tmp_path: Path) -> None:
    source = "def f(completions, tests):\n    assert None not in tests\n    return [1.0] * len(completions)\n"
    rewards = loaded(tmp_path, source)
    assert values(rewards, group("a", "b"), group("a", tests="t")) == [None, None, 1.0]
    # As files have it where other rows have the column.
    assert values(rewards, group("a", tests=None), group("a", tests="t")) == [None, 1.0]
    with pytest.raises(RewardError, match="needs column 'tests', which no row has"):
        rewards.score([group("a", tests=None)])


def test_objects_and_partials(tmp_path: Path) -> None:
    source = """
        import functools

        class Scorer:
            def __call__(self, completions, **kwargs):
                return [1.0] * len(completions)

        scorer = Scorer()

        def base(completions, value):
            return [value] * len(completions)

        halves = functools.partial(base, value=0.5)
    """
    assert values(loaded(tmp_path, source, "scorer"), group("a")) == [1.0]
    assert values(loaded(tmp_path, source, "halves"), group("a")) == [0.5]
    with pytest.raises(ConfigError, match="Scorer is a class"):
        loaded(tmp_path, source, "Scorer")


# --------------------------------------------------------------------------------------------------- verl's form


@pytest.mark.parametrize("header", ["def", "async def"])
def test_verl_call(tmp_path: Path, header: str) -> None:
    source = f"""
        {header} compute_score(data_source, solution_str, ground_truth, extra_info=None, tolerance=0):
            extra_info["touched"] = True
            right = abs(int(solution_str) - int(ground_truth)) <= tolerance
            return {{"score": float(right), "acc": right}} if data_source == "dict" else right
    """
    rewards = loaded(tmp_path, source, "compute_score")
    extra = {"index": 0}
    nested = {"reward_model": {"ground_truth": "72"}, "data_source": "dict", "extra_info": extra}
    assert values(rewards, group("72", "73", ground_truth="72"), group("72", **nested)) == [1.0, 0.0, 1.0]
    assert extra == {"index": 0}
    assert values(loaded(tmp_path, source, "compute_score", tolerance=1), group("73", answer="72")) == [1.0]
    assert values(rewards, group("72", answer="72"), group("72")) == [1.0, None]  # no gold: does not apply


def test_verl_problems(tmp_path: Path) -> None:
    source = "def f(solution_str, ground_truth, other):\n    return {'acc': 1}\n"
    with pytest.raises(ConfigError, match=r"'other'.* verl.* args"):
        loaded(tmp_path, source)
    rewards = loaded(tmp_path, source, other=1)
    with pytest.raises(RewardError, match=r"dict without 'score' for prompt 'q1', completion '72'.* acc"):
        rewards.score([group("72", answer="72")])
    with pytest.raises(RewardError, match=r"gold answer.* columns: question"):
        rewards.score([group("72", question="?")])
    assert rewards.check_golds([group(question="?").prompt])[0].endswith("no row has; columns: question")


# --------------------------------------------------------------------------------------------------------- async


def test_async_functions_run_together(tmp_path: Path) -> None:
    """Each waits until the other has begun: one after the other they would never end."""
    source = """
        import asyncio
        begun = {}

        async def wait_for(mine, other):
            begun.setdefault(mine, asyncio.Event()).set()
            await asyncio.wait_for(begun.setdefault(other, asyncio.Event()).wait(), 10)

        async def f(completions, **kwargs):
            await wait_for("f", "g")
            return [1.0] * len(completions)

        async def g(completions, **kwargs):
            await wait_for("g", "f")
            return [2.0] * len(completions)

        def plain(completions, **kwargs):
            return [4.0] * len(completions)
    """
    path = write(tmp_path, source)
    configs = [RewardConfig(name=f"{path}:{name}") for name in ("f", "plain", "g")]
    rewards = RewardSet.from_config(configs, host=Session())
    assert values(rewards, group("a", "b")) == [7.0, 7.0]

    async def in_a_notebook() -> list[float | None]:
        return values(rewards, group("a"))

    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:{name}") for name in ("f", "g")], host=Session())
    assert asyncio.run(in_a_notebook()) == [3.0]


def test_a_sync_function_that_hands_out_a_coroutine(tmp_path: Path) -> None:
    source = """
        async def inner(completions):
            return [1.0] * len(completions)

        def f(completions, **kwargs):
            return inner(completions)  # awaited for it

        def g(completions, **kwargs):
            return [inner(c) for c in completions]
    """
    assert values(loaded(tmp_path, source), group("a")) == [1.0]
    with pytest.raises(RewardError, match="coroutine for prompt 'q1', completion 'a'"):
        loaded(tmp_path, source, "g").score([group("a", "b")])


def test_an_async_function_that_raises(tmp_path: Path) -> None:
    source = """
        async def f(completions, **kwargs):
            return [1 / len(c) for c in completions]

        async def g(completions, **kwargs):
            return [1.0] * len(completions)
    """
    path = write(tmp_path, source)
    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:f"), RewardConfig(name=f"{path}:g")], host=Session())
    with pytest.raises(
        RewardError, match=r"my_rewards.py:3\) raised ZeroDivisionError: .*; for prompt 'b', completion ''"
    ):
        rewards.score([group("a", uid="a"), group("a", "", uid="b")])


def test_a_sync_error_leaves_no_coroutine_behind(tmp_path: Path) -> None:
    source = """
        async def f(completions, **kwargs):
            return [1.0] * len(completions)

        async def compute(solution_str, ground_truth):
            return 1.0

        def g(completions, **kwargs):
            raise ValueError("no")
    """
    path = write(tmp_path, source)
    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:{n}") for n in ("f", "compute", "g")], host=Session())
    with pytest.raises(RewardError, match="ValueError: no"):
        rewards.score([group("a", answer="1")])  # an un-awaited coroutine would be a warning, and so an error here


# ------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("absent.py:f", "no such file"),
        ("absent.py", "no such file"),
        ("my_rewards.py", r"my_rewards\.py:FUNCTION; .* f$"),
        ("my_rewards.py:", "which function"),
        ("my_rewards.py:x", r"x is not a function but int; .* f$"),
        ("my_rewards.py:ff", "function 'ff'"),
        ("my_rewards:f", "path/to/file.py:function"),
        ("package.module:f", "path/to/file.py:function"),
        ("folder.py:f", "is not a file"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, spec: str, says: str) -> None:
    write(tmp_path, "x = 3\ndef f(completions):\n    return [0.0]\n")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match=says):
        RewardSet.from_config([RewardConfig(name=f"{tmp_path}/{spec}")], host=Session())


def test_a_file_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program names it, without a recipe that makes it absolute."""
    write(tmp_path, "def f(completions):\n    return [0.5 for _ in completions]\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    rewards = RewardSet.from_config([RewardConfig(name="~/my_rewards.py:f")], host=Session())
    assert values(rewards, group("a")) == [0.5]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(completions)\n    pass\n", r"my_rewards.py:1: cannot be imported: SyntaxError"),
        ("x = 1\n\nraise KeyError('k')\n", r"my_rewards.py:3: cannot be imported: KeyError: 'k'"),
        ("import sys\nsys.exit(0)\n", r"my_rewards.py:2: cannot be imported: SystemExit: 0"),
        ("def f(text, gold):\n    return 1\n", r"f\(text, gold\) .*`completions` .* `solution_str`"),
        ("def f(completions, log_metric):\n    return 1\n", "'log_metric'.* TRL"),
        ("f = 'text'", "f is not a function but str"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, source: str, says: str) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, source)
    if "cannot be imported" in says:  # no half-made module stays behind
        assert set(sys.modules) == before


def test_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "VALUE = 4.0\n", name="neighbour_of_rewards.py")
    write(tmp_path, "VALUE = 5.0\n", name="late_neighbour_of_rewards.py")
    source = """
        from neighbour_of_rewards import VALUE

        def f(completions, **kwargs):
            import late_neighbour_of_rewards
            return [VALUE + late_neighbour_of_rewards.VALUE] * len(completions)
    """
    before = list(sys.path)
    assert values(loaded(tmp_path, source), group("a")) == [9.0]
    assert sys.path == before


def test_its_sources_are_the_modules_from_its_folder_wherever_links_lead(tmp_path: Path) -> None:
    """Below it, through a link to it, and in it by a link from elsewhere; not a module from another folder."""
    home, outside = tmp_path / "home", tmp_path / "outside"
    (home / "below").mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "link").symlink_to(home)
    for file in (home / "below" / "deep.py", home / "hidden.py", outside / "stranger.py"):
        file.write_text("VALUE = 1.0\n")
    (outside / "linked_by_rewards.py").symlink_to(home / "hidden.py")
    source = f"""
        import sys
        sys.path[:0] = [{str(outside)!r}]
        import below.deep, linked_by_rewards, stranger
        del sys.path[0]

        def f(completions, **kwargs):
            return [1.0] * len(completions)
    """
    write(home, source, name="rewards.py")
    names = ("below", "below.deep", "linked_by_rewards", "stranger")
    try:
        [function] = Session().load([(f"{tmp_path / 'link' / 'rewards.py'}:f", {})])
        assert isinstance(function, UserFunction)
        assert set(function.sources) == {"rewards.py", "below/deep.py", "hidden.py"}
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_the_folder_of_the_file_hides_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    write(tmp_path, "raise RuntimeError('shadowed')\n", name="colorsys.py")
    source = "import colorsys\ndef f(completions, **kwargs):\n    return [colorsys.ONE_THIRD] * len(completions)\n"
    assert values(loaded(tmp_path, source), group("a")) == [1 / 3]


def test_one_file_is_run_once_for_all_its_functions(tmp_path: Path) -> None:
    source = """
        from dataclasses import dataclass

        @dataclass
        class State:
            calls: int = 0

        state = State()

        def f(completions, **kwargs):
            state.calls += 1
            return [state.calls] * len(completions)

        g = f
    """
    path = write(tmp_path, source)
    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:f"), RewardConfig(name=f"{path}:g")], host=Session())
    assert values(rewards, group("a")) == [3.0]


@pytest.mark.parametrize("name", ["none", "no_answer"])
def test_a_function_whose_mean_would_be_logged_as_a_share_is_refused(tmp_path: Path, name: str) -> None:
    """reward/no_answer is the share of completions without an answer: a function of that name took its place."""
    with pytest.raises(ConfigError, match=f"'.*:{name}': has the name of a metric, reward/{name}, which is a share"):
        loaded(tmp_path, f"def {name}(completions, **_): return [0.5] * len(completions)", name)


def test_a_function_that_needs_one_prompt_is_told_at_once_to_take_prompts(tmp_path: Path) -> None:
    """The column is not passed on, whether a row has it or not: the first step failed with Python's TypeError."""
    path = write(tmp_path, "def f(completions, prompt):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=r"f\(\) needs 'prompt', which no function is given; take 'prompts'"):
        RewardSet.from_config([RewardConfig(name=f"{path}:f")])
    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:f", args={"prompt": "x"})])
    rewards.close()


def test_extra_info_that_is_no_table_is_passed_as_it_is(tmp_path: Path) -> None:
    source = """
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return float(extra_info == '{"index": 3}')
    """
    rewards = functions_of(tmp_path, source, "compute_score")
    try:
        [scored] = rewards.score([group("7", answer="7", extra_info='{"index": 3}')])
        assert scored.scores[0].value == 1.0
    finally:
        rewards.close()


@pytest.mark.parametrize("parameters", ["completions, completion_ids", "completions, completion_ids, **columns"])
def test_a_function_that_names_the_tokens_is_not_scored_without_them(tmp_path: Path, parameters: str) -> None:
    """Beside **columns it was given empty lists, and gave every completion the reward of an empty one."""
    path = write(tmp_path, f"def f({parameters}):\n    return [-float(len(ids)) for ids in completion_ids]\n")
    data, out = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    command = ["rewards", "score", f"{path}:f", "--data", str(data), "--out", str(out)]
    data.write_text('{"completion": "a"}\n')
    with pytest.raises(ConfigError, match="reward 'f' reads tokens"):
        run(command)
    data.write_text('{"completion": "a", "token_ids": [1, 2]}\n')
    assert run(command) == 0
    assert '"score": -2.0' in out.read_text()


def test_the_trial_gives_a_function_of_lengths_answers_of_several_lengths(tmp_path: Path) -> None:
    """Without tokens all answers were equally long, and the trial of such a function failed."""
    code = "def f(completions, completion_ids, **columns):\n    return [-float(len(ids)) for ids in completion_ids]\n"
    rewards = RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, code)}:f")])
    try:
        checks = try_reward(rewards, [Prompt("p", text="?", columns={"answer": "5"})])
    finally:
        rewards.close()
    assert all(check.holds for check in checks), checks
