"""What a run shows: numbers in columns, and text of models and data that never acts on the terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from rollouts_help import answers
from trew.types import Prompt, Score, ScoredGroup
from trew.utils.console import COLUMNS, HEADING_EVERY, Bar, Display, Silent, duration

HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]x[/bold] [/] \u202eabc\u2066 \x9b2J\r\x08 \u200f end"


def display(*, terminal: bool = False, width: int = 160) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, width=width, highlight=False, force_terminal=terminal, color_system=None)), out


def scored(*scores: float | None, text: str = "answer", prompt: Prompt | None = None) -> ScoredGroup:
    texts = [f"{text} {i}" for i in range(len(scores))]
    group = answers(prompt or Prompt("p", text="question"), *texts, tokens=1)
    return ScoredGroup(group, tuple(Score(s) for s in scores))


def harmless(text: str) -> None:
    """No control, escape or direction character reaches the terminal."""
    assert all(c == "\n" or c.isprintable() for c in text), repr(text)
    assert not set(text) & {chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_the_terminal_has_not_do_not_end_a_run(encoding, monkeypatch):
    """Text of models, and the mark of a line's end in it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", out)
    Display().samples([scored(1.0, 0.0, text="\u65e5\n\ud83d end")])
    out.flush()
    lines = out.buffer.getvalue().decode(encoding).splitlines()
    assert [line.split()[-2:] for line in lines[1:]] == [["end", "0"], ["end", "1"]]


@pytest.mark.parametrize("method", ["line", "warn"])
def test_lines_show_hostile_text_and_do_not_obey_it(method):
    shown, out = display()
    getattr(shown, method)(HOSTILE)
    harmless(out.getvalue())
    assert "[bold]x[/bold] [/]" in out.getvalue()


def test_samples_show_hostile_prompts_and_completions_on_one_line_each():
    shown, out = display()
    chat = Prompt("p", messages=({"role": "user", "content": f"{HOSTILE}\nsecond line"},))
    shown.samples([scored(1.0, 0.0, text=HOSTILE + "\n\u2028third" + "x" * 500, prompt=chat)])
    harmless(out.getvalue())
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert "⏎ second line" in lines[0]
    assert all(len(line) < 125 for line in lines)


def test_files_show_hostile_names():
    shown, out = display()
    shown.files({"model": "runs/[bold]x[/bold]"})
    assert "runs/[bold]x[/bold]" in out.getvalue()


def test_samples_are_the_best_and_the_worst_and_unscored_ones_come_last():
    shown, out = display()
    shown.samples([scored(0.0, 1.0, 0.5), scored(0.0)])
    assert [line.split()[:2] for line in out.getvalue().splitlines()[1:]] == [["reward", "1"], ["reward", "0"]]
    shown, out = display()
    shown.samples([scored(None, 0.25, None)])
    assert [line.split()[1] for line in out.getvalue().splitlines()[1:]] == ["0.25", "none"]
    shown, out = display()
    shown.samples([scored(None)])
    assert out.getvalue().count("reward none") == 1
    shown, out = display()
    shown.samples([])
    assert out.getvalue() == ""


@pytest.mark.parametrize("value", [0.069564718, -0.069564718, 1.0, 123456.789, -1.23456e-123, None])
def test_a_samples_reward_is_short_and_stands_apart_from_its_text(value):
    shown, out = display()
    shown.samples([scored(value, text="18 + 19 = 27")])
    prompt, sample = out.getvalue().splitlines()
    assert sample.index("18 + 19") == prompt.index("question") == 20
    assert sample[19] == " "


def test_rows_stand_under_their_headings_and_unknown_values_are_dashes():
    shown, out = display()
    row = {"step": 7, "reward": 0.125, "accuracy": None, "clip_share": 0.5, "tokens_per_second": 1234.5}
    for _ in range(HEADING_EVERY + 1):
        shown.step(row)
    lines = out.getvalue().splitlines()
    assert len(lines) == HEADING_EVERY + 3  # the headings once more
    assert lines[0] == lines[HEADING_EVERY + 1]
    assert [heading for heading, _ in COLUMNS.values()] == lines[0].split()
    assert lines[1].split() == ["7", "0.125", "-", "-", "-", "-", "50.0%", "-", "1234", "-"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30, 0])
def test_a_row_takes_any_number(value):
    shown, out = display()
    shown.step(dict.fromkeys(COLUMNS, value))
    assert len(out.getvalue().splitlines()) == 2


@pytest.mark.parametrize("value", [12345.678, -1234.5, 1e7, -1.25e30, 1e300])
def test_large_numbers_of_a_row_stay_apart(value):
    """A KL that explodes ran into the entropy on its left."""
    shown, out = display()
    shown.step(dict.fromkeys(COLUMNS, value) | {"step": 3, "clip_share": 0.5})
    cells = out.getvalue().splitlines()[1].split()
    assert len(cells) == len(COLUMNS)
    assert [float(c.removesuffix("%")) for c in cells[1:6]] == pytest.approx([value] * 5, rel=0.3)


@pytest.mark.parametrize("value", [1e-9, -0.0004, 1e-300])
def test_small_numbers_of_a_row_are_not_0(value):
    """A reward of 1e-9 was shown as one of 0."""
    shown, out = display()
    shown.step({"step": 3, "reward": value, "accuracy": 0.0})
    assert [float(cell) for cell in out.getvalue().splitlines()[1].split()[1:3]] == [pytest.approx(value), 0.0]


def test_a_small_loss_is_not_0():
    shown, out = display()
    loss = {"loss": {"mean": 2e-5, "low": 1e-5, "high": 3e-5}, "rows": 4, "perplexity": 1.0}
    shown.losses(loss, loss)
    assert out.getvalue().count("2e-05") == out.getvalue().count("1e-05 to 3e-05") == 2


def result(mean: float | None, low: float | None, high: float | None) -> dict:
    return {"accuracy": {"mean": mean, "low": low, "high": high}, "n": 40, "mean_length": 3.25, "truncated_share": 0.5}


def test_before_and_after():
    shown, out = display()
    shown.before_after(result(0.1, 0.05, 0.2), result(0.9, 0.8, 0.95))
    text = out.getvalue()
    ends = ("0.100", "0.050 to 0.200", "after training", "0.800 to 0.950", "50.0%")
    for expected in ("before training (n = 40)", *ends):
        assert expected in text


@pytest.mark.parametrize("width", [24, 40, 60, 70, 80, 100])
def test_a_narrow_terminal_cuts_nothing_of_before_and_after(width):
    """Of 40 columns, it had "befo… 1… 0… 5…"."""
    shown, out = display(width=width)
    sets = {"sets": {"easy": {"n": 30, "accuracy": {"mean": 0.3, "low": 0.2, "high": 0.4}}}}
    shown.before_after(result(0.1, 0.05, 0.2), result(0.9, 0.8, 0.95) | sets)
    text = out.getvalue()
    for expected in ("before training (n = 40)", "0.050 to 0.200", "  easy (n = 30)", "0.200 to 0.400", "50.0%"):
        assert expected in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= max(width, 31)
    assert (text.count("accuracy") == 1) == (width >= 70), "as a table where it has room, else by value"


def test_before_without_after_and_without_any_verdict():
    shown, out = display()
    shown.before_after(result(0.1, 0.05, 0.2), None)
    assert "after training" not in out.getvalue()
    shown, out = display()
    shown.before_after(result(None, None, None), result(None, None, None))
    assert out.getvalue().count("no verdicts") == 2


def test_without_a_terminal_a_bar_is_one_line():
    shown, out = display()
    with shown.bar("training", 30, done=4) as bar:
        bar.note("generating")
        bar.advance()
        assert bar.done == 5
    assert out.getvalue() == "training: 30\n"


def test_on_a_terminal_bars_nest_and_rows_are_printed_above_them():
    shown, out = display(terminal=True)
    with shown.bar("training", 3) as outer:
        outer.advance()
        with shown.bar("evaluating [x]", 2) as inner:
            inner.advance()
            shown.step({"step": 1})
        outer.advance()
    with shown.bar("again", 1):  # a new one after the first is gone
        pass
    assert "training" in out.getvalue()
    assert "tokens/s" in out.getvalue()
    assert "evaluating [x]" in out.getvalue()


def test_a_bar_is_taken_away_when_the_work_in_it_fails():
    shown, _ = display(terminal=True)

    def fail() -> None:
        with shown.bar("training", 3), shown.bar("evaluating", 2):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    with shown.bar("again", 1) as bar:
        bar.advance()


class Recorder:
    """Stands for rich's Progress: keeps what it was last told."""

    def update(self, task: object, **fields: object) -> None:
        self.fields = fields


def test_time_left_of_a_resumed_run_is_by_the_steps_of_this_process(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Recorder()
    bar = Bar(progress, 100, 90, task=0)  # type: ignore[arg-type]
    now[0] += 30.0  # the first step of ten that are left
    bar.advance()
    assert progress.fields == {"completed": 91, "left": "4:30 left"}
    now[0] += 30.0
    bar.advance()
    assert progress.fields["left"] == "4:00 left"


def test_durations_are_never_negative():
    assert [duration(s) for s in (-3, 0, 59.6, 3600)] == ["0:00", "0:00", "1:00", "1:00:00"]


def test_silent_prints_nothing(capsys):
    quiet = Silent()
    with quiet.bar("training", 2) as bar:
        bar.advance()
        quiet.line("x")
        quiet.step({"step": 1})
        quiet.before_after(result(0.1, 0.05, 0.2), None)
    assert capsys.readouterr().out == ""
