"""Every command that a page shows is one: parsed by the real command line, and run, or marked with why it is not.

A block of commands (fenced as ``sh``, or indented) is run in the nightly tests, in a folder that has the files that the
page shows (``<!-- file: NAME -->``), a small model, a recipe and a run, unless ``<!-- not run: REASON -->`` stands
before it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import docs_help
import tiers
import tiny
from trew.cli import main as cli
from trew.config import apply_overrides, load, parse
from trew.errors import ConfigError
from trew.utils.installing import requirements

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "recipes/README.md")),
]
RECIPES = ("train", "sft", "plan", "demo")
"""Commands whose --set changes a recipe of a training."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- every command is one


@pytest.fixture
def parsed(monkeypatch):
    """Calls the real command line with every command replaced by one that only notes that its arguments were right."""
    for module, target, _ in cli.COMMANDS.values():
        room = importlib.import_module(f"trew.cli.{module}")
        for name in (target,) if isinstance(target, str) else target:
            function = getattr(room, name.replace("-", "_"))
            stub = functools.wraps(function)(lambda *args, **kwargs: 0)
            monkeypatch.setattr(room, name.replace("-", "_"), stub)

    def parse_one(line: str) -> None:
        try:
            code = cli.run(shlex.split(line)[1:])
        except SystemExit as left:
            code = left.code
        assert not code, line

    return parse_one


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_understood(page, parsed):
    shown = [line for block in docs_help.blocks(page) for line in block.lines] + docs_help.inline(page)
    for line in shown:
        program, *rest = line.split()
        if docs_help.is_synopsis(line) or not rest:
            continue
        if program.endswith("trew"):
            parsed(line)
            settings_exist(line)
        elif program == "make":
            rules = (ROOT / "Makefile").read_text()
            for target in re.findall(r"\bmake ([a-z-]+)", line):  # make a, make b
                assert re.search(rf"^{re.escape(target)}:", rules, re.M), line
        elif program.endswith("python") and rest[0] != "-m":
            own = rest[0] in docs_help.files(page)
            assert own or (ROOT / rest[0]).is_file(), line
        for extras in re.findall(r"\.(?:whl)?\[([\w,-]+)\]", line):
            assert set(extras.split(",")) <= set(requirements()), line


def settings_exist(line: str) -> None:
    """The keys of ``--set`` are those of a recipe, with values of the right kind."""
    words = cli.expand_pairs(shlex.split(line)[1:])
    if words[0] not in RECIPES:
        return
    pairs = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
    recipe = next((ROOT / word for word in words[1:] if word.endswith(".toml") and (ROOT / word).is_file()), None)
    try:
        if recipe is not None:
            load(recipe, pairs)
        else:
            table = {"model": "m"}
            apply_overrides(table, pairs)
            parse(table)
    except ConfigError as error:
        wrong = [problem for problem in error.problems if recipe is not None or "unknown" in problem]
        assert wrong == [], line


def test_a_wrong_command_would_be_noticed(parsed):
    for line in ("trew train r.toml --dry-rum", "trew data shw x", "trew eval m --size many", "trew trian r.toml"):
        with pytest.raises(AssertionError):
            parsed(line)
    with pytest.raises(AssertionError):
        settings_exist("trew train r.toml --set learner.lrr=1")
    settings_exist("trew train r.toml --set learner.lr=1e-5 steps=3")


def test_blocks_are_read_as_a_reader_reads_them(tmp_path):
    page = tmp_path / "p.md"
    page.write_text(
        "text\n\n    trew doctor       what is missing\n    trew env NAME\n\n<!-- not run: it\nserves -->\n\n```sh\n"
        "trew view runs/x  # until Ctrl-C\n```\n\nmore\n\n"
        "    make test   tests\n                and\n\n    make demo\nend\n"
        "```python\nprint(1)\n```\n\n<!-- file: a.py -->\n```python\nx = 1\n```\n"
    )
    first, second, third = docs_help.blocks(page)
    assert (first.lines, first.why_not) == (("trew doctor", "trew env NAME"), "")
    assert (second.commands, second.why_not) == ([["trew", "view", "runs/x"]], "it\nserves")
    assert (third.lines, third.why_not) == (("make test", "make demo"), "")
    assert docs_help.files(page) == {"a.py": "x = 1\n"}
    told = {"trew env NAME": True, "trew plan r.toml [--json]": True, "trew rewards test|score": True}
    told |= {"trew train r.toml --set a=1": False, "trew data prepare countdown --set 'numbers=[3]'": False}
    assert {line: docs_help.is_synopsis(line) for line in told} == told


# ---- every command is run, or the page says why not

RUN = [page for page in PAGES if any(not block.why_not for block in docs_help.blocks(page))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path, monkeypatch, model) -> Path:
    """A folder with what the pages take for granted: a recipe, and the rows and the reward of the quick start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(
        f'model = "{model}"\nsteps = 2\n[data]\ntask = "arithmetic"\n[rollout]\nprompts = 2\ncompletions = 2\n'
        "max_tokens = 4\n[eval]\nsize = 4\n"
    )
    shown = docs_help.files(ROOT / "docs" / "quickstart.md")
    (tmp_path / "my_reward.py").write_text(shown["my_reward.py"])
    (tmp_path / "make_rows.py").write_text(shown["make_rows.py"])
    runpy.run_path("make_rows.py")
    return tmp_path


def finish(command: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(command[1:])
    assert left.value.code == 0, " ".join(command)


@pytest.mark.parametrize("page", tiers.some(RUN, ["quickstart.md"], name=lambda page: page.name), ids=name_of)
def test_commands_run(page, place, model, monkeypatch, capsys):
    """With the small model wherever a page names one, and few steps."""
    for name, text in docs_help.files(page).items():
        (place / name).write_text(in_small(text, model))
    commands = [command for block in docs_help.blocks(page) if not block.why_not for command in block.commands]
    if any("runs/first" in command for command in commands):
        finish(["trew", "train", "recipe.toml", "--out", "runs/first"])
    for command in commands:
        if docs_help.is_synopsis(" ".join(command)):
            continue
        if command[0] == "python":
            monkeypatch.setattr(sys, "argv", command[1:])
            runpy.run_path(command[1], run_name="__main__")
        else:
            assert command[0] == "trew", f"{page.name}: mark the block: <!-- not run: REASON -->"
            finish(command)
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err


def in_small(text: str, model: Path) -> str:
    """A page's file with a model and lengths for tests."""
    text = text.replace("smollm2-135m-instruct", str(model))
    numbers = r"^(\s*\"?(?:steps|size|prompts|completions|minibatch_prompts)\"?(?: =|:)) \d+"
    return re.sub(numbers, r"\1 2", text, flags=re.M)
