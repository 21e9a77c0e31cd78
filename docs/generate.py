"""Writes what the documentation takes from the code: presets.md, python.md, tables in other pages, pictures.

python docs/generate.py            writes what is not current (make docs)
python docs/generate.py --check    only names it; exit code 1 if there is any
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import house
import interface

from trew.cli.curves import figure
from trew.cli.describe import AXES, COLUMNS, OPTIONS, SCOPES, Description, describe, row, setting, value
from trew.cli.schema import text_of_schema
from trew.integrations.trl.refusals import table as trl_table
from trew.integrations.verl.offered import table
from trew.objective import preset
from trew.objective.adjust import Adjust
from trew.objective.advantage import Advantage, Baseline, Scale
from trew.objective.aggregate import Aggregate
from trew.objective.correction import Correction
from trew.objective.divergence import Divergence
from trew.objective.entropy_bonus import EntropyBonus
from trew.objective.filter import GroupFilter, LossMask, TokenMask
from trew.objective.likelihood import CorrectLikelihood
from trew.objective.options import Options
from trew.objective.presets import PRESETS
from trew.objective.ratio import Ratio
from trew.objective.shaping import Shape
from trew.objective.weight import Weight
from trew.study import report
from trew.study.pictures import draw
from trew.utils.installing import requirements

DOCS = Path(__file__).parent
PICTURES = DOCS / "images" / "objectives"
RESULTS = DOCS.parent / "benchmarks" / "results"
IMAGES = "images/"
COMPARED = ("ppo-clip", "trw-triangular", "ce-gppo", "sapo")
"""Presets in the picture of the page's introduction."""

NONE_YET = "No study has been conducted yet."

INTRODUCTION = """\
# Presets

Every algorithm by its name, generated from the code by `make docs`. In a recipe, settings stand next to the preset's
name: `[objective]` with `preset = "dapo"` and `eps_high = 0.3`. From Python: `trew.preset("dapo", eps_high=0.3)`.
Unknown names and settings are refused with the nearest match. Every preset also takes the [common
options](objectives.md#options-that-every-preset-takes); those that it sets itself are listed with it. The equations are
with the defaults; [objectives.md](objectives.md) explains what each line decides. In the pictures, one token has the
ratio r and the advantage ±1; w(r, A) is on the left, the coefficient on the right.
"""


def files() -> dict[Path, str]:
    """Every generated file with what should be in it."""
    described = [describe(name) for name in PRESETS]
    found = {PICTURES / f"{d.name}.svg": figure([d.objective]) for d in described}
    found[PICTURES / "compare.svg"] = figure([preset(name) for name in COMPARED], ratios=(0.0, 2.0))
    found[DOCS / "presets.md"] = presets_page(described)
    found[DOCS / "python.md"] = interface.page(prose)
    objectives = DOCS / "objectives.md"
    parts = {
        "axes": axes_table(),
        "options": options_table(),
        "choices": choices_table(described),
        "pictures": gallery(described),
    }
    found[objectives] = filled(objectives.read_text(encoding="utf-8"), parts)
    inside_trl = DOCS / "trl.md"
    found[inside_trl] = filled(inside_trl.read_text(encoding="utf-8"), {"presets": trl_table()})
    verl = DOCS / "verl.md"
    found[verl] = filled(verl.read_text(encoding="utf-8"), {"presets": verl_table()})
    found |= study_files()
    installing = DOCS / "install.md"
    found[installing] = filled(installing.read_text(encoding="utf-8"), {"extras": extras_table()})
    contributing = DOCS.parent / "CONTRIBUTING.md"
    parts = {"rooms": rooms_table(), "layers": layers()}
    found[contributing] = filled(contributing.read_text(encoding="utf-8"), parts)
    found[DOCS / "recipe.schema.json"] = text_of_schema()
    found[DOCS / "images" / "house.svg"] = house.picture()
    return found


def filled(page: str, parts: dict[str, str]) -> str:
    """``page`` with its generated parts exchanged; each stands between two comments."""
    for name, text in parts.items():
        mark = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)", re.S)
        page, count = mark.subn(lambda m, text=text: f"{m[1]}\n{text}\n\n{m[2]}", page)
        assert count == 1, name
    return page


# ------------------------------------------------------------------------------------------------------- the sections


def presets_page(described: Sequence[Description]) -> str:
    contents = " · ".join(f"[{d.name}](#{anchor(d.name)})" for d in described)
    return "\n".join([INTRODUCTION, contents, "", *(section(d) for d in described)])


def section(d: Description) -> str:
    parts = [f"### `{d.name}`", prose(d.summary)]
    parts += [f"    {d.equation}"] if d.equation else []
    parts += [*map(prose, d.about), f"```text\n{d.objective.equation()}\n```"]
    settings = ", ".join(f"`{setting(k, *v)}`" for k, v in d.settings.items())
    options = ", ".join(f"`{setting(k, *v)}`" for k, v in d.options.items())
    lines = [f"Defaults: {settings or 'no settings of its own'}.", f"Options: {options}." if options else ""]
    needs = ", ".join(f"`{name}`" for name in d.objective.needs)
    lines.append(f"Needs: {needs}. Scope: {SCOPES[d.objective.scope].partition(';')[0]}.")
    parts.append("<br>\n".join(line for line in lines if line))
    parts += [f"**Use it** {prose(d.use.removeprefix('Use it '))}"] if d.use else []
    parts += [f"**Deviations:** {prose(d.deviations)}"] if d.deviations else []
    parts.append(f"![{d.name}: weight and coefficient over the ratio](images/objectives/{d.name}.svg)")
    return "\n\n".join(parts) + "\n"


def prose(text: str) -> str:
    """A docstring's paragraph as Markdown: code marks, links to papers, and nothing taken for emphasis."""
    parts = re.split(r"(``.+?``)", re.sub(r":\w+:`(\w+)`", r"``\1``", text))
    plain = [p.replace("``", "`") if p.startswith("``") else re.sub(r"([*<|])", r"\\\1", p) for p in parts]
    return re.sub(r"arXiv[: ](\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", "".join(plain))


# --------------------------------------------------------------------------------------------------------- the tables


KINDS = {
    "keep": GroupFilter, "shape": Shape, "advantage": Advantage, "advantage.baseline": Baseline,
    "advantage.scale": Scale, "adjust": Adjust, "prune": LossMask, "select": TokenMask, "ratio": Ratio,
    "weight": Weight, "correction": Correction, "aggregate": Aggregate, "divergence": Divergence,
    "entropy": EntropyBonus, "nll": CorrectLikelihood,
}  # fmt: skip


def axes_table() -> str:
    """Every kind of choice: what it decides, and all that there is of it."""
    rows = []
    within = {
        "advantage.baseline": "of `BaselineAdvantage`: what is subtracted from the reward",
        "advantage.scale": "of `BaselineAdvantage`: what the difference is divided by",
    }
    says = AXES | within
    assert set(says) == set(KINDS)
    for axis in KINDS:
        found = sorted(choices(KINDS[axis]), key=lambda kind: (kind.__module__, inspect.getsourcelines(kind)[1]))
        places = dict.fromkeys(f"`{Path(inspect.getfile(kind)).relative_to(DOCS.parent)}`" for kind in found)
        field = {"entropy": "entropy_bonus"}.get(axis, axis)
        rows.append((f"`{field}`", says[axis], ", ".join(f"`{k.__name__}`" for k in found), ", ".join(places)))
    return markdown(("field of `Objective`", "what it decides", "what there is", "where"), rows)


def choices(kind: type) -> set[type]:
    """``kind`` and all below it that can be used."""
    known = [sub for sub in kind.__subclasses__() if sub.__module__.startswith("trew.objective.")]  # not of a peer
    below = {found for sub in known for found in choices(sub)}
    usable = not getattr(kind, "_is_protocol", False) and not kind.__name__.startswith("_")
    return below | ({kind} if usable and kind.__module__.startswith("trew.") else set())


def choices_table(described: Sequence[Description]) -> str:
    rows = []
    for d in described:
        name, *choices, paper = row(d)
        link = f"[{paper.rpartition('/')[2]}]({paper})" if paper.startswith("http") else paper
        rows.append((f"[`{name}`](presets.md#{anchor(name)})", *choices, link))
    return markdown(COLUMNS, rows)


def options_table() -> str:
    defaults = dataclasses.asdict(Options())
    assert set(defaults) == set(OPTIONS), set(defaults) ^ set(OPTIONS)
    shown = {k: "the correction's" if v is None else f"`{value(v)}`" for k, v in defaults.items()}
    shown["aggregate"] = "the preset's"
    return markdown(("option", "default", "meaning"), [(f"`{k}`", shown[k], OPTIONS[k]) for k in OPTIONS])


def verl_table() -> str:
    """What verl can have of each preset, and the keys of verl's that it needs there."""

    def keys(settings: Sequence[tuple[str, str]]) -> str:
        short = [(k.removeprefix("actor_rollout_ref.").removeprefix("algorithm."), v) for k, v in settings]
        return ", ".join(f"`{k}={v}`" for k, v in short)

    rows = [(f"`{name}`", o.loss or "yes", o.advantage or "yes", keys(o.settings)) for name, o in table().items()]
    return markdown(("preset", "policy loss", "advantages", "keys"), rows)


EXTRAS = {
    "data": "data sets of the Hugging Face hub",
    "lora": "adapters instead of all weights: `lora.rank` ([memory.md](memory.md#lora))",
    "4bit": "a frozen base in 4 bits, and 8-bit AdamW: `lora.base`, `learner.optimizer`",
    "math": "math-verify, for answers that trew's exact algebra cannot decide ([rewards.md](rewards.md))",
    "reasoning-gym": "the problems of reasoning-gym as tasks ([data.md](data.md#tasks))",
    "gym": "environments of gymnasium ([environments.md](environments.md))",
    "textarena": "the games of TextArena",
    "openenv": "OpenEnv servers",
    "verifiers": "tasksets of verifiers",
    "liger": "liger-kernel on a CUDA GPU: `learner.liger`",
    "view": "`trew view`, runs in the browser",
    "serve": "`trew serve` and `trew rewards serve` ([scale.md](scale.md))",
    "ray": "ranks and servers on a Ray cluster ([scale.md](scale.md#ray))",
    "trl": "trew's objectives inside TRL, in its environment ([trl.md](trl.md))",
    "verl": "the same inside verl ([verl.md](verl.md))",
    "trackio": '`track.to = ["trackio"]`',
    "wandb": '`track.to = ["wandb"]`',
    "tensorboard": '`track.to = ["tensorboard"]`',
    "mlflow": '`track.to = ["mlflow"]`',
    "dev": "what tests and checks need",
    "docs": "what `make site` needs",
}


def study_files() -> dict[Path, str]:
    """The page about studies with the results of those that were conducted, and their pictures."""
    page = DOCS / "study.md"
    conducted = [json.loads(path.read_bytes()) for path in sorted(RESULTS.glob("study-*.json"))]
    text = "\n".join(
        line
        for found in conducted
        for line in (f"## Results: {found['study']}", "", *report.page(found, images=IMAGES), "")
    )
    pictures = {DOCS / IMAGES / name: svg for found in conducted for name, svg in draw(found).items()}
    return {page: filled(page.read_text(encoding="utf-8"), {"results": text.rstrip() or NONE_YET}), **pictures}


def extras_table() -> str:
    """Every extra with its purpose, and the packages that it brings."""
    packages = requirements()
    known = [*EXTRAS, *sorted(set(packages) - set(EXTRAS) - {""})]
    rows = [
        (f"`{name}`", EXTRAS.get(name, ""), ", ".join(f"`{p}`" for p in packages[name]) if name != "dev" else "")
        for name in known
        if name in packages
    ]
    return markdown(("extra", "for", "packages"), rows)


def gallery(described: Sequence[Description], *, columns: int = 3) -> str:
    cells = [f"[![{d.name}](images/objectives/{d.name}.svg)](presets.md#{anchor(d.name)})" for d in described]
    cells += [""] * (-len(cells) % columns)
    return markdown([""] * columns, [cells[i : i + columns] for i in range(0, len(cells), columns)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def anchor(name: str) -> str:
    """GitHub's anchor of the heading with this name.

    >>> anchor("deepseek-v3.2")
    'deepseek-v32'
    """
    return re.sub(r"[^\w\- ]", "", name.lower())


def rooms_table() -> str:
    """Every room but ``backends``, which may be missing, and the files of ``training``, by the first paragraph of their
    docstrings."""
    source = DOCS.parent / "src" / "trew"
    places = [source / "types.py", source / "errors.py"]
    places += sorted(path.parent for path in source.glob("*/__init__.py") if path.parent.name != "backends")
    places += sorted(path for path in (source / "training").glob("*.py") if path.name != "__init__.py")
    rows = []
    for place in places:
        name = place.relative_to(DOCS.parent).as_posix() + ("/" if place.is_dir() else "")
        rows.append([f"`{name}`", house.purpose(place).replace("|", "\\|")])
    return markdown(["room or file", "what is in it"], rows)


def layers() -> str:
    """The layers of ``.importlinter``, the lowest first."""
    return "\n".join("    " + " | ".join(rooms) for rooms in house.layers())


def main(args: Sequence[str]) -> int:
    wanted = files()
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    surplus = [p for p in PICTURES.glob("*.svg") if p not in wanted]
    check = "--check" in args
    for path in [*stale, *surplus]:
        done = "not current" if check else "removed" if path in surplus else "written"
        print(f"{path.relative_to(DOCS.parent)}: {done}")
    if check:
        return int(bool(stale or surplus))
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    for path in surplus:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
