"""Conducts a study: checks every cell, makes its models, tunes, runs the seeds, and writes the results as it goes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import load
from ..errors import ConfigError
from ..runs.files import write_atomic
from ..runs.layout import STUDY_LOCK
from ..runs.lock import Lock
from . import earlier, results, work
from .choice import choose
from .design import Cell, Run, Study, reported_runs, tuning_runs
from .history import History
from .pool import Job, Pool
from .report import write_report
from .rows import Row, read_row
from .states import Place, ended_below, fingerprint, write_json

_REPORT_EVERY = 50  # runs
_FINAL = ("done", "failed")


@dataclass
class Conduct:
    """A study in its folder. ``say`` prints a line."""

    study: Study
    out: Path
    cells: Sequence[Cell]
    jobs: int
    say: Callable[[str], object]
    deadline: float | None = None  # of time.monotonic(); no run is started after it
    given: Sequence[Path] = ()  # results of parts that were run elsewhere
    parts: Sequence[earlier.Earlier] = ()  # these, and those of earlier calls
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # by task, if the study makes them
    rows: dict[Run, Row] = field(default_factory=dict)
    fresh: list[float] = field(default_factory=list)  # seconds of the runs of this call

    # ---- the whole study

    def go(self) -> dict[str, Any]:
        """Does what is not done yet; returns the results. Raises ConfigError with all problems before the first run."""
        with self._prepared() as pool:
            # Those of an earlier design too: after a change of what they learn, no row is left of them.
            elsewhere = max((len(part.rows) for part in self.parts), default=0)
            seen = max(len(self.rows), ended_below(self.out / "runs"), elsewhere)
            for line in History.read(self.out).note(self.study, runs=seen):
                self.say(f"note: {line}")
            self.say(self.forecast())
            try:
                # ``chosen`` is read after the tuning runs, which decide it, and is written down before the first run
                # that is reported.
                self._all(pool, tuning_runs(self.study, self.cells))
                if not self.time_is_over:
                    self.say_choices()
                    self._all(pool, reported_runs(self.study, self.cells, self.chosen))
            except KeyboardInterrupt:
                # The rows alone, which another machine may go on from: intervals and pictures take seconds, and
                # whoever stops a study may not wait for them.
                self.write_results()
                raise
            return self.report()

    def dry_run(self) -> None:
        """Checks every cell, for which it makes the models, and says how many runs there are."""
        with self._prepared():
            self.say(self.forecast())

    @contextmanager
    def _prepared(self) -> Iterator[Pool]:
        """Holds the folder, and has checked everything."""
        self.out.mkdir(parents=True, exist_ok=True)
        # First of all: two processes in one folder would train the same runs.
        lock = Lock(self.out / STUDY_LOCK)
        try:
            with Pool(self.jobs).open() as pool:
                # Results of other parts are read before models are made: a wrong path shows at once.
                given = [*map(earlier.Earlier.read, self.given)]
                self.make_models(pool)
                self.check(pool)
                # After the models, whose weights are compared; before the runs are collected, as these may be among the
                # results.
                self.add(given)
                self.collect()
                self.say_parts()
                yield pool
        finally:
            lock.release()

    def status(self) -> Iterator[str]:
        """How far the study is; reads its folder, and changes nothing."""
        for task in self.study.tasks if self.study.warm else ():
            self.models[task] = self._known_model(task)
        self.collect()
        yield self.forecast()
        tuning = [row for row in self.rows.values() if row.seed in self.study.tuning]
        yield f"tuning: {len(tuning)} of {len(self.study.cells) * len(self.study.tuning) * len(self.study.values)} runs"
        seeds = Counter(row.seed for row in self.rows.values() if row.seed not in self.study.tuning)
        whole = sum(count == len(self.study.cells) for count in seeds.values())
        yield f"seeds: {whole} of {self.study.seeds} complete, {sum(seeds.values())} runs"
        failed = Counter(row.failed for row in self.rows.values() if row.failed)
        yield f"failed: {', '.join(f'{count} {why}' for why, count in sorted(failed.items())) or 'none'}"
        for line in History.read(self.out).lines():
            yield f"changed {line}"

    def make_models(self, pool: Pool) -> None:
        """Makes the small model of each task, unless it is there."""
        if self.study.warm is None:
            return
        jobs = []
        for task in self.study.tasks:
            about = self._about(task)
            self.models[task] = self._known_model(task)
            if not self.models[task]:
                self.say(f"making the model for {task}")
                # Any regime and algorithm: the model is made for the task's data.
                cell = Cell(task, next(iter(self.study.regimes)), next(iter(self.study.algorithms)))
                overrides = self.overrides(Run(cell, self._any_value, 0))
                arguments = (self.study.base, overrides, self.study.warm, self._model(task))
                jobs.append(Job(task, work.make_model, arguments, about.with_suffix(".log"), about))
        for job, found in pool.run(jobs):
            # With the design, by which a later call knows whether the model is still the one that is wanted.
            self.models[job.name] = found["model"] | {"design": self.model_design(job.name)}
            write_json(job.result, {"model": self.models[job.name]})
            job.log.unlink(missing_ok=True)
            m = self.models[job.name]
            self.say(
                f"model for {job.name}: {m['parameters']:,} parameters, right with probability {m['accuracy']:.2f} "
                f"after {m['steps']} supervised steps"
            )

    def check(self, pool: Pool) -> None:
        """Checks every cell as a dry run does, and its settings with each other value of the tuned one; nothing is
        trained if one of them would be refused."""
        cells = [(cell.name, self.overrides(Run(cell, self._any_value, 1))) for cell in self.cells]
        values = [value for value in self.study.values if value != self._any_value]
        others = [(cell.name, self.overrides(Run(cell, value, 1))) for cell in self.cells for value in values]
        place = self.out / "check"
        job = Job(
            "check", work.check, (self.study.base, cells, others), place.with_suffix(".log"), place.with_suffix(".json")
        )
        for _, found in pool.run([job]):
            if found["problems"]:
                raise ConfigError([f"{_some(of)}: {problem}" for problem, of in found["problems"].items()])
        job.log.unlink(missing_ok=True)
        job.result.unlink(missing_ok=True)

    def add(self, parts: Sequence[earlier.Earlier]) -> None:
        """Keeps the results of parts that were run elsewhere in this folder, unless their runs began otherwise."""
        if problems := [*earlier.foreign_weights(parts, self.models)]:
            raise ConfigError(problems)
        # Those of this design first: others were before it.
        for part in sorted(parts, key=lambda part: part.study.digest != self.study.digest):
            earlier.keep(part, self.out)
            History.begin(self.out, part.study, part.designs, runs=len(part.rows))

    # ---- what is there

    def collect(self) -> None:
        """Reads all runs that have ended, those of cells that ``--only`` leaves out too. Tuning runs come first: they
        decide which others belong to the study."""
        self.parts = earlier.kept(self.out)
        for run in tuning_runs(self.study, self.study.cells):
            self._look(run)
        for run in reported_runs(self.study, self.study.cells, self.chosen):
            self._look(run)

    def _look(self, run: Run) -> None:
        if run in self.rows:
            return
        place = self.place(run)
        # A run in this folder counts before one that was made elsewhere.
        if place.state() in _FINAL:
            self.rows[run] = read_row(run, place)
        elif (row := self._elsewhere(run, place.fingerprint)) is not None:
            self.rows[run] = row

    def _elsewhere(self, run: Run, settings: str) -> Row | None:
        """The row of a run that was made elsewhere with the same settings from the same weights."""
        of = [part for part in self.parts if run in part.rows]
        return next((p.rows[run] for p in of if p.settings(run, self.study.base.parent) == settings), None)

    @property
    def chosen(self) -> dict[Cell, float | None]:
        """The tuned setting's value of every cell for which it is known."""
        if not self.study.tuned:
            # None: every cell has the recipe's own value, and a run without a tuned setting.
            return dict.fromkeys(self.study.cells)
        return choose(self.study, self.rows.values())

    def place(self, run: Run) -> Place:
        config = load(self.study.base, self.overrides(run))
        model = str(self.models.get(run.cell.task, {}).get("sha256", ""))
        return Place(self.out / run.folder, fingerprint(config, model=model))

    def overrides(self, run: Run) -> list[str]:
        own = self.study.overrides(run)
        return own if self.study.warm is None else [*own, f"model={self._model(run.cell.task)}"]

    def _model(self, task: str) -> Path:
        return self.out / "models" / task

    def _about(self, task: str) -> Path:
        return self._model(task).with_name(f"{task}.json")

    def _known_model(self, task: str) -> dict[str, Any]:
        """What is known about a task's model; empty if it is not there, or was made by another design."""
        known = results.read_json(self._about(task)).get("model", {})
        return known if known.get("design") == self.model_design(task) and self._model(task).is_dir() else {}

    def model_design(self, task: str) -> str:
        # Everything that the model is made from.
        return results.digest([self.study.to_json()[key] for key in ("warm", "set", "recipe")], self.study.tasks[task])

    @property
    def _any_value(self) -> float | None:
        return self.study.values[0] if self.study.values else None

    # ---- running

    @property
    def time_is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _all(self, pool: Pool, runs: Iterable[Run]) -> None:
        """Runs what has not ended, in order, and reports as it goes."""
        todo = [run for run in runs if run not in self.rows]
        by_folder = {str(self.out / run.folder): run for run in todo}
        # In the order in which runs end.
        for job, found in pool.run(self._jobs_of(todo)):
            run = by_folder[job.name]
            place = self.place(run)
            place.tidy()
            self.rows[run] = row = read_row(run, place)
            # At once: its folder may be deleted before another call looks at it.
            History.read(self.out).count()
            self.fresh.append(found["seconds"])
            left = sum(other not in self.rows for other in todo)
            spent = f"{found['seconds']:.1f} s, {found['cpu_seconds']:.1f} of them of a processor"
            self.say(f"{run.name}: {row.line()}; {spent}; {self._left(left)}")
            if len(self.fresh) % _REPORT_EVERY == 0:
                self.report()

    def _jobs_of(self, runs: Sequence[Run]) -> Iterator[Job]:
        # A generator: the pool asks for a run when a process is free, so that the clock is read just before each start.
        for run in runs:
            if self.time_is_over:
                self.say("the time is over: no more runs are started; the same command goes on")
                return
            # Before begin(), which removes the file that the state is read from.
            place = self.place(run)
            resume = place.state() == "half"
            arguments = (self.study.base, self.overrides(run), str(place.folder))
            place.begin()
            yield Job(str(place.folder), work.resume if resume else work.train, arguments, place.log, place.result)

    def _left(self, runs: int) -> str:
        """How many of this phase's runs are left, and how long they take at the pace of those so far."""
        pace = sum(self.fresh) / len(self.fresh) / self.jobs
        return f"{runs} left, {runs * pace / 3600:.1f} h"

    def forecast(self) -> str:
        """How many runs the whole study and the named cells have, and the hours if some have been timed."""
        per_cell = len(self.study.tuning) * len(self.study.values) + self.study.seeds
        named = set(self.cells)
        done = sum(run.cell in named for run in self.rows)
        runs = per_cell * len(self.cells) - done
        timed = {run: row.seconds for run, row in self.rows.items() if row.seconds}
        # Regimes differ in what a run takes: others speak only where none of these has run.
        seconds = [timed[run] for run in timed if run.cell in named] or list(timed.values())
        told = f", about {runs * sum(seconds) / len(seconds) / self.jobs / 3600:.1f} h" if seconds else ""
        return f"{self.study.name}: {len(self.cells)} cells, {per_cell * len(self.cells)} runs, {runs} to do{told}"

    # ---- results

    def report(self) -> dict[str, Any]:
        """Writes results.json, report.md and its pictures from what has ended."""
        found = self.write_results()
        write_report(found, self.out)
        return found

    def write_results(self) -> dict[str, Any]:
        """Writes results.json from what has ended."""
        found = results.assemble(self.study, self.models, self.chosen, list(self.rows.values()), History.read(self.out))
        write_atomic(self.out / "results.json", lambda file: file.write(results.text(found).encode()))
        return found

    def say_parts(self) -> None:
        """Says how many runs of each part that was made elsewhere count."""
        for part in self.parts:
            used = sum(self.rows.get(run) is row for run, row in part.rows.items())
            other = f"; {len(part.rows) - used} have other settings, or are here" if used < len(part.rows) else ""
            self.say(f"{used} of {len(part.rows)} runs of {part.source.name} count{other}")

    def say_choices(self) -> None:
        """Writes down, before the first reported run, which value each cell has."""
        if self.study.tuned:
            write_json(self.out / "chosen.json", {cell.name: value for cell, value in sorted(self.chosen.items())})
            for cell, value in self.chosen.items():
                if cell in self.cells:
                    self.say(f"{cell.name}: {self.study.tuned} = {value:g}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
