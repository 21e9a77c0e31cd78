"""Every setting of objectives, every argument of rewards and tasks, and every flag of every command is read."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import trew
from fuzzing import ROWS as ROWS_OF
from trew.cli.main import COMMANDS
from trew.config import DataConfig
from trew.data import load_task
from trew.data.tasks import TASKS
from trew.errors import ConfigError, TrewError
from trew.objective.presets import PRESETS, settings
from trew.rewards import KINDS, grade

# --------------------------------------------------------------------------------------------------------------------
# Objectives: a preset's own settings. (The options that all have are in tests/unit/test_objective_options.py.)

ROWS, WIDTH = 24, 8


def batch(scale: float, *, scored: bool = True) -> Any:
    """A step in which everything varies: ratios far on both sides of 1, mixed and clean groups, cut-off completions."""
    g = torch.Generator().manual_seed(0)

    def noise(width: float) -> torch.Tensor:
        return width * torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)

    logprobs = -3 * torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64) - 0.05
    mask = torch.arange(WIDTH)[None] < torch.randint(3, WIDTH + 1, (ROWS, 1), generator=g)
    old = logprobs + noise(scale) + torch.randn(ROWS, 1, generator=g, dtype=torch.float64) * scale
    old = old.clamp(max=-1e-3)  # a probability
    rewards = torch.randint(0, 3, (ROWS,), generator=g).to(torch.float64) / 2
    steps = [[(2, float(r)), (3, 0.5 * float(r))] for r in rewards]
    turns = [[(1 + i % 2, 0.5 * (i % 3)), (3, 0.25), (WIDTH, float(r))] for i, r in enumerate(rewards)]
    states = [["start", "left" if i % 4 else "right", "left"] for i in range(ROWS)]
    return trew.TokenBatch.from_padded(
        logprobs=logprobs, mask=mask, old_logprobs=old, rollout_logprobs=(old + noise(0.3)).clamp(max=-1e-3),
        ref_logprobs=(logprobs + noise(0.5)).clamp(max=-1e-3), teacher_logprobs=logprobs + (old - logprobs) / 2,
        entropies=2 * torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64), score_norms=0.1 - logprobs,
        group_ids=torch.arange(ROWS) // 6, rewards=rewards if scored else None, correct=rewards == 1,
        truncated=torch.arange(ROWS) % 5 == 0,
        baselines=torch.rand(ROWS // 6, generator=g, dtype=torch.float64).repeat_interleave(6), step_rewards=steps,
        turns=turns, states=states, values=torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH),
        advantages=None if scored else rewards - 0.4, max_length=WIDTH,
    )  # fmt: skip


OTHERS: dict[str, list[Any]] = {
    "baseline": ["group", "batch"], "normalize": ["separate"], "rarity": ["entropy"], "anchor": ["rollout"],
    "level": ["sequence"], "norm": ["mean"], "scale": ["none", "std"], "tokens": ["all"], "tail": ["reward"],
}  # fmt: skip
GIVEN: dict[str, dict[str, Any]] = {
    "h_max": {"rarity": "entropy"}, "seed": {"share": 0.1, "cov_low": -1.0},
    **{f"{name} {key}": {"scale": "std"} for name in ("dppo-tv", "dppo-kl") for key in ("ddof", "std_eps")},
}  # fmt: skip
"""What a setting needs beside it to have anything to act on, of one preset or of all that have it."""


def others(key: str, value: Any) -> list[Any]:
    """Other values that the setting may have."""
    if key in OTHERS:
        return OTHERS[key]
    if value is None:
        return [0.5]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value - 1, value + 1, 2]
    return [value * 0.5, value * 1.5, value + 0.05, 0.2, 1.2]


BATCHES = (1.0, 0.2, 1e-3)


def coefficients(name: str, scale: float, /, **settings: Any) -> torch.Tensor | None:
    """Those of the policy and, with a critic, what it learns; None where the setting is refused."""
    try:
        objective = trew.preset(name, **settings)
    except ConfigError:
        return None
    made = batch(scale, scored=name != "ppo-clip")
    if name == "grpo-passk":  # two best completions lead by nothing
        made = made.replace(rewards=made.rewards + torch.linspace(0.0, 0.1, ROWS))
    out = objective.loss(made)
    return out.coefficients if out.batch.returns is None else torch.cat([out.packed["coefficients"], out.batch.returns])


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in PRESETS for key in settings(name)])
def test_a_setting_of_an_objective_changes_its_gradient(name, key):
    given = GIVEN.get(f"{name} {key}", GIVEN.get(key, {}))
    for scale in BATCHES:
        plain = coefficients(name, scale, **given)
        for value in others(key, settings(name)[key]):
            other = coefficients(name, scale, **given, **{key: value})
            if other is not None and not torch.allclose(other, plain, rtol=1e-9, atol=1e-15):
                return
    pytest.fail(f"{name}: {key} changes nothing")


# --------------------------------------------------------------------------------------------------------------------
# Rewards and tasks

CODE = "```python\nimport time\ntime.sleep(0.4)\nx = b'x' * 200_000_000\nprint(int(input()) + 1)\n```"
FUNC = "```python\nimport time\ndef f(x):\n    time.sleep(0.4)\n    b = b'x' * 200_000_000\n    return x + 1\n```"
STDIN = {"tests": [{"input": "1\n", "output": "2\n"}]}
ASSERTS = {"entry_point": "f", "asserts": ["assert f(1) == 2"]}
LENGTHS = {"max_completion_len": 10, "soft_punish_cache": 4, "length": 9}
COSINE = {"max_len": 10, "length": 4, "correct": True}
PUZZLE = {"puzzle": '{"task": "chain_sum", "metadata": {}}'}
THOUGHT = "<think>so</think>"

# (kind, setting) -> (completion, gold, other arguments, one value, another value): the verdicts differ
VERDICTS: dict[tuple[str, str], tuple[str, Any, dict[str, Any], Any, Any]] = {
    ("gsm8k", "mode"): ("It is 5.", "5", {}, "strict", "flexible"),
    ("gsm8k", "thinking"): ("#### 5", "5", {}, False, True),
    ("arithmetic", "thinking"): ("5", "5", {}, False, True),
    ("math", "require_boxed"): ("The answer is 5.", "5", {}, True, False),
    ("math", "thinking"): ("\\boxed{5}", "5", {}, False, True),
    ("countdown", "require_all"): ("<answer>1 + 2</answer>", None, {"numbers": [1, 2, 9], "target": 3}, True, False),
    ("countdown", "thinking"): ("<answer>1 + 2</answer>", None, {"numbers": [1, 2], "target": 3}, False, True),
    ("format", "template"): ("<a>x</a>", None, {}, "<a>…</a>", "<b>…</b>"),
    ("format", "prefilled"): ("so</think><answer>x</answer>", None, {}, "", "<think>"),
    ("code_stdin", "timeout_s"): (CODE, None, STDIN, 10.0, 0.1),
    ("code_stdin", "memory_mb"): (CODE, None, STDIN, 512, 32),
    ("code_stdin", "thinking"): (CODE, None, STDIN, False, True),
    ("code_func", "timeout_s"): (FUNC, None, ASSERTS, 10.0, 0.1),
    ("code_func", "memory_mb"): (FUNC, None, ASSERTS, 512, 32),
    ("code_func", "thinking"): (FUNC, None, ASSERTS, False, True),
    ("reasoning_gym", "thinking"): ("<answer>5</answer>", "5", PUZZLE, False, True),
    ("soft_overlong", "max_completion_len"): ("", None, LENGTHS, 10, 12),
    ("soft_overlong", "soft_punish_cache"): ("", None, LENGTHS, 4, 8),
    ("cosine", "max_len"): ("", None, COSINE, 10, 20),
    ("cosine", "min_value_wrong"): ("", None, {**COSINE, "correct": False}, -1.0, -2.0),
    ("cosine", "max_value_wrong"): ("", None, {**COSINE, "correct": False}, -0.5, -0.2),
    ("cosine", "min_value_correct"): ("", None, COSINE, 0.5, 0.1),
    ("cosine", "max_value_correct"): ("", None, COSINE, 1.0, 2.0),
    ("repetition", "ngram_size"): ("", None, {"token_ids": [1, 1, 1, 2, 3]}, 1, 2),
    ("repetition", "max_penalty"): ("", None, {"token_ids": [1, 1, 1, 1, 1]}, -1.0, -2.0),
}


def test_every_argument_of_every_reward_is_tried():
    assert set(VERDICTS) == {(name, key) for name, kind in KINDS.items() for key in kind.settings}


@pytest.mark.parametrize(("kind", "key"), VERDICTS)
def test_an_argument_of_a_reward_changes_a_verdict(kind, key):
    text, gold, more, one, other = VERDICTS[kind, key]
    rest = {k: v for k, v in more.items() if k != key}
    verdicts = [grade(kind, text, gold, **rest, **{key: value}) for value in (one, other)]
    assert verdicts[0].score != verdicts[1].score, verdicts


TASK_ARGS: dict[str, dict[str, Any]] = {
    "arithmetic": {"ops": ["-"], "smallest": 3, "largest": 7, "ranges": {"+": [20, 40]}, "negative": False, "size": 5,
                   "template": "{expression} = ?", "system": "s"},
    "countdown": {"numbers": [2], "smallest": 30, "largest": 50, "target": [60, 61], "ops": ["+"], "size": 5,
                  "template": "{numbers} {target}", "system": "s", "format_weight": 0.0},
}  # fmt: skip
READ_ARGS: dict[str, dict[str, Any]] = {
    "gsm8k": {"instruction": "i", "system": "s", "mode": "flexible"},
    "math": {"instruction": "i", "system": "s", "levels": [1], "subjects": ["Geometry"]},
    "mbpp": {"instruction": "i", "system": "s", "shown": 0, "challenge": True, "timeout_s": 3.0},
    "humaneval": {"instruction": "i", "system": "s", "timeout_s": 3.0},
    "prompts": {"chat": True, "system": "s", "instruction": "i"},
}  # fmt: skip
"""Of the tasks that make their problems, and of those that read rows. Those of reasoning-gym, which is a package:
tests/unit/test_data_puzzles.py."""


def test_every_argument_of_every_task_is_tried():
    keys = {name: {f.name for f in dataclasses.fields(task)} for name, task in TASKS.items()}
    elsewhere = {
        "test_data_puzzles.py": keys.pop("reasoning-gym") - {"instruction"},
        "test_demonstrations.py": keys.pop("demonstrations") | keys.pop("rollouts"),
        "test_preference_pairs.py": keys.pop("pairs"),
    }
    assert {name: set(args) for name, args in {**TASK_ARGS, **READ_ARGS}.items()} == keys
    for name, here in elsewhere.items():
        text = (Path(__file__).parents[1] / "unit" / name).read_text()
        assert [key for key in sorted(here) if key not in text] == []


def test_the_instruction_of_a_puzzle_is_appended():
    pytest.importorskip("reasoning_gym")
    config = DataConfig(task="reasoning-gym:chain_sum", args={"size": 3, "instruction": "Think."})
    assert all(
        (p.messages or ())[-1]["content"].endswith("Think.") for p in load_task(config, eval_size=1, seed=0).train
    )


def read(task: str, folder: Path, *, chats: bool = False, **args: Any) -> Any:
    """Prompts and rewards of the task's rows; the message where they are refused."""
    rows = [dict(row) for row in ROWS_OF[task]]
    for row in rows:
        if task == "mbpp":
            row["challenge_test_list"] = ["assert f(2) == 3"]
        if chats:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        data = load_task(DataConfig(task=task, train=str(folder), args=args), eval_size=2, seed=0)
    except TrewError as error:
        return str(error)
    return [(p.text, p.messages, dict(p.columns)) for p in data.train], data.default_rewards


@pytest.mark.parametrize(("task", "key"), [(task, key) for task, args in READ_ARGS.items() for key in args])
def test_an_argument_of_a_task_changes_what_is_read(task, key, tmp_path):
    chats = (task, key) == ("prompts", "system")
    plain, changed = (read(task, tmp_path, chats=chats, **a) for a in ({}, {key: READ_ARGS[task][key]}))
    assert plain != changed


@pytest.mark.parametrize(("task", "key"), [(task, key) for task, args in TASK_ARGS.items() for key in args])
def test_an_argument_of_a_task_changes_its_problems(task, key):
    base = {"size": 40, **({"ops": ["+", "-"], "largest": 30} if task == "arithmetic" else {})}
    if key == "ranges":
        base["ops"] = ["+"]
    made = []
    for args in (base, {**base, key: TASK_ARGS[task][key]}):
        data = load_task(DataConfig(task=task, args=args), eval_size=2, seed=0)
        made.append(([(p.uid, p.messages) for p in data.train], data.default_rewards))
    assert made[0] != made[1]


# --------------------------------------------------------------------------------------------------------------------
# Flags: a parameter of a command, or of any function behind it, that nothing reads

FUNCTIONS = [
    (name, function)
    for name, (module, target, _) in COMMANDS.items()
    for function in (
        getattr(importlib.import_module(f"trew.cli.{module}"), t.replace("-", "_"))
        for t in (target if isinstance(target, tuple) else (target,))
    )
]


def unread(tree: ast.FunctionDef) -> set[str]:
    """The parameters of a function that its body never reads."""
    args = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
    names = {node.id for part in tree.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    stub = all(isinstance(part, (ast.Expr, ast.Raise, ast.Pass)) for part in tree.body)  # a protocol's, an abstract one
    return set() if stub else {a.arg for a in args} - names - {"self", "cls"}


@pytest.mark.parametrize(("name", "function"), FUNCTIONS, ids=lambda x: getattr(x, "__name__", x))
def test_every_flag_of_a_command_is_read_and_explained(name, function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    assert unread(tree) == set()
    doc = inspect.getdoc(function) or ""
    assert [flag for flag in inspect.signature(function).parameters if f"\n    {flag}: " not in doc] == []


def test_no_function_behind_a_command_has_a_parameter_that_it_does_not_read():
    """What a flag is handed on to must not drop it: in cli, and where runs are put together."""
    source = Path(trew.__file__).parent
    files = [path for room in ("cli", "config", "training") for path in sorted((source / room).glob("*.py"))]
    dropped = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and (names := {n for n in unread(node) if not n.startswith("_")}):
                dropped[f"{file.name}:{node.name}"] = names
    assert dropped == {}


def test_a_parameter_that_is_dropped_would_be_noticed():
    function = ast.parse("def f(a, *, b=1):\n    c = a\n    return c").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert unread(function) == {"b"}
