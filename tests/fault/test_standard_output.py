"""Standard output that cannot be written: one message and exit code 1 where it is the result, silence where a folder
has everything; and encodings that have not every character."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import resource
import subprocess
import sys
import tempfile

import pytest

from disk import tmpfs
from recipe_help import recipe, run_folder
from trew.cli.main import main
from trew.errors import StorageError
from trew.utils import console

FULL = "trew: standard output: cannot be written: No space left on device; free some space, or send it to another place"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return run_folder(tmp_path_factory.mktemp("run"), recipe("lm", chat_template="plain"))


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def ended(capsys, *args: str, into: str = "/dev/full") -> tuple[object, list[str]]:
    """The exit code of a command whose standard output goes ``into`` a file, and the lines of its standard error."""
    with pytest.MonkeyPatch.context() as patched, open(into, "w") as out:
        patched.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as end:
            main(args)
    return end.value.code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("--version",),  # short: it fails when what is buffered is written
        ("data",),
        ("train", "--help"),
        ("env",),
        ("schema",),  # longer than any buffer
        ("explain", "grpo"),
        ("data", "show", "--task", "arithmetic"),
        ("train", "r.toml", "--dry-run"),
        ("export", "verl", "r.toml"),
        ("eval", "lm", "--task", "arithmetic", "--size", "2", "--max-tokens", "2", "--recipe", "r.toml"),
        ("chat", "lm", "hello", "--max-tokens", "2", "--chat-template", "plain"),
    ],
    ids=" ".join,
)
def test_a_full_disk_is_one_message(args, here, capsys):
    code, said = ended(capsys, *args)
    assert (code, said[-1:]) == (1, [FULL])
    assert sum("standard output" in line or "Traceback" in line for line in said) == 1


def test_an_evaluation_that_cannot_be_shown_is_not_begun(here, capsys, monkeypatch):
    monkeypatch.setattr("trew.eval.evaluate", lambda *args, **kwargs: pytest.fail("begun"))
    assert ended(capsys, "eval", "lm", "--recipe", "r.toml")[0] == 1


def test_its_file_is_written_all_the_same(here, capsys):
    code, said = ended(capsys, "eval", "lm", "--recipe", "r.toml", "--size", "2", "--json", "own.json")
    assert (code, said) == (1, [FULL])
    assert (here / "own.json").exists()


def test_a_run_needs_no_output(here, capsys):
    assert ended(capsys, "train", "r.toml", "--set", "steps=1", "out=mute") == (0, [])
    assert (here / "mute" / "summary.json").exists()
    # Nor is the next command of the process told of it.
    assert ended(capsys, "--version", into=os.devnull) == (0, [])


def test_an_error_of_another_file_is_not_taken_for_it(capsys, tmp_path, monkeypatch):
    def fails(args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trew.cli.main.run", fails)
    with pytest.raises(OSError, match="No space left"):
        ended(capsys, "env", into=str(tmp_path / "out"))


def test_a_message_of_its_own_goes_first(capsys):
    code, said = ended(capsys, "trian")
    assert code == 2
    assert len(said) == 1


class Failing(io.StringIO):
    """Standard output whose every write fails, with the file descriptor of ``behind``."""

    def __init__(self, number: int, behind: io.IOBase):
        super().__init__()
        self.number, self.behind = number, behind

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))

    def fileno(self) -> int:
        return self.behind.fileno()


@pytest.mark.parametrize(
    ("number", "is_file", "told"),
    [
        (errno.EPIPE, False, ""),
        (errno.EIO, False, ""),  # a closed terminal
        (errno.EIO, True, "Input/output error; send it to another place"),
        (errno.EDQUOT, True, "Disk quota exceeded; free some space, or send it to another place"),
    ],
)
@pytest.mark.parametrize("result", [False, True])
def test_a_reader_that_is_gone_is_nothing_to_tell(number, is_file, told, result, monkeypatch):
    said = told and f"standard output: cannot be written: {told}"
    fails = pytest.raises(StorageError, match=f"^{said}$") if told and result else contextlib.nullcontext()
    with tempfile.TemporaryFile() if is_file else open("/dev/zero", "r+b", buffering=0) as behind:
        monkeypatch.setattr(sys, "stdout", Failing(number, behind))
        with fails:
            console.Display(result=result).line("x")
        monkeypatch.undo()
    assert console.take_lost() == ("" if result else said)
    assert console.take_lost() == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_cut_short_is_no_success(unbuffered, tmp_path):
    """Python's own streams take a write that was cut short for a whole one with PYTHONUNBUFFERED."""
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "trew", "--help"], stdout=out, stderr=subprocess.PIPE, text=True, timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)),
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "trew: standard output: cannot be written: File too large; send it to another place\n"


def test_a_stream_of_a_caller_stays_the_caller_s(monkeypatch):
    with tempfile.TemporaryFile(buffering=0) as behind:
        stream = io.TextIOWrapper(behind, encoding="utf-8", write_through=True)
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert sys.stdout is stream
        monkeypatch.undo()
        gc.collect()
        assert not behind.closed
        assert behind.seek(0) == 0
        assert behind.read().startswith(b"trew")


def test_the_process_s_own_stream_stays_open_behind_a_caller(tmp_path):
    code = "import sys, gc; from trew.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    code += "sys.stdout = sys.__stdout__; gc.collect(); print('still here')"
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.splitlines()[1:] == ["still here"], done.stderr


def test_a_disk_that_becomes_full_is_one_message(capsys):
    with tmpfs(kilobytes=8) as small:
        assert ended(capsys, "schema", into=str(small / "out")) == (1, [FULL])


def test_a_pipe_whose_reader_has_ended_is_no_message():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trew", "--version"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "given",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}],
    ids=str,
)
def test_what_an_encoding_has_not_is_printed_as_question_marks(given):
    command = [sys.executable, "-m", "trew", "explain", "--list"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **given}, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
