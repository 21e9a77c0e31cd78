"""Wrong input of every kind through the command line: the exit code, one message with the place and the way out, no
traceback, and nothing written where nothing may be.

In-process, so that hundreds are cheap; ``tests/integration`` has the same as real processes for some.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from bad_files import FILES, lines, verl
from trew import runs
from trew.cli.main import main
from trew.models.sharded import whole
from trew.runs import checkpoint_files


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    """Everything that the cases name, made once; nothing below may change it."""
    folder = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for name, rows in {
        "v_none.parquet": [{k: v for k, v in verl(i).items() if k != "reward_model"} for i in range(9)],
        "v_truth.parquet": [verl(i, reward_model={"style": "rule"}) for i in range(9)],
        "v_other.parquet": [verl(i, data_source="mine") for i in range(9)],
    }.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    _models(folder)
    return folder


def _models(folder: Path) -> None:
    good = tiny.save(folder / "model")
    tiny.save(folder / "m_nochat", chat=False)
    tiny.save(folder / "m_noend", chat=False, eos=False)
    tiny.save(folder / "m_begin", bos=True)
    large = tiny.tokenizer()
    large.add_tokens([f"<{i}>" for i in range(261)])
    large.save_pretrained(folder / "m_large")

    def broken(name: str, **config: object) -> Path:
        copy = folder / name
        shutil.copytree(good, copy)
        text = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(text | config))
        return copy

    for file in broken("m_notokens").glob("token*"):
        file.unlink()
    (broken("m_tokens") / "tokenizer.json").write_text("{")
    (broken("m_garbage") / "config.json").write_text("garbage{")
    broken("m_type", model_type="lama")
    broken("m_bert", model_type="bert", architectures=["BertForMaskedLM"])
    broken("m_code", model_type="mine", auto_map={"AutoModelForCausalLM": "x.Y"})
    broken("m_vocab", vocab_size=100)
    broken("m_word", hidden_size="big")
    broken("m_shape", hidden_size=64)
    broken("m_layers", num_hidden_layers=3)
    weights = broken("m_cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (broken("m_weightless") / "model.safetensors").unlink()
    (broken("m_pointer") / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    sharded = broken("m_shards")
    (sharded / "model.safetensors").rename(sharded / "one.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    pickled = broken("m_pickle")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    adapter = broken("m_adapter")
    (adapter / "config.json").rename(adapter / "adapter_config.json")
    broken("m_shallow", num_hidden_layers=1)
    broken("m_deep", num_hidden_layers=10**6)
    broken("m_wide", head_dim=10**9)
    (broken("m_settings") / "generation_config.json").write_text("{")
    (broken("m_end") / "generation_config.json").write_text('{"eos_token_id": 260}')
    for name, change in {
        "m_nan": lambda tensors: tensors["model.norm.weight"].fill_(float("nan")),
        "m_inf": lambda tensors: tensors["model.embed_tokens.weight"][258].fill_(float("inf")),
        "m_whole": lambda tensors: tensors.update({k: t.int() for k, t in tensors.items()}),
        "m_unread": lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
    }.items():
        path = broken(name) / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def here(origin, tmp_path, monkeypatch) -> Path:
    """A folder in which the origin's files seem to lie; what is written here is new."""
    for entry in origin.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def fails(capsys, *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    code, err = left.value.code, capsys.readouterr().err
    assert isinstance(code, int)
    return code, " ".join(err.split())


TRAIN = "train r.toml --set"
ROWS = f"{TRAIN} rewards=[{{name='format'}}] data.args={{}} eval.size=2 data.task=prompts"
GSM = f"{TRAIN} data.args={{}} eval.size=2 rewards=[] data.task=gsm8k"
VERL = f"{TRAIN} data.args={{}} eval.size=2 rewards=[{{name='gsm8k'}}] data.task=prompts"

# command line -> what the message must say; exit code 2, nothing written
REFUSED: dict[str, str] = {
    # recipes and --set
    "train": "RECIPE: is missing; give a recipe",
    "train none.toml": "none.toml: no such recipe",
    "train model": "is a folder, not a recipe",
    "train empty.toml": "model: is required",
    "train utf16.toml": "is not UTF-8 text",
    "train syntax.toml": "is not valid TOML",
    "train twice.toml": "is not valid TOML",
    "train r.yaml": "is not valid TOML: Expected '=' after a key in a key/value pair (at line 1, column 6)",
    "train no.toml": "is not valid TOML: Invalid value (at line 4, column 11); strings need quotes",
    "train digits.toml": "digits.toml: is not valid TOML: Exceeds the limit",
    "train deep.toml": "deep.toml: is not valid TOML: it is nested too deeply",
    "train string.toml": "data: expected a table, got 'x'",
    "train table.toml": "rewards: expected a list",
    "train r.toml --resum": "--resume",
    "train r.toml --resume --overwrite": "give one of them",
    f"{TRAIN}": "--set",
    f"{TRAIN} steps": "expected key=value",
    f"{TRAIN} =3": "expected key=value",
    f"{TRAIN} steps.x=3": "'steps' is not a table",
    f"{TRAIN} rolout.prompts=3": "did you mean 'rollout'?",
    f"{TRAIN} model=12": "model: expected a string, got 12",
    f"{TRAIN} steps=0": "steps: got 0",
    f"{TRAIN} steps=1e5": "steps: expected a whole number",
    f"{TRAIN} seed=-1": "seed: got -1",
    f"{TRAIN} rollout.prompts=0": "rollout.prompts: got 0",
    f"{TRAIN} learner.lr='1e-6'": "learner.lr: expected a number, got '1e-6' (str)",
    f"{TRAIN} data.shuffle=no": "data.shuffle: expected true or false, got 'no'",
    f"{TRAIN} learner.minibatch_prompts=3": "more than rollout.prompts = 2",
    f"{TRAIN} steps={'9' * 5000}": "steps: expected a whole number, got '999",
    f"{TRAIN} model={'a' * 5000}": "File name too long",
    f"{TRAIN} model=~nobody/m": "no such folder: ~nobody/m",
    f"{TRAIN} learner.lr=inf": "learner.lr: got inf",
    f"{TRAIN} learner.adam_beta1=nan": "learner.adam_beta1: got nan",
    f"{TRAIN} eval.correct_at=nan": "eval.correct_at: got nan",
    f"{TRAIN} rollout.temperature=0": "rollout.temperature: got 0",
    f"{TRAIN} rollout.stop=abc": "rollout.stop: expected a list",
    f"{TRAIN} rollout.stop=['']": "non-empty strings",
    f"{TRAIN} rollout.max_tokens=5000": "more than the 512 positions of the model; lower it to 448, or take a model",
    f"{TRAIN} eval.max_tokens=5000": "eval.max_tokens: got 5000",
    f"{TRAIN} track.to=['wandbb']": "did you mean 'wandb'?",
    f"{TRAIN} device=gpu": "device: got 'gpu'",
    f"{TRAIN} device=cuda:x": "device: got 'cuda:x'",
    f"{TRAIN} linear=onednn": "linear: got 'onednn'",
    f"{TRAIN} chat_template=none.jinja": "chat_template: no such file",
    f"{TRAIN} chat_template=bad.jinja": "the chat template refuses the messages",
    f"{TRAIN} chat_template=raises.jinja": "not this",
    f"{TRAIN} objective=dapo": "objective: expected a table",
    f"{TRAIN} objective.beta=high": "objective.beta: got 'high'",
    f"{TRAIN} objective.beta=-1": "objective.beta: got -1",
    f"{TRAIN} objective.beta=nan": "objective.beta: got nan",
    f"{TRAIN} eval.size=1000000": "lower eval.size",
    f"{TRAIN} data.args=[1]": "data.args: expected a table",
    f"{TRAIN} data.args.ops=['^']": "data.args.ops: '^'",
    f"{TRAIN} data.train=good.jsonl": "leave it empty",
    # rewards
    f"{TRAIN} rewards=['arithmetic']": "rewards[0]: expected a table",
    f"{TRAIN} rewards=[{{weight=1}}]": "rewards[0].name: is required",
    f"{TRAIN} rewards=[{{name='gsm9k'}}]": "did you mean 'gsm8k'?",
    f"{TRAIN} rewards=[{{name='arithmetic',args={{x=1}}}}]": "args.x: unknown argument",
    f"{TRAIN} rewards=[{{name='arithmetic',args=3}}]": "rewards[0].args: expected a table",
    f"{TRAIN} rewards=[{{name='reward.py:f',args={{x=1979-05-27}}}}]": "write a date as a string",
    f"{TRAIN} data.args={{x=[1979-05-27]}}": "data.args.x[0]: got datetime.date(1979, 5, 27)",
    f"{TRAIN} rewards=[{{name='reward.py:f',weight=0}}]": "every weight is 0",
    f"{TRAIN} rewards=[{{name='reward.py:f',weight=nan}}]": "weight: got nan",
    f"{TRAIN} rewards=[{{name='reward.py'}}]": "which function?",
    f"{TRAIN} rewards=[{{name='reward.py:shrt'}}]": "did you mean 'short'?",
    f"{TRAIN} rewards=[{{name='reward.py:Form'}}]": "is a class",
    f"{TRAIN} rewards=[{{name='reward.py:column'}}]": "needs column 'golden'",
    f"{TRAIN} rewards=[{{name='reward.py:plain',args={{a=1}}}}]": "has no such parameter",
    f"{TRAIN} rewards=[{{name='reward.py:bounded',args={{tolerence=1}}}}]": "did you mean 'tolerance'?",
    f"{TRAIN} rewards=[{{name='none.py:f'}}]": "no such file",
    f"{TRAIN} rewards=[{{name='syntax.py:f'}}]": "syntax.py:1: cannot be imported: SyntaxError",
    f"{TRAIN} rewards=[{{name='exits.py:f'}}]": "SystemExit: 3",
    # data
    f"{ROWS} data.train=none.jsonl": "none.jsonl: no such file",
    f"{ROWS} data.train=a/b/c": "not a hub id",
    f"{ROWS} data.train=one.jsonl": "give data.eval",
    f"{ROWS} data.train=same.jsonl": "only 1 different prompts",
    f"{ROWS} data.train=nothing.jsonl": "has no rows",
    f"{ROWS} data.train=folder": "found x.txt",
    f"{ROWS} data.train=d.csv": "got the suffix '.csv', accepts .jsonl",
    f"{ROWS} data.train=comma.jsonl": "line 2: is not valid JSON",
    f"{ROWS} data.train=latin.jsonl": "line 2: is not UTF-8 (its byte 15 is 0xe9)",
    f"{ROWS} data.train=nul.jsonl": "line 2: contains a NUL byte",
    f"{ROWS} data.train=half.jsonl": "line 2: contains a lone surrogate",
    f"{ROWS} data.train=huge.jsonl": "line 2: has 70,000,012 bytes, accepts at most 67,108,864",
    f"{ROWS} data.train=ids.jsonl": "ids.jsonl line 8: id '0' is taken by ids.jsonl line 1; ids must be unique",
    f"{ROWS} data.train=missing.jsonl": "line 2: has no column 'prompt' (did you mean 'promt'?), only 'promt', 'gold'",
    f"{ROWS} data.train=types.jsonl": "3 of 4 rows are unusable; correct or remove them: trew: types.jsonl line 2:",
    f"{ROWS} data.train=begun.jsonl model=m_begin": "starts with two begin tokens ('<|endoftext|>')",
    f"{ROWS} data.train=thought.jsonl chat_template=strip.jinja": "drops or changes the user message",
    f"{ROWS} data.train=chat.jsonl chat_template=anew.jinja": "writes a conversation differently once it is answered",
    f"{ROWS} data.train=good.jsonl data.eval=none.jsonl": "none.jsonl: no such file",
    f"{ROWS} data.train=good.jsonl data.prompt_column=promt": "did you mean 'prompt'?",
    f"{ROWS} data.train=good.jsonl data.args.chatt=true": "did you mean 'chat'?",
    f"{ROWS} data.train=good.jsonl data.args.system=x": "set data.args.chat = true",
    f"{ROWS} data.train=good.jsonl rollout.prompts=19": "only 18 training prompts",
    f"{ROWS} data.train=good.jsonl data.overlong=drop data.max_prompt_tokens=2": "leaves none",
    f"{ROWS} data.train=long.jsonl": "data.max_prompt_tokens = 1024: 'long:9' (2001)",
    f"{ROWS} data.train=chat.jsonl model=m_nochat": "set chat_template = 'plain'",
    f"{GSM} data.train=g_nohash.jsonl": "g_nohash.jsonl line 2: column 'answer' has no '####'",
    f"{GSM} data.train=g_number.jsonl": "must be a string, got 5",
    f"{GSM} data.train=g_word.jsonl": "must be a number, got 'five'",
    f"{GSM} data.train=g_names.jsonl": "no row has a column 'question'",
    f"{GSM} data.train=g.jsonl data.args.mode=lax": "data.args.mode: got 'lax'",
    f"{VERL} data.train=v_none.parquet": "applies to none of the 9 rows",
    f"{VERL} data.train=v_truth.parquet": "reward_model has no ground_truth",
    f"{VERL} data.train=v_other.parquet rewards=[]": "rewards: none given",
    f"{TRAIN} data.args={{}} data.task=countdown rewards=[] data.train=c.jsonl": "column 'target'",
    # models
    f"{TRAIN} model=./none": "no such folder",
    f"{TRAIN} model=none/here": "HF_HUB_OFFLINE",
    f"{TRAIN} model=smollm2-135m-instrct": "did you mean 'smollm2-135m-instruct'?",
    f"{TRAIN} model=./r.toml": "is a file, not a folder",
    f"{TRAIN} tokenizer=./none": "tokenizer: no such folder",
    f"{TRAIN} model=m_notokens": "tokenizer: m_notokens has none of tokenizer.json",
    f"{TRAIN} model=m_tokens": "tokenizer 'm_tokens': cannot be loaded",
    f"{TRAIN} model=m_noend chat_template=plain": "set rollout.stop",
    f"{TRAIN} model=m_garbage": "is not valid JSON",
    f"{TRAIN} model=m_type": "did you mean 'llama'?",
    f"{TRAIN} model=m_bert": "not a causal language model",
    f"{TRAIN} model=m_code": "which trew never runs",
    f"{TRAIN} model=m_vocab": "have the wrong shape for 2 of the weights",
    f"{TRAIN} tokenizer=m_large": "the tokenizer has 521 tokens, the model 260",
    f"{TRAIN} model=m_word": "expected int, got str",
    f"{TRAIN} model=m_cut": "the download is not complete",
    f"{TRAIN} model=m_weightless": "has no weights",
    f"{TRAIN} model=m_pointer": "is a Git LFS pointer, not the weights",
    f"{TRAIN} model=m_shards": "lacks 1 of 2 weight files (two.safetensors)",
    f"{TRAIN} model=m_pickle": "convert it once with save_pretrained",
    f"{TRAIN} model=m_adapter": "holds an adapter without its base model",
    f"{TRAIN} model=m_shape": "have the wrong shape for 21 of the weights that config.json asks for",
    f"{TRAIN} model=m_layers": "lack 9 of the weights that config.json asks for",
    f"{TRAIN} model=m_shallow": "(config.json has 1 layers, the files have 2)",
    f"{TRAIN} model=m_deep": "config.json has num_hidden_layers = 1000000, accepts at most 10,000",
    f"{TRAIN} model=m_wide": "config.json has head_dim = 1000000000, accepts at most 10,000,000",
    f"{TRAIN} model=m_unread": "hold 1 tensors that a model of this config.json does not read",
    f"{TRAIN} model=m_nan": "weights hold inf or nan, among them model.norm.weight",
    f"{TRAIN} model=m_inf": "weights hold inf or nan, among them model.embed_tokens.weight, row 258",
    f"{TRAIN} model=m_whole": "weights are stored as I32",
    f"{TRAIN} model=m_settings": "generation_config.json is not valid JSON",
    f"{TRAIN} model=m_end": "generation_config.json has eos_token_id 260",
    **{
        f"{command} --set model={model}" if command.startswith("plan") else f"{command.format(model)}": says
        for command in ("plan r.toml", "eval {} --task arithmetic")
        for model, says in {
            "m_shallow": "(config.json has 1 layers, the files have 2)",
            "m_unread": "does not read",
            "m_inf": "row 258",
            "m_whole": "stored as I32",
            "m_settings": "is not valid JSON",
            "m_end": "eos_token_id 260",
        }.items()
    },
    # run folders
    "train r.toml --out r.toml": "is a file, not a folder",
    "train r.toml --out r.toml/x": "is a file, not a folder",
    "train r.toml --out a/b/c/d": "does not exist",
    "train r.toml --out taken": "is not empty and not a run folder",
    "train r.toml --out taken --overwrite": "is not empty and not a run folder",
    # other commands
    "trian": "did you mean 'train'?",
    "plan none.toml": "none.toml: no such recipe",
    "plan r.toml --set steps=0": "steps: got 0",
    "plan r.toml --set model=./none": "no such folder",
    "iterate none.toml": "none.toml: no such recipe",
    "iterate r.toml --set iterate.rounds=0": "iterate.rounds: got 0",
    "iterate r.toml --set iterate.replya=0": "iterate.replya: unknown key (did you mean 'replay'?)",
    "iterate r.toml --set rollout.prompts=0": "rollout.prompts: got 0",
    "train-reward none.toml": "none.toml: no such recipe",
    "train-reward --model model --pairs good.jsonl --out o": "has no 'chosen'; a preference pair has prompt, chosen",
    "train-reward --model model --pairs none.jsonl --out o": "none.jsonl: no such file",
    "train-reward --model ./none --pairs good.jsonl --out o": "no such folder",
    "train-reward --model model --pairs good.jsonl --out o --set learner.lr=9": "learner.lr: got 9",
    "explain dapo --set eps_hgh=1": "did you mean 'eps_high'?",
    "explain dapo --ratios 2 1 --plot x.svg": "accepts two numbers from 0 to 10000",
    "demo --model none/": "no such folder: none/",
    "data show none.jsonl": "none.jsonl: no such file",
    "data show comma.jsonl": "line 2: is not valid JSON",
    "data convert none.jsonl o.jsonl": "none.jsonl: no such file",
    "rewards score gsm8k --data none.jsonl --out o.jsonl": "none.jsonl: no such file",
    "rewards test none.py:f --task prompts --data good.jsonl": "none.py: no such file",
    "eval": "Missing from trew eval",
    "eval model --task arithmetik": "did you mean 'arithmetic'?",
    "eval model --task arithmetic --size 0": "eval.size: got 0",
    "eval model --task arithmetic --size many": "--size",
    "eval model --task arithmetic --samples 3 --temperature 0": "where all samples are identical",
    "eval model --task arithmetic --temperature nan": "eval.temperature: got nan",
    # Below, float32 holds no logit that is divided by it: the answers were one token, over and over.
    "eval model --task arithmetic --temperature 1e-7": "eval.temperature: got 1e-07, accepts 0 (gr",
    "eval model --task arithmetic --max-tokens 4000": "more than the 512 positions of the model; lower it to 450",
    "eval model --task arithmetic --json taken": "is a folder",
    "eval model --task arithmetic --json none/x.json": "its folder is missing",
    "eval model --task arithmetic --json x.out --completions ./x.out": "another output of this command goes there",
    "eval model --task prompts --data one.jsonl": "give a --recipe with [[rewards]]",
    "eval model --data g_long.jsonl --max-tokens 2": "set data.max_prompt_tokens = 510 and data.overlong",
    "eval model --data g.jsonl --set data.max_prompt_tokens=3": "data.max_prompt_tokens to at least",
    "eval model --recipe none.toml": "no such recipe",
    "data prepar": "did you mean 'prepare'?",
    "data prepare math": "no such file, and reading it from the hub",
    "data prepare gsm8k --source one.jsonl": "no row has a column 'question'",
    "data prepare gsm8k --source g.jsonl --out r.toml": "r.toml/train.jsonl: cannot be written",
    "data show": "is empty; task",
    "data show good.jsonl --n 0": "--n: got 0",
    "data convert good.jsonl o.csv": "accepts a file ending in .jsonl or .parquet",
    "data convert good.jsonl good.jsonl": "already exists",
    "data convert good.jsonl r.toml/y.jsonl": "cannot be written",
    "data convert one.jsonl o.parquet --to verl": "--gold-column",
    "rewards test gsm9k --data g.jsonl": "did you mean 'gsm8k'?",
    "rewards test gsm8k": "is empty; task",
    "rewards test gsm8k --task gsm8k --data g.jsonl --set mod=x": "did you mean 'mode'?",
    "rewards score gsm8k --data s.jsonl --out s.txt": "accepts a file ending in .jsonl or .parquet",
    "rewards score gsm8k --data one.jsonl --out o.jsonl": "has no column 'completion'",
    "rewards score gsm8k --data s_number.jsonl --out o.jsonl": "must be text, messages, or a list of texts",
    "rewards score gsm8k --data s_columns.jsonl --out o.jsonl": "s_columns.jsonl line 1: column 'columns' is not JSON",
    "rewards score gsm8k --data s_ids.jsonl --out o.jsonl": "column 'token_ids' must be a list",
    "report": "give at least one run folder",
    "report none": "no such run folder",
    "report taken": "is not a run folder",
    "explain dap": "did you mean 'dapo'?",
    "explain dapo --plot taken": "taken: cannot be written: Is a directory",
    "explain --plot x.svg": "needs an objective",
    "doctor --all": "--all",
    "demo --model model --set stepz=3": "did you mean 'steps'?",
    "demo --model model --seed -1": "seed: got -1",
}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_input_is_refused_and_nothing_is_written(line, here, capsys):
    before = {p.name for p in here.iterdir()}
    code, err = fails(capsys, *line.split(" "))
    assert code == 2, err
    assert REFUSED[line] in err
    assert "Traceback" not in err
    assert {p.name for p in here.iterdir()} == before


# What only shows once the model or the reward runs: (setting, exit code, message)
LATE = [
    ("rewards=[{name='reward.py:raises'}]", 1, r"raised ValueError: red \x1b[31m and \u202e; for prompt 'arithmetic:"),
    ("rewards=[{name='reward.py:short'}]", 1, "returned 1 values for 4 completions"),
    ("rewards=[{name='reward.py:text'}]", 1, "returned str ('1.0')"),
    ("rewards=[{name='reward.py:nan'}]", 1, "rewards must be finite"),
    ("rewards=[{name='reward.py:nothing'}]", 1, "did you forget `return`?"),
    ("rewards=[{name='reward.py:leaves'}]", 1, "raised SystemExit: 3"),
    ("rewards=[{name='reward.py:later'}]", 1, "raised RuntimeError: later"),
]


@pytest.mark.parametrize(("setting", "code", "says"), LATE, ids=[s for s, *_ in LATE])
def test_what_shows_late_is_one_message_and_leaves_the_folder_free(setting, code, says, here, capsys):
    got, err = fails(capsys, "train", "r.toml", "--set", setting)
    assert got == code, err
    assert says in err
    assert "Traceback" not in err
    assert runs.problems("runs/r") == []  # nothing there that is worth keeping


def finished(here: Path, capsys, *settings: str) -> Path:
    assert fails(capsys, "train", "r.toml", "--out", "run", *(["--set", *settings] if settings else [])) == (0, "")
    return here / "run"


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_run_does_not_overwrite_what_it_is_to_go_on_from(here, capsys, more):
    """The weights were deleted first, and then looked for on the hub."""
    run = finished(here, capsys)
    kept = {p: p.stat().st_mtime_ns for p in (run / "final").rglob("*")}
    again = ("--out", "run", "--overwrite", "--set", "model=run/final", *more)
    assert fails(capsys, "train", "r.toml", *again)[0] == 2
    assert kept == {p: p.stat().st_mtime_ns for p in (run / "final").rglob("*")} != {}
    assert fails(capsys, "train", "r.toml", "--out", "other", "--overwrite", "--set", "model=run/final", *more)[0] == 0


def test_a_used_folder_is_protected_and_a_lock_respected(here, capsys):
    run = finished(here, capsys)
    kept = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert "already holds a finished run" in fails(capsys, "train", "r.toml", "--out", "run")[1]
    with (run / "run.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for flag in ("--resume", "--overwrite"):
            code, err = fails(capsys, "train", "r.toml", "--out", "run", flag)
            assert (code, "is in use by another run" in err) == (2, True)
    assert kept == {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    for content in ('{"pid": 1, "host": "gone"}', "garbage"):  # a run that died holding it
        (run / "run.lock").write_text(content)
        assert fails(capsys, "train", "r.toml", "--out", "run", "--resume") == (0, "")


@pytest.mark.parametrize("content", [b"garbage =", b"\xff"])
def test_a_damaged_configuration_does_not_continue_a_run_unchecked(content, here, capsys):
    run = finished(here, capsys)
    (run / "config.toml").write_bytes(content)
    code, err = fails(capsys, "train", "r.toml", "--out", "run", "--resume")
    assert (code, "config.toml: cannot be read" in err) == (2, True), err
    assert (run / "config.toml").read_bytes() == content


def test_damaged_checkpoints_are_named_and_the_run_is_not_started_over(here, capsys):
    run = finished(here, capsys)
    rows = (run / "metrics.jsonl").read_bytes()
    for file in (run / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(b"x")
    code, err = fails(capsys, "train", "r.toml", "--out", "run", "--resume", "--set", "steps=2")
    assert (code, "no checkpoint is usable" in err) == (2, True), err
    assert (run / "metrics.jsonl").read_bytes() == rows


def test_a_checkpoint_of_another_version_is_refused(here, capsys):
    run = finished(here, capsys)
    (step, tensors, meta), _ = checkpoint_files.load_latest(run / "checkpoints")
    meta["state"]["of_the_future"] = meta["state"].pop("tokens")
    every = {name: whole(tensor) for name, tensor in tensors.items()}
    checkpoint_files.save(run / "checkpoints", step, every, meta, keep=1)
    code, err = fails(capsys, "train", "r.toml", "--out", "run", "--resume", "--set", "steps=2")
    assert (code, "not of this version of trew" in err) == (2, True), err


def test_a_report_survives_files_that_are_not_what_they_were(here, capsys):
    run = finished(here, capsys)
    for name, content in {
        "metrics.jsonl": b'garbage\n{"step": 1, "reward": "high", "loss": [1]}\n{"step": -5, "reward": 1e400}\n',
        "config.toml": b"\xff=",
        "summary.json": b'{"before": 3, "accuracy_before": "x", "accuracy_after": {"mean": "y"}}',
    }.items():
        (run / name).write_bytes(content)
    for file in (run / "rollouts").iterdir():
        file.write_bytes(b"zzz")
    assert fails(capsys, "report", "run") == (0, "")
    assert "2 lines that are incomplete or not metrics rows" in (run / "report.html").read_text()


def test_rewards_without_any_verdict_train_nothing_and_say_so(here, capsys):
    """All None: no accuracy, no reward, no update, and no crash on the way to the tables."""
    (here / "silent.py").write_text("def f(completions, **_): return [None] * len(completions)\n")
    with pytest.raises(SystemExit) as left:
        main(["demo", "--model", "model", "--out", "run", "--set", "steps=2", "eval.size=4", "rollout.prompts=2",
              "learner.minibatch_prompts=0", f"rewards=[{{name='{here}/silent.py:f'}}]"])  # fmt: skip
    said = capsys.readouterr()
    assert left.value.code == 0, said.err
    assert "no verdicts" in said.out
    assert "No completion got a verdict" in said.out
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("policy_version") for row in rows if "reward" in row] == [0, 0]
    assert all(row["reward"] is None for row in rows if "reward" in row)


def test_an_evaluation_that_overlaps_training_and_repeated_prompts_are_told(here, capsys):
    """Allowed, but not in silence."""
    rows = [{"prompt": f"What is {i % 15}?", "gold": "1"} for i in range(20)]
    (here / "train.jsonl").write_bytes(lines(*rows))
    (here / "test.jsonl").write_bytes(lines(*rows[:4], {"prompt": "new", "gold": "1"}))
    settings = [*ROWS.split()[3:], "data.train=train.jsonl", "eval.size=5", "rewards=[{name='reward.py:f'}]"]
    with pytest.raises(SystemExit) as left:
        main(["train", "r.toml", "--dry-run", "--set", *settings])
    said = capsys.readouterr()
    assert left.value.code == 0, said.err
    assert "note: 5 of 20 training prompts are repeats of others" in said.out
    assert "note: 4 of 5 evaluation prompts are in the training data: accuracy will look too good" in said.out
