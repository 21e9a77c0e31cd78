"""The table of settings in ``trew view``."""

from pathlib import Path

from trew.reward_training.settings import RewardLearner
from trew.runs import RunFolder
from trew.view.settings import defaults
from view_help import client, get, make_run


def test_a_reward_model_is_not_measured_against_the_defaults_of_another_command(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "reward") as run:
        run.write_config('model = "none"\n[learner]\nlr = 1e-05\n')
        run.log({"step": 1, "loss": 0.5})
    make_run(tmp_path / "policy", steps=1)
    page = client(tmp_path)
    assert RewardLearner().lr == 1e-5 != defaults()["learner.lr"]
    for query in ("run=reward", "run=policy&run=reward"):
        assert not any("default" in key for key in get(page, f"config?{query}")["keys"]), query
    assert all("default" in key for key in get(page, "config?run=policy")["keys"])
