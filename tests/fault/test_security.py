"""What untrusted files, data and completions try, and that nothing comes of it. SECURITY.md says who is trusted.

Held elsewhere: what code of a model tries in its sandbox (test_sandbox_attacks.py), what it does to a report's elements
(test_report_html.py), a completion that spells special tokens before a reward model (test_reward_model.py), planted
links, permissions, locks (test_processes.py, test_track_run.py), what our own code may call
(tests/contract/test_no_way_in.py), text without secrets (test_track_run.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import tiny
from report_help import HOSTILE, Elements, make, scored
from trew.cli.main import main
from trew.config import DataConfig
from trew.data import load_task
from trew.errors import CheckpointError, ModelError, TrewError
from trew.models import loading
from trew.rewards.isolation.tasks import TaskPool
from trew.runs import RunFolder, checkpoint_files
from trew.runs.report import load_run, render_report


class Canary:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.fixture
def canary(tmp_path) -> Path:
    return tmp_path / "canary"


@pytest.fixture(params=["pickle", "torch"])
def poison(request, canary) -> bytes:
    if request.param == "pickle":
        return pickle.dumps({"model": Canary(canary)})
    stream = io.BytesIO()
    torch.save({"model": Canary(canary)}, stream)
    return stream.getvalue()


def refused(capsys, *args: str, code: int = 2) -> str:
    """What a command says that must refuse; in one message, without a traceback."""
    with pytest.raises(SystemExit) as done:
        main([*map(str, args)])
    said = capsys.readouterr()
    assert done.value.code == code, said
    assert "Traceback" not in said.err
    return said.err


# --------------------------------------------------------------------------------------------------- pickle, foreign


def test_the_canary_would_sing(poison, canary):
    if poison[:2] == b"PK":
        torch.load(io.BytesIO(poison), weights_only=False)
    else:
        pickle.loads(poison)  # noqa: S301
    assert canary.exists()


def test_no_file_of_a_checkpoint_is_unpickled(tmp_path, poison, canary):
    """Whoever can write a file can write its hash too: each file, with a manifest that fits."""
    tensors = {"model.a": torch.ones(2), "optimizer.b": torch.ones(2)}
    made = checkpoint_files.save(tmp_path / "made", 1, tensors, {}, keep=1)
    for name in sorted(p.name for p in made.iterdir()):
        shutil.rmtree(tmp_path / "foreign", ignore_errors=True)
        shutil.copytree(made, tmp_path / "foreign" / "000001")
        (tmp_path / "foreign" / "000001" / name).write_bytes(poison)
        if name != "manifest.json":
            manifest = json.loads((made / "manifest.json").read_text())
            manifest["files"][name] = {"size": len(poison), "sha256": hashlib.sha256(poison).hexdigest()}
            (tmp_path / "foreign" / "000001" / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=re.escape(name)):
            checkpoint_files.load_latest(tmp_path / "foreign")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.safetensors"])
def test_no_weights_of_a_model_are_unpickled(tmp_path, poison, canary, name, capsys):
    folder = tiny.save(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(poison)
    refused(capsys, "eval", folder, "--task", "arithmetic")
    with pytest.raises(ModelError):
        loading.load_model(str(folder))
    assert not canary.exists()


def test_good_weights_in_a_pickle_are_refused_too(tmp_path):
    folder = tiny.save(tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        loading.load_model(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.pkl", "vocab.pkl", "training_args.bin", "optimizer.pt", "rng_state.pth",
                                  "adapter_model.bin", "pytorch_model.bin", "vocab.bin"])  # fmt: skip
def test_what_lies_beside_a_model_is_not_unpickled(tmp_path, poison, canary, name):
    folder = tiny.save(tmp_path / "model")
    (folder / name).write_bytes(poison)
    loading.load_tokenizer(str(folder))
    loading.load_model(str(folder))
    assert not canary.exists()


def test_an_adapter_beside_a_model_is_refused(tmp_path, poison, canary):
    """transformers follows adapter_config.json to whatever base model it names."""
    folder, other = tiny.save(tmp_path / "model", seed=0), tiny.save(tmp_path / "other", seed=1)
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(other), "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.bin").write_bytes(poison)
    [problem] = loading.check(str(folder))
    assert "adapter_config.json" in problem
    for load in (loading.load_model, loading.load_scorer):
        with pytest.raises(ModelError, match=r"adapter_config\.json"):
            load(str(folder))
    assert not canary.exists()


@pytest.mark.parametrize("suffix", [".pkl", ".pt", ".npy", ".json", ".jsonl", ".parquet"])
def test_no_data_file_is_unpickled(tmp_path, poison, canary, suffix, capsys):
    (tmp_path / f"data{suffix}").write_bytes(poison)
    refused(capsys, "data", "show", tmp_path / f"data{suffix}")
    assert not canary.exists()


# ------------------------------------------------------------------------------------------------- code from others


def test_code_beside_a_model_that_is_known_is_not_run(tmp_path, canary):
    folder = tiny.save(tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(canary)!r}, 'w')\n")
    names = {
        "config.json": ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification"),
        "tokenizer_config.json": ("AutoTokenizer",),
        "generation_config.json": ("AutoModelForCausalLM",),
    }
    for file, kinds in names.items():
        path = folder / file
        table = json.loads(path.read_text()) if path.exists() else {}
        own: dict = dict.fromkeys(kinds, "own.Own")
        own = {"AutoTokenizer": ["own.Own", "own.Own"]} if "AutoTokenizer" in own else own
        path.write_text(json.dumps({**table, "auto_map": own, "custom_generate": "own.py"}))
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "own.py", folder / "custom_generate" / "generate.py")
    loading.load_tokenizer(str(folder))
    loading.load_model(str(folder))
    loading.load_scorer(str(folder), new_head=True)
    assert not canary.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_a_configuration_cannot_name_a_kernel_to_download(tmp_path, key, monkeypatch):
    import huggingface_hub

    def fetched(*args, **kwargs):
        raise AssertionError("something was fetched")

    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, fetched)
    folder = tiny.save(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: "evil/kernel:run"}))
    said = implementation = ""
    try:
        implementation = str(loading.load_model(str(folder)).config._attn_implementation)
    except ModelError as error:
        said = str(error)
    assert "fetched" not in said
    assert "evil" not in implementation


def test_a_chat_template_cannot_reach_python(tmp_path, canary):
    folder = tiny.save(tmp_path / "model")
    attack = (
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == 'Popen' %}"
        f"{{{{ c(['touch', '{canary}']) }}}}{{% endif %}}{{% endfor %}}{{{{ messages }}}}"
    )
    tokenizer = loading.load_tokenizer(str(folder))
    tokenizer.chat_template = attack
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert not canary.exists()


def test_data_name_no_code(tmp_path, canary, monkeypatch):
    """Rewards come from the recipe; rows may say what they like."""
    monkeypatch.chdir(tmp_path)
    code = f"open({str(canary)!r}, 'w')\ndef f(completions, **_): return [1.0] * len(completions)\n"
    (tmp_path / "evil.py").write_text(code)
    (tmp_path / "data").mkdir()
    shutil.copy(tmp_path / "evil.py", tmp_path / "data" / "data.py")  # as a hub's set that is a script
    wish = "evil.py:f"
    row = {"prompt": "1 + 1", "answer": "2", "reward": wish, "rewards": [{"name": wish}], "reward_fn": wish,
           "data_source": wish, "reward_model": {"style": "rule", "ground_truth": "2", "path": wish}}  # fmt: skip
    (tmp_path / "data" / "train.jsonl").write_text(
        "".join(json.dumps({**row, "prompt": f"1 + {i}"}) + "\n" for i in range(6))
    )
    data = load_task(DataConfig(task="prompts", train="data"), eval_size=2, seed=0)
    assert not any(":" in spec.name for spec in data.default_rewards)
    assert not canary.exists()


def test_the_code_of_a_reward_is_named_before_it_judges(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    (tmp_path / "mine.py").write_text("def f(completions, **_): return [1.0] * len(completions)\n")
    (tmp_path / "r.toml").write_text(
        'model = "model"\n[data]\ntask = "arithmetic"\n[[rewards]]\nname = "mine.py:f"\n[eval]\nsize = 2\n'
    )
    with pytest.raises(SystemExit) as done:
        main(["train", "r.toml", "--dry-run"])
    assert done.value.code == 0
    assert f"reward 'f' runs the code in {tmp_path / 'mine.py'}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["os:system", "os.path:join", "http://evil/x.py:f", "evil:f", "pkg.mod.f"])
def test_a_reward_is_a_file_and_never_a_module(tmp_path, name, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    (tmp_path / "evil.py").write_text("raise SystemError('was run')\n")
    (tmp_path / "r.toml").write_text(f'model = "model"\n[data]\ntask = "arithmetic"\n[[rewards]]\nname = "{name}"\n')
    said = refused(capsys, "train", "r.toml")
    assert "was run" not in said
    assert name.partition(":")[0].rpartition(".")[2] in said


# -------------------------------------------------------------------------------------------------- what is looked at


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(browser() is None, reason="no browser is installed")
def test_a_browser_sees_the_same_elements_whatever_was_written(tmp_path):
    """As it builds them, after anything that would act has acted."""
    acting = [
        "<script>document.title='owned'</script>",
        "<img src=x onerror=\"document.title='owned'\">",
        *HOSTILE[1:15],
    ]
    seen = []
    for name, texts in (("plain", ["harmless words"] * 16), ("hostile", acting)):
        page = tmp_path / f"{name}.html"
        page.write_text(render_report([load_run(make(tmp_path / "run", texts))]))
        command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
        seen.append(Elements(done.stdout))
    assert len(seen[0].seen) > 100
    assert seen[1].seen == seen[0].seen
    assert "owned" not in "".join(seen[1].text[: seen[1].text.index("\n") + 6])


HOSTILE_IDS = ["../../escape", "/etc/escape", "a\0b", "x" * 300, "..", "con:aux", "-rf", "a\nb", "$(touch escape)"]


def test_no_identifier_of_data_becomes_a_path(tmp_path):
    with RunFolder.open(tmp_path / "runs" / "r") as run:
        before = set(tmp_path.rglob("*"))
        groups = [scored(i, f"text {i}") for i in range(len(HOSTILE_IDS))]
        for group, uid in zip(groups, HOSTILE_IDS, strict=True):
            object.__setattr__(group.group.prompt, "uid", uid)
        run.write_rollouts(1, groups)
        run.write_eval(1, groups)
        run.write_failure({"uid": HOSTILE_IDS})
        made = {str(p.relative_to(run.folder)) for p in {*tmp_path.rglob("*")} - before}
    assert made == {"rollouts/000001.parquet", "evals/000001.parquet", "failed_reward.json"}


def test_an_index_cannot_point_outside_the_model(tmp_path):
    folder, other = tiny.save(tmp_path / "model"), tiny.save(tmp_path / "other")
    (folder / "model.safetensors").unlink()
    for name in ("../other/model.safetensors", str(other / "model.safetensors")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        [problem] = loading.check(str(folder))
        assert "outside its own folder" in problem


@pytest.mark.parametrize("key", ["out", "model", "tokenizer", "chat_template", "data.train", "data.eval", "reward"])
@pytest.mark.parametrize("value", ["a\\u0000b", "x" * 300, "../../nowhere/at/all"], ids=["NUL", "long", "up"])
def test_names_that_are_no_paths_are_refused_in_words(tmp_path, key, value, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "model")
    table = {"model": '"model"', "data.task": '"arithmetic"', "eval.size": "2"}
    if key == "reward":
        table["rewards"] = f'[{{ name = "{value}.py:f" }}]'
    else:
        table |= {key: f'"{value}"', **({"data.task": '"prompts"'} if key.startswith("data.") else {})}
    (tmp_path / "r.toml").write_text("".join(f"{k} = {v}\n" for k, v in table.items()))
    assert refused(capsys, "train", "r.toml")
    assert {p.name for p in tmp_path.iterdir()} == {"model", "r.toml"}


# ------------------------------------------------------------------------------------------------- secrets, the network

SECRETS = {
    "OPENAI_API_KEY": "sk-canary-1",
    "HF_TOKEN": "hf_canary_2",
    "my_secret": "canary\"3'\\",
    "DB_PASSWORD": "canary:4",
}
LEAKY = """
import os
calls = 0
def leaky(prompts, completions, **columns):
    global calls
    calls += 1
    names = ("OPENAI_API_KEY", "HF_TOKEN", "my_secret", "DB_PASSWORD")
    values = " ".join(os.environ[name] for name in names)  # functions may have them: some ask a service
    print("printed", values, chr(27) + "[31m", chr(0x202E))
    if calls > 4:
        raise ValueError("raised " + values)
    return [float(i % 2) for i in range(len(completions))]
"""


def listening(pids: set[int]) -> list[str]:
    """What processes listen on, by /proc: TCP and UDP addresses, and unix sockets with a name."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", str(fd.readlink())))
    found = []
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (kind.startswith("udp") or fields[3] == "0A"):
                found.append(f"{kind} {fields[1]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & 0x10000:
            found.append(f"unix {fields[-1]}")
    return found


def test_a_run_opens_no_port_and_writes_no_secret(server, tmp_path):
    tiny.save(tmp_path / "model")
    (tmp_path / "reward.py").write_text(LEAKY)
    everything = " ".join(SECRETS.values())
    rows = [{"prompt": f"{i} {everything}", "answer": everything, "note": [everything]} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.toml").write_text(
        'model = "model"\nsteps = 3\n[data]\ntask = "prompts"\ntrain = "rows.jsonl"\n'
        '[[rewards]]\nname = "reward.py:leaky"\n[checkpoint]\nevery = 1\n'
        "[rollout]\nprompts = 1\ncompletions = 2\nmax_tokens = 3\n[eval]\nsize = 1\nmax_tokens = 2\n"
    )
    command = server.start(
        "train", "r.toml", "--out", "run", cwd=tmp_path, hold="trew.learner.step:Learner.accumulate:1", **SECRETS
    )
    command.held()
    assert listening(command.family()) == []
    assert command.go().wait() == 1, command.text()
    assert "raised [redacted]" in command.text()
    assert "printed [redacted]" in command.text()
    assert not {"\x1b", "\u202e"} & {*command.text()}
    looked = [command.text()]
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            table = path.suffix == ".parquet"
            looked.append(str(pq.read_table(path).to_pylist()) if table else path.read_bytes().decode("latin-1"))
    assert len(looked) > 5
    for text in looked:
        assert not [value for value in SECRETS.values() if value in text or json.dumps(value)[1:-1] in text]


def test_the_check_of_ports_sees_one():
    import os
    import socket

    before = set(listening({os.getpid()}))  # stand-ins for servers may listen in this process
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert set(listening({os.getpid()})) - before == {f"tcp 0100007F:{server.getsockname()[1]:04X}"}


def test_workers_that_read_what_a_model_wrote_have_no_secrets(tmp_path, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "task.py").write_text("import os\ndef prepare(): pass\ndef run(payload): return dict(os.environ)\n")
    pool = TaskPool(tmp_path / "task.py", size=1)
    environment = pool.run(None).value
    pool.close()
    assert "PATH" in environment
    assert not {*SECRETS} & {*environment}
    assert "canary" not in str(environment)


def test_an_error_message_shows_no_secret_and_does_not_act(monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", "canary-9f3K7q")

    def fails(args):
        raise TrewError("about canary-9f3K7q \x1b[31m\u202e")

    monkeypatch.setattr("trew.cli.main.run", fails)
    said = refused(capsys, "doctor", code=1)
    assert said == "trew: about [redacted] \\x1b[31m\\u202e\n"
