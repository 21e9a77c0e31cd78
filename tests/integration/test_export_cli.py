"""``trew export model``: the model, its card with figures and recipe, and the upload to a hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

import tiny
from hub_stand_in import TOKEN, Hub
from recipe_help import ODD, metrics
from recipe_help import recipe as recipe_of
from trew.cli.main import main
from trew.config import load

HOSTILE = "<script>alert(1)</script> `x` | [a](javascript:1)"
SYSTEM = f"{HOSTILE}\n# {TOKEN}"


@pytest.fixture(scope="module")
def place(tmp_path_factory, server) -> Path:
    """A run of a model whose card names its licence, with a system message that is markup and has a secret."""
    folder = tmp_path_factory.mktemp("export")
    (tiny.save(folder / "lm") / "README.md").write_text("---\nlicense: bsd-3-clause\ntags: [x]\n---\n# lm\n")
    (folder / "reward.py").write_text(ODD)
    (folder / "r.toml").write_text(
        recipe_of(
            str(folder / "lm"), reward=f"{folder}/reward.py:odd", steps=2, checkpoint={"every": 1},
            data={"args": {"system": SYSTEM}}, eval={"size": 5, "every": 1},
        )
    )  # fmt: skip
    server.run("train", "r.toml", "--out", "run", cwd=folder)
    return folder


@pytest.fixture
def cli(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def call(*args: str | Path, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["export", "model", *map(str, args)])
        printed = "".join(capsys.readouterr())
        assert left.value.code == code, printed
        return printed

    return call


@pytest.fixture
def hub(monkeypatch):
    with Hub() as found:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.url)
        yield found


def test_the_card_has_the_runs_figures_recipe_and_licence(place, cli, tmp_path):
    cli(place / "run", "--out", "mine", "--step", 1)
    loaded = ModelCard.load(tmp_path / "mine" / "README.md")
    assert loaded.data.license == "bsd-3-clause"
    assert loaded.data.library_name == "transformers"
    assert loaded.data.base_model is None  # a folder is no name on the hub
    rows = {row["step"]: row for row in metrics(place / "run") if "eval_accuracy" in row}
    text = loaded.text
    for step, what in ((0, "before training"), (1, r"this model \(step 1\)")):
        row = rows[step]
        figures = f"{row['eval_accuracy']:.3f} | {row['eval_low']:.3f} to {row['eval_high']:.3f} | 5 |"
        assert re.search(rf"^\| {what} \| {re.escape(figures)}$", text, re.M), text
    [recipe] = re.findall(r"^```toml\n(.*?)^```$", text, re.M | re.S)
    (tmp_path / "again.toml").write_text(recipe.replace('"lm"', f'"{place}/lm"').replace("[redacted]", TOKEN))
    (tmp_path / "reward.py").write_text(ODD)
    own, again = load(place / "run" / "config.toml"), load(tmp_path / "again.toml")
    for section in ("data", "rollout", "objective", "learner", "lora", "eval", "steps", "seed"):
        assert getattr(again, section) == getattr(own, section), section
    assert "C_t = share_t" in text


def test_markup_paths_and_secrets_stay_out(place, cli, tmp_path):
    cli(place / "run", "--out", "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    assert TOKEN not in text
    assert str(place) not in text
    assert "<script>" in text  # only inside the block of the recipe
    outside = re.sub(r"^```toml\n.*?^```$", "", text, flags=re.M | re.S)
    assert "<script>" not in outside
    assert "reward.py:odd" in outside


@pytest.mark.parametrize("name", ["a `b` [c](d) *e* <f>", "x: y\n---\nlicense: mit", "# h"])
def test_a_name_is_text_in_header_and_title(place, cli, tmp_path, name):
    cli(place / "run", "--out", name, "--license", "apache-2.0")
    text = (tmp_path / name / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    assert yaml.safe_load(header)["license"] == "apache-2.0"
    assert yaml.safe_load(header)["model-index"][0]["name"] == " ".join(name.split())
    title = body.strip().splitlines()[0]
    assert title.startswith("# ")
    assert not re.search(r"(?<!\\)[`\[*<]", title)


def test_an_unknown_licence_is_said(place, cli, tmp_path):
    (place / "lm" / "README.md").rename(place / "lm" / "kept")
    try:
        cli(place / "run", "--out", "mine")
    finally:
        (place / "lm" / "kept").rename(place / "lm" / "README.md")
    text = (tmp_path / "mine" / "README.md").read_text()
    assert "Licence unknown: check" in text
    assert "license:" not in text


def test_an_upload_is_the_folder_and_private(place, cli, tmp_path, hub):
    printed = cli(place / "run", "--out", "mine", "--push", "adder")
    assert f"uploaded: {hub.url}/ada/adder" in printed
    assert hub.repos["ada/adder"]["private"] is True
    files = {
        str(p.relative_to(tmp_path / "mine")): p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()
    }
    sent = hub.repos["ada/adder"]["files"]
    assert {name: sent[name] for name in files} == files
    assert not {name for name in sent if name not in files} - {".gitattributes"}
    assert sent["README.md"].startswith(b"---")
    assert "# adder" in sent["README.md"].decode()


def test_a_public_upload_is_asked_for(place, cli, hub):
    cli(place / "run", "--out", "mine", "--push", "ada/open", "--public")
    assert hub.repos["ada/open"]["private"] is False
    said = cli(place / "run", "--out", "other", "--push", "ada/open", code=2)
    assert "ada/open exists and is public" in said
    assert not Path("other").exists()


def test_what_cannot_be_uploaded_is_said_before_anything_is_written(place, cli, hub, monkeypatch):
    assert "accepts NAME or OWNER/NAME" in cli(place / "run", "--out", "mine", "--push", "a/b/c", code=2)
    assert "--public: is for --push" in cli(place / "run", "--out", "mine", "--public", code=2)
    assert "--license: got 'My Own'" in cli(place / "run", "--out", "mine", "--license", "My Own", code=2)
    assert hub.asked == []
    monkeypatch.setenv("HF_TOKEN", "hf_wrong0000000000000")
    assert "refuses the token (HTTP 401)" in cli(place / "run", "--out", "mine", "--push", "adder", code=2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "switched off by HF_HUB_OFFLINE" in cli(place / "run", "--out", "mine", "--push", "adder", code=2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in cli(place / "run", "--out", "mine", "--push", "adder", code=1)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "hf auth login" in cli(place / "run", "--out", "mine", "--push", "adder", code=2)
    assert not Path("mine").exists()


def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_go_on(place, cli, hub):
    hub.fails = "/commit/"
    said = cli(place / "run", "--out", "mine", "--push", "adder", code=1)
    assert "mine is complete, but was not uploaded: the hub answers HTTP 507" in said
    assert said.endswith("try again: hf upload adder mine --private\n")
    assert Path("mine/model.safetensors").exists()
    said = cli(place / "run", "--out", "my own", "--push", "open", "--public", code=1)
    assert said.endswith("try again: hf upload open 'my own'\n")
