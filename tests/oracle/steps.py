"""Random small optimizer steps, as ``TokenBatch.from_padded`` takes them, with everything any objective may ask for."""

from __future__ import annotations

import math
import random

import torch

F64 = torch.float64
PER_ROW = ("logprobs", "mask", "group_ids", "rewards", "advantages", "old_logprobs", "rollout_logprobs",
           "ref_logprobs", "teacher_logprobs", "entropies", "score_norms", "step_rewards", "turns", "states", "correct",
           "truncated", "baselines", "values")  # fmt: skip


def make_step(
    seed: int = 0,
    *,
    groups: int = 3,
    size: int = 4,
    width: int = 5,
    off_policy: float = 0.3,
    mismatch: float = 0.1,
    layout: str = "left",
    nan: int = 0,
    empty: int = 0,
    unmixed: int = 1,
    rewards: tuple[float, ...] = (0.0, 1.0),
    reward_functions: int = 1,
    anywhere: bool = False,
) -> dict:
    """``nan`` rewards and ``empty`` masks at random rows; the last ``unmixed`` groups get one and the same reward.

    Every other group has a right and a wrong answer that are neither NaN nor empty, unless ``anywhere``. ``layout``:
    the completions stand at the left, at the right, or with "holes" (tool output between).
    """
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width, generator=g, dtype=F64)

    rows = groups * size
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    ids = torch.arange(groups).repeat_interleave(size)
    free = [i for i in range(rows) if anywhere or i % size >= 2]
    order = [free[i] for i in torch.randperm(len(free), generator=g).tolist()]
    lengths[order[:empty]] = 0
    mask = torch.arange(width)[None] < lengths[:, None]
    if layout == "right":
        mask = mask.flip(1)
    if layout == "holes":
        mask = torch.stack([row[torch.randperm(width, generator=g)] for row in mask])
    # A policy of a few states: log-probs from -0.02 to -4; differences are kept small enough that exp stays tame.
    logprobs = -0.02 - 4 * torch.rand(rows, width, generator=g, dtype=F64) ** 2
    old = torch.clamp(logprobs + noise(off_policy), max=-0.01)
    choices = torch.tensor(rewards, dtype=F64)
    shape = (rows, reward_functions)
    R = choices[torch.randint(0, len(choices), shape, generator=g)]
    R[::size], R[1::size] = choices[-1], choices[0]
    for k in range(unmixed):
        R[(groups - 1 - k) * size : (groups - k) * size] = choices[k % len(choices)]
    R[order[-nan:] if nan else []] = math.nan
    steps = []
    for _ in range(rows):
        ends = sorted({int(e) for e in torch.randint(1, width + 1, (3,), generator=g)})
        steps.append(
            [(e, float(torch.rand((), generator=g))) for e in ends[: int(torch.randint(1, 4, (), generator=g))]]
        )
    turns, states = make_turns(seed, rows=rows, width=width)
    own = torch.Generator().manual_seed(seed + 17)  # so that the numbers of all other fields stay what they were
    teacher = logprobs.detach() + 0.5 * torch.randn(rows, width, generator=own, dtype=F64)
    critic = torch.Generator().manual_seed(seed + 1)  # of its own: the numbers of all other fields stay what they were
    return {
        "logprobs": logprobs.requires_grad_(),
        "mask": mask,
        "group_ids": ids,
        "rewards": R[:, 0] if reward_functions == 1 else R,
        "old_logprobs": old,
        "rollout_logprobs": torch.clamp(old + noise(mismatch), max=-0.005),
        "ref_logprobs": torch.clamp(logprobs.detach() + noise(0.2), max=-0.01),
        "teacher_logprobs": torch.clamp(teacher, max=-0.01),
        "entropies": 0.2 + 3 * torch.rand(rows, width, generator=g, dtype=F64),
        "truncated": torch.rand(rows, generator=g) < 0.2,
        "baselines": torch.rand(rows, generator=g, dtype=F64),
        "step_rewards": steps,
        "turns": turns,
        "states": states,
        "values": torch.randn(rows, width, generator=critic, dtype=F64),
        "max_length": width,
        "score_norms": 0.01 + torch.rand(rows, width, generator=g, dtype=F64),
    }


def make_turns(seed: int, *, rows: int, width: int) -> tuple[list, list]:
    """One to four turns of (end, reward) in each row, and the states that they began in, of which there are few."""
    draw = random.Random(seed)  # of its own: the numbers of all other fields stay what they were
    turns, states = [], []
    for _ in range(rows):
        ends = sorted({*draw.choices(range(1, width + 1), k=draw.randint(0, 3)), width})
        turns.append([(end, draw.choice([0.0, 0.25, 1.0])) for end in ends])
        states.append(["start", *(f"room {draw.randint(1, 2)}" for _ in ends[1:])])
    return turns, states


def rows_of(data: dict, rows: list[int]) -> dict:
    """The step that consists of these rows only."""
    out = dict(data)
    for name in PER_ROW:
        value = data.get(name)
        if isinstance(value, list):
            out[name] = [value[i] for i in rows]
        elif value is not None:
            out[name] = value[rows]
    return out


def fresh(data: dict) -> dict:
    """A copy whose log-probs are a new leaf."""
    return data | {"logprobs": data["logprobs"].detach().clone().requires_grad_()}


def step_for(name: str, seed: int = 0, **choices) -> dict:
    """A random step that suits the preset: advantages where they must be given, several rewards where it takes them."""
    if name == "gdpo":
        choices = {"reward_functions": 2} | choices
    size = choices.get("size", 4)
    if name == "pass-at-k" and not choices.get("anywhere"):  # k = 4 of 4 tells nothing apart
        choices["size"] = max(size, 6)
    if name == "cppo" and choices.get("anywhere"):  # two z-scores are equally large: which one goes is arbitrary
        choices |= {"size": max(size, 3), "nan": 0}
    data = make_step(seed, **choices)
    if name == "ppo-clip":
        g = torch.Generator().manual_seed(seed + 1)
        shape = data["logprobs"].shape
        data["advantages"] = torch.randn(shape, generator=g, dtype=F64)
        del data["rewards"]
    if name == "cppo":  # no ties in |A| where the pruning cuts
        g = torch.Generator().manual_seed(seed + 2)
        data["rewards"] = data["rewards"] + torch.rand(data["rewards"].shape, generator=g, dtype=F64)
    if name == "grpo-passk":  # two best answers lead by nothing: rewards differ in all groups that are mixed
        g = torch.Generator().manual_seed(seed + 2)
        for group in data["group_ids"].unique():
            own = data["group_ids"] == group
            rewards = data["rewards"][own]
            if len(rewards[~rewards.isnan()].unique()) > 1:
                data["rewards"][own] = rewards + 0.1 * torch.rand(rewards.shape, generator=g, dtype=F64)
    return data
