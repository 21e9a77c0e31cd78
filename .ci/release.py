"""Tries the wheel in dist/ as a user gets it: installed in fresh environments, outside the checkout.

python .ci/release.py                       on every Python from 3.11 on that this machine has
python .ci/release.py python3.12 ...        on these
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEWEST = 20
COMPILERS = ("*gcc*", "*g++*", "*clang*", "cc", "c++", "c89*", "c99*", "*-cc")
PLAIN = "on the plain path of PyTorch"
"""What a run says where it has no kernels."""

RECIPE = """\
model = "lm"
steps = 2

[data]
task = "arithmetic"
args = {ops = ["+"], largest = 9, system = "You add."}

[rollout]
prompts = 2
completions = 4
max_tokens = 6

[learner]
lr = 1e-3

[eval]
size = 4

[checkpoint]
every = 1
"""
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--version",),
    ("--help",),
    ("doctor",),
    ("explain", "dapo"),
    ("train", "r.toml", "--dry-run"),
    ("train", "r.toml", "--out", "run"),
    ("report", "run"),
    ("eval", "run", "--size", "2"),
    ("chat", "run", "What is 7 + 5?", "--before", "--max-tokens", "5"),
    ("export", "model", "run", "--out", "exported"),
)
MADE = ("run/final/model.safetensors", "run/report.html", "run/summary.json", "exported/README.md")


def main(pythons: Sequence[str]) -> int:
    [wheel] = (ROOT / "dist").glob("*.whl")
    [source] = (ROOT / "dist").glob("*.tar.gz")
    say(f"{source.name}, {wheel.name}: {check_contents(wheel)} files of the package, each of them tracked by git")
    if links := relative_links(wheel):
        say(
            f"note: {len(links)} links and pictures of the README lead to files of the repository, such as {links[0]}; "
            "on a package index they lead nowhere. Before the first upload, put the repository's address before them"
        )
    found = {version_of(p): p for p in pythons} if pythons else installed_pythons()
    if not found:
        sys.exit("no Python from 3.11 on was found; name some: make release PYTHONS=/path/to/python3.12")
    for version, python in found.items():
        with tempfile.TemporaryDirectory(prefix="trew-release-") as place:
            try_wheel(wheel, Path(place), python)
        say(f"Python {version}: the wheel works, with and without a compiler")
    return 0


def check_contents(wheel: Path) -> int:
    """Exits unless the wheel has exactly the tracked files of src/trew; it is built from the sdist, so both are
    complete. Returns their number."""
    listed = subprocess.run(["git", "ls-files", "src/trew"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {line.removeprefix("src/") for line in listed.stdout.splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
    inside = {n for n in names if not n.split("/")[0].endswith(".dist-info")}
    about = {n.partition("/")[2] for n in names - inside}
    wrong = [f"lacks {n}" for n in sorted(tracked - inside)] + [f"has {n} too" for n in sorted(inside - tracked)]
    wrong += [
        f"lacks {n} in its dist-info" for n in ("METADATA", "licenses/LICENSE", "entry_points.txt") if n not in about
    ]
    if wrong:
        sys.exit("\n".join(f"{wheel.name}: {each}" for each in wrong))
    return len(inside)


def relative_links(wheel: Path) -> list[str]:
    """What the description in the wheel links to without an address."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target and target[0] != "#"]


def installed_pythons() -> dict[str, str]:
    """A command for each Python from 3.11 on that runs here, by version."""
    found = {}
    for minor in range(11, NEWEST):
        name = f"python3.{minor}"
        for candidate in [shutil.which(name), *of_pyenv(name)]:
            if candidate and (version := version_of(candidate)).startswith(f"3.{minor}."):
                found[version] = candidate
                break
    return found


def of_pyenv(name: str) -> list[str]:
    """What pyenv has by this name: its commands run only the versions that are switched on."""
    if not shutil.which("pyenv"):
        return []
    return subprocess.run(["pyenv", "whence", "--path", name], capture_output=True, text=True).stdout.split()


def version_of(python: str) -> str:
    """The version of a Python; empty if it does not run."""
    try:
        ran = subprocess.run(
            [python, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True
        )
    except OSError:
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def try_wheel(wheel: Path, place: Path, python: str) -> None:
    """Installs the wheel in an environment of its own, and runs it with the compiler that the machine has, and with
    none."""
    say(f"{python}: installing")
    run([python, "-m", "venv", place / "env"], place)
    own = place / "env" / "bin"
    pip = [own / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    run([*pip, "-c", ROOT / "constraints.txt", wheel], place)
    run([own / "python", "-m", "pip", "check"], place)
    without = programs_without_compilers(place / "bin")
    for name, path in (("compiler", os.environ["PATH"]), ("no-compiler", str(without))):
        work = place / name
        work.mkdir()
        env = clean(os.environ) | {"PATH": f"{own}:{path}", "TREW_CACHE": str(place / f"cache-{name}")}
        try_commands(work, own / "trew", env)
        plain = PLAIN in (work / "train.log").read_text()
        has_compiler = bool(shutil.which("gcc", path=path) or shutil.which("clang", path=path))
        if plain == has_compiler:
            sys.exit(f"{name}: the run took {'the plain path' if plain else 'the kernels'}; see {work}/train.log")


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which nothing leads back to the checkout."""
    gone = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TREW_CACHE", "CC", "CXX")
    return {k: v for k, v in environment.items() if k not in gone}


def try_commands(work: Path, trew: Path, env: dict[str, str]) -> None:
    """Runs every command in ``work`` on a tiny model without network."""
    make = "import sys; sys.path.insert(0, sys.argv[1]); import tiny; tiny.save('lm')"
    run([sys.executable, "-c", make, ROOT / "tests"], work)
    (work / "r.toml").write_text(RECIPE)
    for command in COMMANDS:
        printed = run([trew, *command], work, env=env | {"HF_HUB_OFFLINE": "1"})
        if command[0] == "train":
            (work / "train.log").write_text(printed)
    if missing := [name for name in MADE if not (work / name).is_file()]:
        sys.exit(f"{work}: {', '.join(missing)} was not written")
    # The package is the installed one, not the checkout's.
    where = run([trew.parent / "python", "-c", "import trew; print(trew.__file__)"], work, env=env)
    if str(trew.parent.parent.resolve()) not in str(Path(where.strip()).resolve()):
        sys.exit(f"trew was imported from {where.strip()}")


def programs_without_compilers(folder: Path) -> Path:
    """A folder of links to every program on the path but compilers."""
    folder.mkdir()
    for place in os.environ["PATH"].split(":"):
        for program in Path(place).glob("*") if Path(place).is_dir() else ():
            if not any(program.match(pattern) for pattern in COMPILERS) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


def run(command: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Runs a command, which must succeed; returns what it printed on both streams."""
    words = list(map(str, command))
    ran = subprocess.run(
        words, cwd=cwd, env=dict(env) if env is not None else clean(os.environ), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if ran.returncode or "Traceback" in ran.stdout:
        sys.exit(f"{' '.join(words)}: exit code {ran.returncode}\n{ran.stdout}")
    return ran.stdout


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
