"""Iterative training in rounds: trains the policy on the learned reward, then the reward model on new completions.

DeepSeekMath, arXiv 2402.03300, §4.1.4. Round 0 trains the first reward model on the untrained policy's completions.
Every later round

    1. trains the policy for ``steps`` with the reward model as reward; the reference is the policy at its start
    2. samples completions of fresh prompts from the new policy, which the verifier ranks into pairs
    3. continues training the reward model on these pairs and a share ``replay`` of earlier ones

The verifier runs next to the learned reward with weight 0: it measures, and never affects the policy.

    out/config.toml  data.json  rounds.jsonl  summary.json  report.html
        round-01/policy/  fresh/rollouts/  pairs.jsonl  held.jsonl  training.jsonl  reward/
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from ..config import Config, RewardConfig
from ..data import prompt_order
from ..distributed import launch
from ..errors import ConfigError, DataError, Problems, StorageError
from ..models import backends, files, loading
from ..reward_training import Pair, read_pairs, train_reward, write_pairs
from ..reward_training.data import encode
from ..reward_training.packed import best
from ..reward_training.pairs import divide, pairs_of_groups
from ..reward_training.program import measure
from ..reward_training.settings import PairData
from ..rewards import RewardSet
from ..rewards.model.scorer import Encoder, Scorer
from ..rollout.generate import generate
from ..rollout.sync import keyed_sampling
from ..rollout.torch_engine import TorchEngine
from ..runs import RunFolder, problems, trackers
from ..runs.files import storage, write_atomic
from ..runs.rollouts import write_rollouts
from ..training import planning
from ..training.episodes import dataset
from ..training.start import train
from ..types import Prompt, ScoredGroup
from ..utils.console import Display
from ..utils.user_files import short_name
from .continuing import LAYOUT, go_on
from .fitting import objective_problems
from .page import write_page
from .settings import REWARD, Recipe, as_table


@dataclass
class Rounds:
    """The run's folder, its recipe and how it was started."""

    recipe: Recipe
    verifier: RewardConfig
    verifier_name: str
    folder: Path
    display: Display
    resume: bool
    allow_changes: bool

    def round(self, number: int) -> Path:
        return self.folder / f"round-{number:02d}"

    def policy(self, number: int) -> str:
        """The policy after a round; 0 is the recipe's."""
        return self.recipe.policy.model if number == 0 else str(self.round(number) / "policy" / "final")

    def reward_model(self, number: int) -> str:
        """The reward model after a round; the recipe's after round 0 if that did not train one."""
        trained = self.round(number) / "reward"
        if number == 0 and not self.first_prompts:
            return self.recipe.rounds.reward_model
        return str(trained / "final")

    @property
    def first_prompts(self) -> int:
        """The number of prompts in round 0; 0 if the recipe's ``reward_model`` already is a reward model."""
        r = self.recipe.rounds
        return r.first_prompts or (0 if is_reward_model(r.reward_model) else r.prompts)

    def position(self, number: int) -> int:
        """Where a round's training begins in the stream of prompts; no prompt is drawn twice before the data end.
        A resumed run finds the same place, in the settings and in the records of earlier rounds."""
        # Behind the prompts of the round before that made pairs.
        return self.first_prompts if number == 1 else self.fresh(number - 1) + self.recipe.rounds.prompts

    def fresh(self, number: int) -> int:
        """Where the prompts begin whose completions make a round's pairs: behind all that its training has drawn."""
        if number == 0:
            return 0
        # As recorded: dynamic sampling draws more prompts than steps take, and so do rollouts ahead of their steps.
        found = self.trained(number).get("position")
        if found is None:
            raise DataError(
                f"{self.round(number)}/policy/summary.json: does not say which prompts the round has drawn (position): "
                "an earlier version of trew wrote it; start over with --overwrite"
            )
        return int(found)

    def trained(self, number: int) -> dict[str, Any]:
        """The summary of a round's training of the policy, once that is finished."""
        return json.loads((self.round(number) / "policy" / "summary.json").read_text("utf-8"))


def is_reward_model(name: str) -> bool:
    """Whether a model's configuration says that it has a head for one score."""
    return bool(name) and loading.head(name) == "sequence"


def iterate(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    display: Display | None = None,
) -> dict[str, Any]:
    """Runs all rounds; returns the content of summary.json.

    Raises ConfigError with every problem of configuration, data and models before anything is loaded. ``resume``
    continues where the last call stopped, within a round and within a training, under other settings only with
    ``allow_changes``.
    """
    display = display or Display()
    out = recipe.policy.out
    busy = problems(out, resume=resume, overwrite=overwrite, layout=LAYOUT, settings=as_table(recipe))
    verifier, name = check(recipe, found=busy)
    with RunFolder.open(out, resume=resume, overwrite=overwrite, layout=LAYOUT) as folder:
        notes = go_on(folder, recipe, dataset(recipe.policy).fingerprint, allow=allow_changes, display=display)
        rounds = Rounds(recipe, verifier, name, folder.folder, display, resume, allow_changes)
        rows = []
        # The table and the page are rewritten after every round, so that they are complete whenever the run stops.
        for number in range(recipe.rounds.rounds + 1):
            row = one_round(rounds, number)
            if row is not None:
                rows.append(row)
                lines = "".join(json.dumps(r) + "\n" for r in rows)
                write_atomic(folder.folder / LAYOUT.rows, lambda file, lines=lines: file.write(lines.encode()))
                write_page(folder.folder / "report.html", rows, verifier=name, notes=notes)
        summary = summarize(rounds, rows)
        folder.write_summary(summary)
        for line in table(rows):
            display.line(line)
        return summary


# --------------------------------------------------------------------------------------------------------------------
# Before anything is loaded


def check(recipe: Recipe, *, found: Sequence[str] = ()) -> tuple[RewardConfig, str]:
    """Checks everything that can be checked beforehand; returns the verifier and its name in metrics."""
    problems = Problems(found)
    problems += _alone_problems(recipe)
    base = recipe.rounds.reward_model or recipe.policy.model
    # The policy's own model is checked by the plan below.
    problems += loading.check(base, kind=files.base_problems) if recipe.rounds.reward_model else []
    verifier = recipe.rounds.verifier
    named = verifier.name != ""
    rewards = (*((verifier,) if named else ()), *recipe.policy.rewards)
    plan = problems.attempt(lambda: planning.plan(_without_learned(recipe.policy, rewards)))
    if plan is not None:
        problems += objective_problems(plan.objective, plan.config.objective.preset)
    if plan is None or problems:
        raise ConfigError(problems)
    if not named:
        if recipe.policy.rewards:
            raise ConfigError(
                "iterate.verifier: none given in addition to [[rewards]]; name the reward that ranks completions, for "
                'example [iterate.verifier] name = "gsm8k"'
            )
        # Neither is named: the plan has filled in the task's own reward.
        verifier = plan.config.rewards[0]
    return verifier, RewardSet.from_config((verifier,)).names[0]


def _alone_problems(recipe: Recipe) -> list[str]:
    """What a round's training, or its pairs, would refuse only after the rounds have begun."""
    policy, rounds = recipe.policy, recipe.rounds
    found = trackers.problems(policy.track.to)
    found += launch.alone_problems(policy, "trew iterate")
    if not rounds.completions and policy.rollout.completions < 2:
        found.append(
            f"iterate.completions: got 0 with rollout.completions = {policy.rollout.completions}, accepts at least 2: "
            "pairs need two completions"
        )
    return found


def _without_learned(policy: Config, rewards: Sequence[RewardConfig]) -> Config:
    """The policy's configuration with rewards that can be checked before there is a reward model: one of them must have
    a weight other than 0."""
    if rewards and all(r.weight == 0 for r in rewards):
        rewards = (dataclasses.replace(rewards[0], weight=1.0), *rewards[1:])
    return dataclasses.replace(policy, rewards=tuple(rewards))


# --------------------------------------------------------------------------------------------------------------------
# One round


def one_round(rounds: Rounds, number: int) -> dict[str, Any] | None:
    """Runs a round and returns its figures. Each stage is skipped where its result exists already, so that a resumed
    run continues within a round."""
    folder = rounds.round(number)
    if number == 0 and not rounds.first_prompts:
        return None
    # Written last: without it, a stage of the round may be missing.
    done = folder / "round.json"
    if done.is_file():
        return json.loads(done.read_text("utf-8"))
    with storage(folder):
        folder.mkdir(exist_ok=True)
    rounds.display.line(f"\n=== round {number} of {rounds.recipe.rounds.rounds}")
    row: dict[str, Any] = {"round": number, "verifier": rounds.verifier_name}
    with _seconds(folder / "seconds.json") as seconds:
        if number:
            row["policy"] = train_policy(rounds, number)
        sample_pairs(rounds, number)
        row["unjudged"] = _unjudged(folder)
        row |= train_reward_model(rounds, number)
        row["seconds"] = seconds()
        write_atomic(done, lambda file: file.write((json.dumps(row, indent=2) + "\n").encode()))
    return row


@contextlib.contextmanager
def _seconds(file: Path) -> Iterator[Callable[[], float]]:
    """Yields what gives the seconds in the block so far, with those of earlier calls that did not reach its end: an
    interrupted round keeps them in ``file``."""
    earlier, start = json.loads(file.read_text("utf-8")) if file.is_file() else 0.0, time.monotonic()

    def passed() -> float:
        return earlier + time.monotonic() - start

    try:
        yield passed
    except BaseException:
        # A full disk may be why the block has ended: its error must reach the caller.
        with contextlib.suppress(StorageError, OSError):
            write_atomic(file, lambda out: out.write(json.dumps(passed()).encode()))
        raise
    file.unlink(missing_ok=True)


def train_policy(rounds: Rounds, number: int) -> dict[str, Any]:
    """Trains the policy for a round on the reward model of the previous round."""
    recipe, out = rounds.recipe, rounds.round(number) / "policy"
    learned = RewardConfig(
        name=REWARD, model=rounds.reward_model(number - 1), weight=recipe.rounds.weight, args=recipe.rounds.args
    )
    # Weight 0: it is computed and recorded, and adds nothing to the reward.
    measured = dataclasses.replace(rounds.verifier, weight=0.0)
    first = number == 1  # later models are trew's own exports, with tokenizer and template inside
    config = dataclasses.replace(
        recipe.policy,
        model=rounds.policy(number - 1), out=str(out), rewards=(measured, learned, *recipe.policy.rewards),
        tokenizer=recipe.policy.tokenizer if first else "", chat_template=recipe.policy.chat_template if first else "",
        eval=dataclasses.replace(recipe.policy.eval, correct_reward=rounds.verifier_name),
    )  # fmt: skip
    if (out / "summary.json").is_file():
        summary = rounds.trained(number)
    else:
        # A resumed run may not have begun this training yet.
        summary = train(
            config, resume=rounds.resume and out.exists(), allow_changes=rounds.allow_changes, display=rounds.display,
            position=rounds.position(number),
        )  # fmt: skip
    gc.collect()  # model and optimizer may be in reference cycles, and the next stage loads a model again
    learned_curve = _learned_curve(out)
    return {
        "accuracy_before": summary["accuracy_before"], "accuracy_after": summary["accuracy_after"],
        "n_eval": summary["n_eval"], "reward_first": learned_curve[0], "reward_last": learned_curve[-1],
    }  # fmt: skip


def _learned_curve(run: Path) -> list[float | None]:
    """The mean learned reward at each step of a policy's training."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row[f"reward/{REWARD}"] for row in rows if row.get(f"reward/{REWARD}") is not None] or [None]


def sample_pairs(rounds: Rounds, number: int) -> None:
    """Samples the policy after this round on fresh prompts, and writes pairs ranked by the verifier to pairs.jsonl and
    held.jsonl."""
    folder, r, seed = rounds.round(number), rounds.recipe.rounds, rounds.recipe.policy.seed
    # Both: a run that stopped between the two makes its pairs again.
    if (folder / "held.jsonl").is_file() and (folder / "pairs.jsonl").is_file():
        return
    scored = _fresh_completions(rounds, number)
    with storage(folder):
        (folder / "fresh" / "rollouts").mkdir(parents=True, exist_ok=True)
    write_rollouts(folder / "fresh" / "rollouts" / "000001.parquet", scored, step=1)
    pairs = pairs_of_groups(scored, reward=rounds.verifier_name, most=r.pairs_per_prompt, seed=seed + number)
    train_pairs, held = _split(rounds, number, pairs)
    if not train_pairs or not held:
        raise DataError(
            f"{folder}: {len(pairs)} pairs of {len({p.key for p in pairs})} prompts were found in {len(scored)} x "
            f"{len(scored[0].scores)} completions, too few to train a reward model and to measure it: the verifier "
            "must judge some completions of a prompt right and others wrong; raise iterate.prompts or "
            "rollout.temperature, or take easier or harder prompts"
        )
    write_pairs(folder / "pairs.jsonl", train_pairs)
    write_pairs(folder / "held.jsonl", held)
    gc.collect()


def _split(rounds: Rounds, number: int, pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Divides pairs into training and held-out ones."""
    train, held = divide(pairs, share=rounds.recipe.rounds.held_out, seed=rounds.recipe.policy.seed)
    # A prompt of an earlier round stays on its side; otherwise held-out pairs would measure what was trained on.
    old_train = {p.key for n in range(number) for p in history(rounds, n, "pairs.jsonl")}
    old_held = {p.key for n in range(number) for p in history(rounds, n, "held.jsonl")}
    return [p for p in train if p.key not in old_held], [p for p in held if p.key not in old_train]


def _fresh_completions(rounds: Rounds, number: int) -> list[ScoredGroup]:
    """Completions of unseen prompts by the policy after this round, scored by the verifier."""
    r, policy = rounds.recipe.rounds, rounds.recipe.policy
    first = number == 0
    config = dataclasses.replace(
        policy, model=rounds.policy(number), rewards=(dataclasses.replace(rounds.verifier, weight=1.0),),
        tokenizer=policy.tokenizer if first else "", chat_template=policy.chat_template if first else "",
    )  # fmt: skip
    plan = planning.plan(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    model, _ = planning.load(plan)
    autocast = torch.bfloat16 if config.learner.dtype == "bfloat16" else None
    backend = backends.of(config, plan.device)
    engine = TorchEngine(model, plan.renderer, batch=config.rollout.batch, autocast=autocast, backend=backend)
    count = r.prompts if number else rounds.first_prompts
    stream = prompt_order(policy, plan.train)
    prompts = _with_own_uids([plan.train[index] for index in stream.take(rounds.fresh(number), count)])
    completions = r.completions or policy.rollout.completions
    with rounds.display.bar("sampling for pairs", count * completions) as bar:
        how = keyed_sampling(config, f"pairs:{number}")
        groups = generate(engine, prompts, n=completions, sampling=how, progress=bar.advance)
    scored = plan.rewards.score(groups)
    for text in plan.rewards.take_warnings():
        rounds.display.warn(f"round {number}: {text}")
    return scored


def _unjudged(folder: Path) -> int:
    """How many of a round's fresh completions the verifier could not judge: no pair is made of them."""
    return pq.read_table(folder / "fresh" / "rollouts" / "000001.parquet", columns=["score"])["score"].null_count


def _with_own_uids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Gives repeated prompts distinct uids: the uid seeds the sampling, and equal completions would make no pairs."""
    seen: dict[str, int] = {}
    out = []
    for prompt in prompts:
        seen[prompt.uid] = again = seen.get(prompt.uid, 0) + 1
        out.append(prompt if again == 1 else dataclasses.replace(prompt, uid=f"{prompt.uid}~{again}"))
    return out


def history(rounds: Rounds, number: int, name: str) -> list[Pair]:
    """The pairs that a round made itself, without replayed ones; empty if it made none."""
    path = rounds.round(number) / name
    return read_pairs(path) if path.is_file() else []


def replayed(pairs: Sequence[Pair], *, fresh: int, share: float, seed: int) -> list[Pair]:
    """Draws pairs without replacement, as many as make up ``share`` of the total together with ``fresh`` new ones.

    >>> from ..reward_training.pairs import make_pair
    >>> old = [make_pair(str(i), chosen="a", rejected="b") for i in range(50)]
    >>> len(replayed(old, fresh=90, share=0.1, seed=0)), len(replayed(old[:3], fresh=90, share=0.1, seed=0))
    (10, 3)
    """
    # old / (old + fresh) = share, solved for old
    count = min(round(fresh * share / (1 - share)), len(pairs))
    at = np.random.default_rng(seed).choice(len(pairs), size=count, replace=False) if count else []
    return [pairs[i] for i in sorted(at)]


def train_reward_model(rounds: Rounds, number: int) -> dict[str, Any]:
    """Continues training the reward model on this round's pairs and some earlier ones. Returns its agreement with the
    verifier on held-out pairs of this round, before and after."""
    recipe, folder = rounds.recipe, rounds.round(number)
    fresh, out = read_pairs(folder / "pairs.jsonl"), folder / "reward"
    # From the model of the round before; in round 0 from the recipe's.
    base = recipe.rounds.reward_model or recipe.policy.model
    if number:
        base = rounds.reward_model(number - 1)
    old = [p for n in range(number) for p in history(rounds, n, "pairs.jsonl")]
    again = replayed(old, fresh=len(fresh), share=recipe.rounds.replay, seed=recipe.policy.seed + number)
    # The same draws on a resume, and so the same file: a training that goes on must find the pairs that it began with.
    write_pairs(folder / "training.jsonl", [*fresh, *again])
    settings = recipe.reward_training(
        number, model=base, pairs=folder / "training.jsonl", held=folder / "held.jsonl", out=out
    )
    if (out / "summary.json").is_file():
        summary = json.loads((out / "summary.json").read_text("utf-8"))
    else:
        summary = train_reward(
            settings, resume=rounds.resume and out.exists(), allow_changes=rounds.allow_changes, display=rounds.display
        )
    gc.collect()
    # Too long ones are left out of the training.
    row = {"pairs": len(fresh), "replayed": len(again), "trained_pairs": summary["pairs"],
           "held_pairs": summary["before"]["pairs"]}  # fmt: skip
    row |= {f"reward_{when}": {k: summary[when][k] for k in ("accuracy", "auc")} for when in ("before", "after")}
    if number:  # shows whether it forgets: agreement on the held-out pairs of all earlier rounds
        earlier = [p for n in range(number) for p in history(rounds, n, "held.jsonl")]
        found = _measure(out / "final", earlier, recipe=recipe)
        row["reward_on_history"] = {k: found[k] for k in ("accuracy", "auc", "pairs")}
    return row


def _measure(model: Path, pairs: Sequence[Pair], *, recipe: Recipe) -> dict[str, Any]:
    """A reward model's agreement with pairs."""
    encoder = Encoder.load(str(model))
    encoded, _ = encode(
        pairs, encoder, limit=loading.positions(str(model)), config=PairData(overlong="drop"), what="old"
    )
    scorer = Scorer(loading.load_scorer(str(model), device=loading.resolve_device(recipe.policy.device)), encoder)
    backend = backends.find(str(scorer.model.device), layers=recipe.kernels == "auto", products=False)
    runner, _ = best(scorer, encoded, backend=backend)  # the note was shown when the model was trained
    return measure(runner, encoded)


# --------------------------------------------------------------------------------------------------------------------
# What came of it


def summarize(rounds: Rounds, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The content of summary.json: accuracy before the first round and after the last one, and every round's row."""
    trained = [row["policy"] for row in rows if "policy" in row]
    c = rounds.recipe.policy
    return {
        "task": c.task, "model": c.model, "objective": short_name(c.objective.preset), "seed": c.seed,
        "verifier": rounds.verifier_name, "rounds": len(trained), "n_eval": trained[-1]["n_eval"],
        "accuracy_before": trained[0]["accuracy_before"], "accuracy_after": trained[-1]["accuracy_after"],
        "auc": rows[-1]["reward_after"]["auc"], "seconds": sum(row["seconds"] for row in rows),
        "policy": rounds.policy(len(trained)), "reward_model": rounds.reward_model(len(trained)), "rows": list(rows),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rounds as a table in plain text."""
    out = ["", f"{'round':>5}  {'policy, by the verifier':>24}  {'reward model: AUC before':>26}  {'after':>24}"]
    for row in rows:
        a = row.get("policy", {}).get("accuracy_after")
        accuracy = f"{a['mean']:.3f} ({a['low']:.3f} to {a['high']:.3f})" if a and a["mean"] is not None else "-"
        u, v = row["reward_before"]["auc"], row["reward_after"]["auc"]
        out.append(
            f"{row['round']:>5}  {accuracy:>24}  {_interval(u):>26}  {_interval(v):>24}"
        )  # fmt: skip
    return out


def _interval(i: dict[str, float]) -> str:
    return f"{i['mean']:.3f} ({i['low']:.3f} to {i['high']:.3f})"
