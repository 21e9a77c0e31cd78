"""``trew chat`` as a real process: one question, a terminal with Ctrl-C and Ctrl-D, runs beside their first model."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from forks import Server
from recipe_help import ODD
from recipe_help import recipe as recipe_of
from terminals import Terminal
from trew.cli.chosen_model import choose
from trew.models import loading
from trew.rollout import Renderer
from trew.rollout.conversation import PASS_S, UID
from trew.rollout.generate import generate
from trew.rollout.torch_engine import TorchEngine
from trew.runs.report.text import visible
from trew.types import Prompt, Sampling

SHORT = ("--max-tokens", "12", "--temperature", "1")
PASS = "trew.rollout.torch_engine.decode:Schedule.advance"


@pytest.fixture(scope="module")
def place(tmp_path_factory, server) -> Path:
    """A folder with a chat model, and a run that trained adapters on it: two steps, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.save(folder / "lm", "smollm")
    (folder / "reward.py").write_text(ODD)
    (folder / "r.toml").write_text(
        recipe_of(
            "lm", steps=2, lora={"rank": 4}, checkpoint={"every": 1}, data={"args": {"system": "You add."}},
            rollout={"temperature": 0.9, "top_p": 0.8}, learner={"lr": 0.5}, eval={"size": 2},
        )
    )  # fmt: skip
    server.run("train", "r.toml", "--out", "run", cwd=folder)
    return folder


def expected(model: Path, question: str, sampling: Sampling, system: str = "") -> str:
    """What the library's own generate answers."""
    renderer = Renderer(loading.load_tokenizer(str(model)))
    engine = TorchEngine(loading.load_model(str(model)), renderer)
    messages = ({"role": "user", "content": question},)
    if system:
        messages = ({"role": "system", "content": system}, *messages)
    [group] = generate(engine, [Prompt(UID, messages=messages)], n=1, sampling=sampling)
    return group.rollouts[0].text


def answers(server: Server, place: Path, *args: str | Path) -> dict:
    return json.loads(server.run("chat", *args, "--json", cwd=place))


def test_a_base_model_may_have_any_name(place):
    assert choose(str(place / "run"), step=None, base="models/\U0001f600", chat_template="").base == "models/\U0001f600"


# ------------------------------------------------------------------------------------------------------- one question


def test_a_question_is_answered_as_generate_answers_it(server, place):
    printed = server.run("chat", "lm", "What is 7 + 5?", "--seed", "3", *SHORT, cwd=place)
    want = expected(place / "lm", "What is 7 + 5?", Sampling(max_tokens=12, seed=3))
    assert printed.startswith(f"{want}\n")


def test_what_is_piped_in_is_the_question(server, place):
    (place / "question").write_text("What is 7 + 5?\n")
    asked = server.run("chat", "lm", *SHORT, cwd=place, stdin=str(place / "question"))
    assert asked == server.run("chat", "lm", "What is 7 + 5?", *SHORT, cwd=place)


def test_a_run_is_talked_to_as_it_was_trained(server, place):
    """Its system message, temperature and stop strings; final/ and the newest checkpoint are the same model."""
    made = answers(server, place, "run", "What is 7 + 5?", "--max-tokens", "12")
    sampling = Sampling(max_tokens=12, temperature=0.9, top_p=0.8)
    assert made["answer"]["text"] == expected(place / "run" / "final", "What is 7 + 5?", sampling, "You add.")
    assert made["system"] == "You add."
    texts = [answers(server, place, *which, "What is 7 + 5?", "--max-tokens", "12")["answer"]["text"] for which in (
        ["run/final"], ["run/checkpoints/000002"], ["run", "--step", "2"]
    )]  # fmt: skip
    assert texts == [made["answer"]["text"]] * 3
    earlier = answers(server, place, "run", "What is 7 + 5?", "--step", "1", "--max-tokens", "12")
    assert earlier["answer"]["text"] != made["answer"]["text"]


def with_messages(place: Path, name: str, messages: list[str | None], settings: str = "") -> Path:
    """A copy of the run whose newest rollouts have these messages as their prompts."""
    run = shutil.copytree(place / "run", place / name)
    table = pq.read_table(path := run / "rollouts" / "000002.parquet")
    column = pa.array([messages[i % len(messages)] for i in range(len(table))], pa.string())
    pq.write_table(table.set_column(table.schema.get_field_index("messages"), "messages", column), path)
    text = (
        (run / "config.toml").read_text().replace('system = "You add."', 'system = ""').replace("tools = []", settings)
    )
    (run / "config.toml").write_text(text)
    return run


def asked(*system: str) -> list[str]:
    return [json.dumps([*({"role": "system", "content": s} for s in system), {"role": "user", "content": "Hi"}])]


def test_what_a_run_had_and_a_conversation_has_not_is_told(server, place):
    """Rows may bring their system messages, prompts may be plain text, and an episode has tools."""
    ask = ("What is 7 + 5?", "--max-tokens", "3", "--json")
    run = with_messages(place, "shared", asked("You are a pirate."), 'tools = ["calculator"]')
    said = server.run("chat", run, *ask, cwd=place)
    assert '"system": "You are a pirate."' in said
    assert "note: the run was trained in episodes with the tool calculator, which is not there" in said
    various = with_messages(place, "various", [*asked("You are a pirate."), *asked("You add."), *asked()])
    said = server.run("chat", various, *ask, cwd=place)
    assert '"system": ""' in said
    assert "note: the run's prompts had at least 3 system messages, and none is used here; --system gives one" in said
    assert "note:" not in server.run("chat", various, *ask, "--system", "You add.", cwd=place)
    plain = with_messages(place, "plain", [None])
    assert "note: the run's prompts were plain text" in server.run("chat", plain, *ask, cwd=place)
    assert "note:" not in server.run("chat", plain, *ask, "--chat-template", "plain", cwd=place)
    (plain / "rollouts" / "000002.parquet").write_bytes(b"")  # unfinished: the one before it
    assert "note:" not in server.run("chat", plain, *ask, cwd=place)


def test_adapters_are_merged_into_their_model(server, place):
    greedy = ("What is 7 + 5?", "--system", "You add.", "--max-tokens", "12", "--temperature", "0", "--top-p", "1")
    own = answers(server, place, "run/final/adapter", *greedy, "--before")
    run = answers(server, place, "run", *greedy, "--before")
    assert own["after"]["text"] == run["after"]["text"]
    assert own["before"]["text"] == run["before"]["text"] != run["after"]["text"]
    assert run["before"]["model"] == "lm"


def test_before_and_after_follow_each_other_without_a_terminal(server, place):
    printed = server.run("chat", "run", "hi", "--before", *SHORT, cwd=place)
    assert printed.index("--- before: lm\n") < printed.index("--- after: run\n")


REFUSED = {
    "nowhere/ hi": "no such folder: nowhere/",
    "lm hi --temperature -1": "--temperature: got -1.0, accepts 0 (greedy), or at least 1e-06",
    "lm hi --top-p 0": "--top-p: got 0.0, accepts",
    "lm hi --max-tokens 0": "--max-tokens: got 0, accepts",
    "lm hi --seed -1": "--seed: got -1, accepts",
    "lm hi --device tpu": "device: got 'tpu'",
    "lm hi --before": "--before: lm does not say what it was trained from; name that model with --base",
    "lm hi --step 3": "--step: got 3, but lm is not the folder of a run",
    "run hi --step 9": "has no checkpoint of step 9; there are: 1, 2",
    "run/checkpoints/x hi": "is not a checkpoint",
    "run/checkpoints/000001 hi --step 2": "--step: got 2, but run/checkpoints/000001 is the checkpoint of step 1",
    "lm --json": "no question: standard input is empty",
    "base hi": "--chat-template plain",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_done_is_said_in_one_message(server, place, line):
    if not (place / "base").exists():
        tiny.save(place / "base", chat=False)
    assert REFUSED[line] in server.run("chat", *line.split(), cwd=place, code=2)


def test_commands_that_are_piped_are_no_question(server, place):
    (place / "piped").write_text("/temperature 0\nWhat is 7 + 5?\n")
    said = server.run("chat", "lm", cwd=place, stdin=str(place / "piped"), code=2)
    assert "standard input: got the command /temperature, accepts a question" in said


def test_all_that_is_wrong_is_said_at_once(server, place):
    said = server.run("chat", "nowhere/", "hi", "--seed", "-1", "--device", "tpu", cwd=place, code=2)
    assert all(part in said for part in ("--seed", "no such folder", "device: got 'tpu'"))


# ---------------------------------------------------------------------------------------------------------- a terminal


@pytest.fixture
def typist():
    with Terminal() as found:
        yield found


def talk(server: Server, place: Path, typist: Terminal, *args: str, **more: str):
    options = {"TERM": "dumb", **more}
    return server.start("chat", *args, cwd=place, terminal=typist.path, stdin=typist.path, **options)


def test_a_conversation_in_a_terminal(server, place, typist):
    command = talk(server, place, typist, "lm", *SHORT)
    typist.reads("you> ")
    typist.types("What is 7 + 5?\n")
    typist.reads("What is 7 + 5?\n")
    want = visible(expected(place / "lm", "What is 7 + 5?", Sampling(max_tokens=12)))
    assert want.strip() in typist.reads("tokens, ")
    typist.reads("you> ")
    typist.types('"""\na\nb\n"""\n')
    typist.reads("tokens, ")
    typist.types("/temperature hot\n/temperature 0\n/system be brief\n/rest\n/save talk.json\n/save talk.json\n")
    typist.reads("/temperature: got 'hot', accepts 0 (greedy), or at least 1e-06")
    typist.reads("temperature 0, seed 0, at most 12 tokens")
    typist.reads("a new conversation, with the system message 'be brief'")
    typist.reads("/rest is not a command (did you mean 'reset'?)")
    typist.reads("talk.json: written")
    typist.reads("/save: talk.json already exists")
    typist.types("\x03")  # at the prompt, it only begins a new line
    typist.reads("(/quit or Ctrl-D leaves)")
    typist.types("\x04")
    assert command.wait() == 0
    saved = json.loads((place / "talk.json").read_text())
    assert saved["system"] == "be brief"
    assert saved["sampling"]["temperature"] == 0
    assert saved["answer"]["messages"] == []


def test_ctrl_c_stops_the_answer_and_not_the_program(server, place, typist):
    command = talk(server, place, typist, "lm", "--max-tokens", "300", hold=f"{PASS}:2")
    typist.reads("you> ")
    typist.types("hi\n")
    command.held()
    time.sleep(2 * PASS_S)  # so that the engine hands over after this pass
    command.kill(signal.SIGINT).go()
    typist.reads("(stopped)")
    typist.reads("you> ")
    typist.types("/save stopped.json\n/quit\n")
    assert command.wait() == 0
    said = json.loads((place / "stopped.json").read_text())["answer"]["messages"]
    assert [m["role"] for m in said] == ["user", "assistant"]


@pytest.mark.parametrize(("columns", "heading"), [(80, "--- before: lm"), (160, "before: lm   ")])
def test_before_and_after_stand_side_by_side_where_there_is_room(server, place, typist, columns, heading):
    command = talk(server, place, typist, "run", "hi", "--before", *SHORT, COLUMNS=str(columns), TERM="xterm")
    assert command.wait() == 0
    assert heading in typist.text
    assert ("after: run" in next(line for line in typist.text.splitlines() if heading in line)) == (columns > 100)


def test_escapes_of_a_model_do_not_reach_the_terminal(server, place, typist):
    """A random model writes any byte."""
    command = talk(server, place, typist, "lm", "hi", "--max-tokens", "200", "--temperature", "3")
    assert command.wait() == 0
    raw = expected(place / "lm", "hi", Sampling(max_tokens=200, temperature=3))
    assert any(c in raw for c in "\x1b\x07\x0e\x00\x08\x7f")
    body = typist.text.partition("\n(")[0]
    assert visible(raw).splitlines()[-1].strip() in body
    assert not set(body) & set("\x1b\x07\x0e\x00\x08\x7f")
