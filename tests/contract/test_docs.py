"""The documents tell the truth: keys and defaults, links, code blocks, recipes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import runpy
import tomllib
import typing
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import tiers
import tiny
from trew.cli.main import COMMANDS, main
from trew.config import Config, RewardConfig, SetConfig, dumps, parse
from trew.errors import ConfigError
from trew.objective.options import Options
from trew.objective.presets import PRESETS, preset
from trew.rewards import RewardSet

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "recipes/README.md")),
]
EXECUTED = [ROOT / "README.md", ROOT / "docs" / "objectives.md", ROOT / "docs" / "notes.md"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


# ---- configuration.md


def settings() -> dict[str, str]:
    """Every key of a recipe with its default as TOML; a required key has none."""
    plain = tomllib.loads(dumps(Config(model="m")))
    found: dict[str, str] = {}
    for field in dataclasses.fields(Config):
        inner = typing.get_type_hints(Config)[field.name]
        if field.name == "rewards":
            found |= {f"rewards.{f.name}": shown(f) for f in dataclasses.fields(RewardConfig)}
        elif field.name == "data":
            found |= {f"data.{f.name}": shown(f) for f in dataclasses.fields(SetConfig)}
        elif dataclasses.is_dataclass(inner):
            names = [f.name for f in dataclasses.fields(inner)]
            if field.name == "objective":  # overrides stand beside the preset's name; each preset has its own
                names = ["preset"]
            found |= {f"{field.name}.{n}": as_toml(plain[field.name][n]) for n in names}
        else:
            found[field.name] = shown(field)
    return found


def shown(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return as_toml(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else as_toml(field.default_factory())


def as_toml(value: object) -> str:
    if isinstance(value, (bool, str)):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return json.dumps(list(value))
    return "{}" if isinstance(value, dict) else repr(value)


def documented() -> dict[str, str]:
    """Keys and defaults in configuration.md: the section from the heading, rows ``| `key` | type | `default` |``."""
    found: dict[str, str] = {}
    section = None
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        if line.startswith("## "):
            heading = re.match(r"## .*`\[+(\w+)\]+`", line)
            section = f"{heading[1]}." if heading else "" if line == "## The top of the recipe" else None
        elif section is not None and (row := re.match(r"\| `(\w+)` \| ([^|]+) \| (`(.*?)`|required) \|", line)):
            key = f"{section}{row[1]}"
            assert key not in found, f"{key} is documented twice"
            found[key] = row[4] or row[3]
    return found


def test_every_key_is_documented_with_its_default_and_nothing_else_is():
    def value(text: str) -> object:
        return text if text == "required" else tomllib.loads(f"v = {text}")["v"]

    told, true = documented(), settings()
    assert sorted(told) == sorted(true)
    assert {k: value(v) for k, v in told.items()} == {k: value(v) for k, v in true.items()}


# ---- what is generated from the presets


@pytest.fixture(scope="module")
def generator():
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_and_pictures_are_current(generator):
    wanted = generator.files()
    stale = [p.name for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    surplus = sorted({p.name for p in generator.PICTURES.glob("*.svg")} - {p.name for p in wanted})
    assert not stale + surplus, "run make docs, look at what changed, and commit it"


def test_a_change_would_be_noticed(generator):
    page = (ROOT / "docs" / "objectives.md").read_text()
    parts = dict.fromkeys(re.findall(r"<!-- generated: (\w+) -->", page), "x")
    assert set(parts) == {"axes", "options", "choices", "pictures"}
    emptied = generator.filled(page, parts)
    assert len(emptied) < 0.8 * len(page)
    assert generator.filled(emptied, parts) == emptied


def test_every_preset_is_in_the_table_and_has_a_picture_and_a_section_with_every_setting_and_its_default():
    table = (ROOT / "docs" / "objectives.md").read_text()
    text = (ROOT / "docs" / "presets.md").read_text()
    for name, build in PRESETS.items():
        assert f"| [`{name}`](presets.md#" in table, name
        assert table.count(f"(images/objectives/{name}.svg)") == text.count(f"(images/objectives/{name}.svg)") == 1
        section = text.split(f"\n### `{name}`\n")[1].split("\n### ")[0]
        told = dict(re.findall(r"`(\w+) = ([^`]+)`", section.split("Defaults:")[1].splitlines()[0]))
        every = {p.name: p.default for p in inspect.signature(build).parameters.values()}
        defaults = {key: "unset" if value is None else as_toml(value) for key, value in every.items()}
        assert told == defaults, name
        assert f"```text\n{preset(name).equation()}\n```" in section, f"{name}: not what trew explain says"
        for heading in ("**Use it** ", "**Deviations:** "):
            assert heading in section, f"{name}: {heading}"
    assert text.count("\n### ") == len(PRESETS)


def test_every_option_is_documented_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.+?)`|the [\w']+) \|", (ROOT / "docs" / "objectives.md").read_text(), re.M)
    told = {name: default for name, default in rows if name in {f.name for f in dataclasses.fields(Options)}}
    true = {f.name: f.default for f in dataclasses.fields(Options)}
    assert told == {k: "" if v in ("", None) else as_toml(v) for k, v in true.items()}


def test_pictures_are_small_and_are_pictures():
    for path in (ROOT / "docs" / "images" / "objectives").glob("*.svg"):
        assert path.stat().st_size < 15_000, path.name
        assert ET.fromstring(path.read_text()).tag.endswith("svg")


# ---- pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"(?:src|href)=\"([^\"]+)\"", text)]
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists() or taken_out(path), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    """``src/...`` and the like in backticks: whatever has a folder of ours in front must be there."""
    for path in re.findall(r"`((?:src/trew|tests|docs|recipes|examples|benchmarks)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists() or taken_out(ROOT / path), f"{page.name}: {path}"


def taken_out(path: Path) -> bool:
    """Whether a file of backends is missing because all of them are: ``make test-without-backends``."""
    return "backends" in path.parts and not (ROOT / "src" / "trew" / "backends").exists()


NO_NAMES = {"trew.engine", "trew.dtype", "trew.integrations.trl.GRPOTrainer", "trew.integrations.trl"}
"""Keys of a table's metadata, and what imports TRL."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_the_package_exist(page):
    for name in {*re.findall(r"(?<![\w/.-])trew(?:\.[A-Za-z_]\w*)+", page.read_text())} - NO_NAMES:
        if not name.endswith((".toml", ".svg", ".json", ".md")):
            pkgutil.resolve_name(name)


def test_a_call_for_a_debugger_is_one():
    [text] = re.findall(r"`(RewardSet\.from_config\([^`]+\))`", (ROOT / "docs" / "rewards.md").read_text())
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    [keyword] = call.keywords
    assert isinstance(keyword.value, ast.Call)
    host = pkgutil.resolve_name(ast.unparse(keyword.value.func))()
    assert RewardSet.from_config([RewardConfig(name="gsm8k")], **{str(keyword.arg): host}).host is host


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_named_exist(page):
    """``trew train ... --resume`` and the like, in backticks or as indented lines: the command and its long options."""
    text = re.sub(r"^```(?:python|toml|text)\n.*?^```", "", page.read_text(), flags=re.M | re.S)
    lines = [*re.findall(r"`((?:bin/)?trew [^`]+)`", text), *re.findall(r"^(?: {4})?(trew [a-z].*)$", text, re.M)]
    for line in lines:
        _, name, *rest = re.sub(r"\s{3,}.*|\s+#.*", "", line).split()
        if not re.fullmatch(r"[a-z]+", name):
            continue
        assert name in COMMANDS, f"{page.name}: {line}"
        module, target, _ = COMMANDS[name]
        if isinstance(target, tuple):
            target = next((t for t in target if t in rest), target[0])
        function = getattr(importlib.import_module(f"trew.cli.{module}"), target.replace("-", "_"))
        known = {"--help", *("--" + p.replace("_", "-") for p in inspect.signature(function).parameters)}
        assert {w for w in rest if w.startswith("--")} <= known, f"{page.name}: {line}"


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, i) for page in EXECUTED for i in range(len(blocks(page, "python")))],
    ids=lambda v: v.name if isinstance(v, Path) else str(v),
)
def test_python_examples_run(page, number, tmp_path, monkeypatch, capsys):
    """Each block runs by itself, in an empty folder; a line ``print(...)  # text`` must print that text."""
    monkeypatch.chdir(tmp_path)
    code = blocks(page, "python")[number]
    (tmp_path / "block.py").write_text(code)
    runpy.run_path(str(tmp_path / "block.py"), run_name="__main__")
    promised = re.findall(r"^print\(.*\)  # (.+)$", code, re.M)
    if promised:
        assert capsys.readouterr().out.splitlines() == promised


@pytest.mark.parametrize(
    ("page", "block"),
    [(page, b) for page in PAGES for b in blocks(page, "toml") if re.search(r"^model =", b, re.M)],
    ids=lambda v: v.name if isinstance(v, Path) else "recipe",
)
def test_recipes_in_pages_parse(page, block):
    config = parse(tomllib.loads(block))
    preset(config.objective.preset, **config.objective.args)


def test_a_wrong_recipe_in_a_page_would_be_noticed():
    with pytest.raises(ConfigError, match="lrr"):
        parse(tomllib.loads('model = "m"\n[learner]\nlrr = 1e-5'))


# ---- distributed-faults.md


def texts_of_the_code() -> str:
    """Every string and f-string of the package, one a line, with … for what varies."""
    found = []
    for path in (ROOT / "src" / "trew").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts))
    return "\n".join(text.replace("\n", " ") for text in found)


def test_messages_on_the_page_of_faults_are_those_of_the_code():
    page = (ROOT / "docs" / "distributed-faults.md").read_text()
    quoted = re.findall(r"^(?: {4}| {8})(\S.*)$", page, re.M)
    assert len(quoted) > 20
    code = texts_of_the_code()
    assert [line for line in quoted if not re.search(re.escape(line).replace("…", ".*"), code)] == []
    assert not re.search("a message that .* prints", code)


# ---- recipes


def command_of(recipe: Path) -> str:
    """The command that runs a recipe."""
    text = recipe.read_text()
    return "iterate" if "[iterate]" in text else "sft" if "[sft]" in text else "train"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    """A tiny model, and a GSM8K of 300 problems, a MATH, an MBPP and a HumanEval of a few in the original formats."""
    folder = tmp_path_factory.mktemp("recipes")
    path = tiny.save(folder / "model") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))
    (folder / "gsm8k").mkdir()
    for split, count in (("train", 300), ("test", 20)):
        rows = [
            {"question": f"{split}: what is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}
            for i in range(count)
        ]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {
        "math": [
            {"problem": f"{i} + 1?", "solution": f"\\boxed{{{i + 1}}}", "level": "Level 4", "type": "Algebra"}
            for i in range(80)
        ],
        "math500": [{"problem": f"Is it {i}?", "answer": str(i), "level": 1} for i in range(9)],
        "mbpp": [
            {
                "task_id": i,
                "text": f"Add {i}.",
                "code": f"def f(x): return x + {i}",
                "test_list": [f"assert f(1) == {i + 1}"],
            }
            for i in (*range(11, 15), *range(602, 610))
        ],
        "humaneval": [
            {
                "task_id": f"HumanEval/{i}",
                "prompt": f"def f(x):\n    return_{i} = 0\n",
                "entry_point": "f",
                "canonical_solution": f"    return x + {i}\n",
                "test": f"def check(candidate):\n    assert candidate(1) == {i + 1}\n",
            }
            for i in range(3)
        ],
    }
    asked, told = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
    sets["demonstrations"] = [{"messages": [asked | {"content": f"{i} + 1?"}, told]} for i in range(300)]
    sets["pairs"] = [{"prompt": [asked | {"content": f"{i} + 1?"}], "chosen": "2", "rejected": "3"} for i in range(300)]
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ALWAYS = (
    "arithmetic.toml",
    "iterative.toml",
    "sft.toml",
)  # one of each command; the others are tried in the nightly tests


@pytest.mark.parametrize("recipe", tiers.some(RECIPES, ALWAYS, name=lambda p: p.name), ids=lambda p: p.stem)
def test_every_recipe_passes_its_dry_run(recipe, stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = [f"model={stand_in / 'model'}", "data.max_prompt_tokens=2000"]  # one token per byte there
    if "environment" in tomllib.loads(recipe.read_text()):  # what episodes make of a row is not measured
        settings = settings[:1]
    if recipe.stem == "mixture":
        settings = [settings[0], *(f"data.{i}.max_prompt_tokens=2000" for i in range(2))]
    if recipe.stem in ("sft", "dpo"):
        rows = "demonstrations" if recipe.stem == "sft" else "pairs"
        settings = [settings[0], f"data.train={stand_in / f'{rows}.jsonl'}", "learner.warmup_steps=1"]
    if recipe.stem.startswith("gsm8k"):
        settings += [f"data.train={stand_in / 'gsm8k'}"]
    if recipe.stem == "gsm8k-distill":
        settings += [f"teacher.model={stand_in / 'model'}"]
    if recipe.stem == "math":
        settings += [f"data.train={stand_in / 'math.jsonl'}", f"data.eval={stand_in / 'math500.jsonl'}"]
    if recipe.stem in ("mbpp", "humaneval"):
        few = ["rollout.prompts=8", "learner.minibatch_prompts=4"]
        settings += [f"data.train={stand_in / 'mbpp.jsonl'}", *few]
    if recipe.stem == "humaneval":
        settings += [f"data.eval={stand_in / 'humaneval.jsonl'}"]
    if recipe.stem == "reasoning_gym":
        if importlib.util.find_spec("reasoning_gym") is None:
            pytest.skip("the reasoning-gym package is not installed")
        settings += ["data.args.size=70", "eval.size=20"]
    if recipe.stem == "countdown":
        settings += ["data.args.size=100", "rollout.max_tokens=64"]  # enough for a test; the stand-in has 512 positions
    with pytest.raises(SystemExit) as left:
        main([command_of(recipe), str(recipe), "--dry-run", "--set", *settings])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    assert "Nothing was trained" in out
    assert "dropped" not in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_says_what_it_shows_needs_and_how_it_is_run(recipe):
    head = recipe.read_text().split("\nmodel =")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in ("# Shows ", "# Needs ", f"trew {command_of(recipe)} recipes/{recipe.name}"):
        assert word in head, word


def test_the_table_of_recipes_has_them_all():
    listed = re.findall(r"^\| \[`([\w-]+\.toml)`\]\(\1\) \|", (ROOT / "recipes" / "README.md").read_text(), re.M)
    assert sorted(listed) == [p.name for p in RECIPES]


# ---- rewards.md


def documented_functions() -> list[tuple[str, str]]:
    """(name, source) of the reward functions that docs/rewards.md shows, those that need a server aside."""
    found = []
    for source in blocks(ROOT / "docs" / "rewards.md", "python"):
        found += [(name, source) for name in re.findall(r"^def (\w+)\(prompts, completions", source, re.M)]
    return found


def test_there_are_documented_functions():
    assert "brevity" in [name for name, _ in documented_functions()]


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize(
    ("name", "source"), documented_functions(), ids=lambda value: value if value.isidentifier() else ""
)
def test_documented_rewards_tell_answers_apart_on_rows_of_both_kinds(tmp_path, name, source, chat):
    from trew.rewards.reward_checks import text_group
    from trew.types import Prompt

    (tmp_path / "my_rewards.py").write_text(source)
    rewards = RewardSet.from_config([RewardConfig(name=f"{tmp_path}/my_rewards.py:{name}", args={"target": 10})])
    prompt = Prompt("q", messages=({"role": "user", "content": "?"},)) if chat else Prompt("q", text="?")
    [scored] = rewards.score([text_group(prompt, ["", "12345", "1234567890"])])
    rewards.close()
    assert [score.value for score in scored.scores] == [1.0, 0.5, 0.0]
