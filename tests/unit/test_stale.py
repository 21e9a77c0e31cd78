"""Rollouts that were sampled ahead, as a checkpoint keeps them."""

from trew.config import Config
from trew.objective import preset
from trew.rewards import RewardSet
from trew.rollout.source import StepRollouts
from trew.rollout.stale import StaleRollouts
from trew.types import Prompt


def test_the_metrics_of_what_was_sampled_ahead_come_back_with_it():
    """Shares of a curriculum, for example: a resumed run lacked them in its next steps."""

    def made() -> StaleRollouts:
        return StaleRollouts(
            None, config=Config(model="m"), objective=preset("grpo"), prompts=[Prompt("a", text="?")],
            rewards=RewardSet(()), correct=bool,
        )  # fmt: skip

    before, after = made(), made()
    before._ahead = {4: StepRollouts((), (), None, {"curriculum/known": 0.5})}
    after.load_state(before.state())
    assert after._ahead == before._ahead
