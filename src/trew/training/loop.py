"""The algorithm, top to bottom: prompts -> rollouts -> rewards -> advantages -> updates, and what is around it.

train      the whole job
collect    prompts, their completions and scores; groups without signal replaced where the objective says so
baselines  the reward of each prompt's greedy answer, where the objective compares with it
to_batch   scored groups as the tensors that the objective reads
update     inner updates over minibatches, old log-probs frozen
measure    evaluation on the held-out prompts
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import runs
from ..config import Config, dumps, to_table
from ..errors import NumericsError, RewardError
from ..eval import EvalResult, evaluate
from ..learner import Sample
from ..objective import TokenBatch, step_metrics
from ..objective.batch import Steps
from ..runs import Run, Trackers, trackers
from ..runs.report import write_report
from ..types import Prompt, Sampling, Score, ScoredGroup, StepOutput, reduce_metrics
from ..utils.console import Bar, Display
from ..utils.signals import Interrupts
from . import guards, planning, watch
from .checkpoints import begin_again, check_changes, complete, restore, save
from .job import Job, build, export, headline, summarize
from .record import advantage_share, rollout_row

ROUNDING = 1e-4
"""Nats by which two float32 computations of the same log-prob may differ."""


def train(
    config: Config,
    *,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    display: Display | None = None,
    position: int = 0,
) -> dict[str, Any]:
    """Runs the whole job that ``config`` describes; returns what is in summary.json.

    Raises ConfigError with every problem of configuration, data and model before a model is loaded. ``resume``
    continues from the newest complete checkpoint of ``config.out``, under other settings only with ``allow_changes``;
    ``overwrite`` starts over in a used folder.
    ``position`` is how many prompts of the shuffled stream a new run passes over.
    """
    display = display or Display()
    busy = [
        *runs.problems(config.out, resume=resume, overwrite=overwrite),
        *trackers.problems(config.track.to),
    ]
    plan = planning.plan(config, found=busy, bar=display.bar)
    config = plan.config
    with (
        Run.open(config.out, resume=resume, overwrite=overwrite) as run,
        warnings.catch_warnings(),
        contextlib.ExitStack() as ending,
    ):
        warnings.showwarning = lambda message, *_, **__: display.warn(str(message))
        if run.resumed:
            changes = check_changes(run.folder, config, allow=allow_changes)
            for change in changes:
                display.line(f"note: {change}")
            if (summary := complete(run, config)) is not None:
                display.line(f"note: {run.folder} is already complete: {config.steps} of {config.steps} steps")
                watch.at_end(run, display)
                return summary
        else:
            run.write_config(dumps(config))
        outside = Trackers(config.track.to, folder=run.folder, config=to_table(config), warn=display.warn)
        ending.callback(outside.close)  # however the run ends
        ending.callback(plan.rewards.close)
        interrupts = Interrupts(more=config.stop.signals, grace_s=config.stop.grace_s)
        job = build(plan, display, interrupts)
        job.state.position = position
        display.line(headline(job))
        for note in (*plan.notes, *run.messages):
            display.line(f"note: {note}")
        if run.resumed:
            restore(job, run, allow_changes=allow_changes)
            run.write_config(dumps(config))  # not before: what was refused must not be what the run has
        ending.enter_context(interrupts)  # from here on there is something to save
        ending.enter_context(job.writer)
        with watch.failures_saved(run):
            after = train_steps(job, run, outside)
        export(job, run)
        summary = summarize(job, after)
        run.write_summary(summary)
        write_report([run.folder], run.folder / "report.html")
        display.before_after(job.state.before or {}, after)
        display.warned([f"step {finding.step}: {finding.text}" for finding in job.health.found])
        watch.at_end(run, display)
        return summary


def train_steps(job: Job, run: Run, outside: Trackers) -> dict[str, Any]:
    """All steps from the current one on, and the evaluations that are due; returns the last evaluation."""
    config, state = job.config, job.state
    after: dict[str, Any] | None = None
    with job.display.bar("training", config.steps, done=state.step) as bar:
        while True:
            # Also right after a resume: the run may have stopped between a step and its evaluation.
            if evaluation_due(job) and not (job.interrupts.asked and state.step < config.steps):
                after = evaluate_step(job, run, outside)
            if state.step and (checkpoint_due(job) or job.interrupts.asked):
                save(job, run)
            if state.step == config.steps:
                job.writer.finish()
                return after or state.last_eval or {}
            if job.interrupts.asked:
                job.writer.finish()  # before it is said that it was saved
            job.interrupts.stop_if_asked(saved(job))
            with begin_again(job, run):  # a step is given up before weights change
                one_step(job, run, outside, bar)


def saved(job: Job) -> str:
    """What an interrupted run says."""
    if not job.state.step:
        return "before the first step was done; start again with --resume"
    return f"saved step {job.state.step} of {job.config.steps}; continue with --resume"


def one_step(job: Job, run: Run, outside: Trackers, bar: Bar) -> None:
    """Rollouts, rewards, updates; one row of metrics and one table of completions."""
    config, state = job.config, job.state
    start = time.monotonic()
    step = state.step + 1
    kept: list[ScoredGroup] = []
    seen: list[ScoredGroup] = []
    row, advantages, bad, told = {}, {}, None, ""
    try:
        with job.interrupts.after_grace(saved(job)), guards.memory(job, "generating"):
            kept, seen = collect(job, step, bar)
            greedy = baselines(job, kept, step, bar) if kept and "baselines" in job.plan.objective.needs else None
    except NumericsError as error:  # of the sampler
        row, bad, told = guards.bad_row(error), error, guards.keep_evidence(job, run, step, error, [], None)
    else:
        with guards.memory(job, "learning"):
            updated = update(job, kept, bar, greedy) if kept else Updated()
        row, advantages, bad = updated.row, updated.advantages, updated.bad
        row["advantage_share"] = advantage_share(advantages)
        if bad is not None:
            row |= guards.bad_row(bad)
            told = guards.keep_evidence(job, run, step, bad, kept, updated.batch)
    if config.learner.reference_every and step % config.learner.reference_every == 0:
        job.learner.update_reference()
    tokens = sum(len(c) for g in seen for c in g.group.rollouts)
    seconds = time.monotonic() - start
    state.step, state.tokens, state.seconds = step, state.tokens + tokens, state.seconds + seconds
    state.bad_steps = state.bad_steps + 1 if bad else 0
    row |= watch.after_scoring(job, run, step, seen)
    row |= {"step": step, **rollout_row(job, seen), "seconds": seconds, "tokens_per_second": tokens / seconds,
            "bad_steps": state.bad_steps}  # fmt: skip
    row["health"] = watch.after_step(job, run, row)
    run.log(row)
    nothing = [None] * config.rollout.completions
    if seen:
        run.write_rollouts(step, seen, advantages=[advantages.get(g.group.prompt.uid, nothing) for g in seen])
    outside.log(step, row)
    job.display.step(row)
    if bad:
        guards.end_if_broken(job, run, bad, told)
    if config.track.samples_every and (step % config.track.samples_every == 0 or step == 1):
        job.display.samples(seen[-1:])
    bar.advance()


def evaluation_due(job: Job) -> bool:
    """Whether the current weights are to be evaluated and were not yet."""
    every, state = job.config.eval.every, job.state
    due = state.step in (0, job.config.steps) or bool(every and state.step % every == 0)
    return due and state.evaluated != state.step


def checkpoint_due(job: Job) -> bool:
    config, step = job.config.checkpoint, job.state.step
    best = config.best and step == job.state.best_step
    return bool(config.every) and (best or step == job.config.steps or step % config.every == 0)


def evaluate_step(job: Job, run: Run, outside: Trackers) -> dict[str, Any]:
    """Evaluates the current weights; writes a row of its own and the completions."""
    state = job.state
    with begin_again(job, run):  # the evaluation is made up for when the run is resumed
        result = measure(job, f"evaluating after step {state.step}" if state.step else "evaluating before training")
    out = result.to_json()
    state.before = state.before or out
    state.last_eval, state.evaluated = out, state.step
    a = out["accuracy"]
    if state.step and a["mean"] is not None and (state.best_accuracy is None or a["mean"] > state.best_accuracy):
        state.best_step, state.best_accuracy = state.step, a["mean"]
    row = {"step": state.step, "eval_accuracy": a["mean"], "eval_low": a["low"], "eval_high": a["high"],
           "eval_n": out["n"]}  # fmt: skip
    run.log(row)
    run.write_eval(state.step, result.groups)
    outside.log(state.step, row)
    return out


def collect(job: Job, step: int, bar: Bar) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """Groups to train on, and all that were sampled.

    Under dynamic sampling, groups without signal are replaced by fresh prompts, at most ``rollout.refills`` times;
    what is still missing then leaves the step smaller, never padded.
    """
    config, objective = job.config, job.plan.objective
    rounds = 1 + (config.rollout.refills if objective.dynamic_sampling else 0)
    kept: list[ScoredGroup] = []
    seen: list[ScoredGroup] = []
    uids: set[str] = set()
    for attempt in range(rounds):
        missing = config.rollout.prompts - len(kept)
        if not missing:
            break
        bar.note("generating")
        prompts = draw(job, missing, uids)
        with job.plan.rewards.grading(step=step) as grading:  # of finished groups, while others are generated
            how = sampling(config, step, attempt)
            on_group = grading.add if config.rollout.overlap else None
            groups = job.engine.generate(prompts, n=config.rollout.completions, sampling=how, on_group=on_group)
            bar.note("scoring")
            scored = grading.finish(groups)
        seen += scored
        kept += [g for g in scored if not objective.dynamic_sampling or mixed(job, g)]
    return kept, seen


def draw(job: Job, count: int, taken: set[str]) -> list[Prompt]:
    """The next prompts of the endless, per-epoch shuffled stream. A prompt that the step has drawn before (it is in
    ``taken``) gets a uid of its own: groups are known by it, and equal uids would draw equal completions."""
    prompts = []
    for index in job.sampler.take(job.state.position, count):
        prompt = job.plan.train[index]
        if prompt.uid in taken:
            prompt = dataclasses.replace(prompt, uid=f"{prompt.uid}~{len(taken)}")
        taken.add(prompt.uid)
        prompts.append(prompt)
    job.state.position += count
    return prompts


def sampling(config: Config, step: int, attempt: int) -> Sampling:
    """How rollouts of this step are drawn; the seed is a function of the run's seed, the step and the refill round."""
    digest = hashlib.blake2b(f"{config.seed}:{step}:{attempt}".encode(), digest_size=8).digest()
    r = config.rollout
    return Sampling(
        max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, stop=r.stop,
        seed=int.from_bytes(digest, "big") >> 1,
    )  # fmt: skip


def mixed(job: Job, scored: ScoredGroup) -> bool:
    """Whether a group holds both correct and wrong completions."""
    return len({c for s in scored.scores if (c := job.plan.correct(s)) is not None}) == 2


def baselines(job: Job, groups: list[ScoredGroup], step: int, bar: Bar) -> dict[str, float]:
    """The reward of the greedy answer to each group's prompt, by the prompt's uid.

    NaN where it could not be judged, or not by all rewards that judged the group: then there is nothing to compare
    with, and the prompt takes no part in the step. An advantage of 0 would say that its completions are just as good.
    """
    bar.note("generating")
    greedy = dataclasses.replace(sampling(job.config, step, 0), temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    answers = job.engine.generate([g.group.prompt for g in groups], n=1, sampling=greedy)
    bar.note("scoring")
    counted = [r.name for r in job.plan.rewards.rewards if r.weight != 0]
    found = {}
    for group, answer in zip(groups, job.plan.rewards.score(answers, step=step), strict=True):
        score = answer.scores[0]
        lacking = any(
            score.parts.get(name) is None and any(s.parts.get(name) is not None for s in group.scores)
            for name in counted
        )
        found[group.group.prompt.uid] = float("nan") if score.value is None or lacking else score.value
    return found


def to_batch(
    job: Job, groups: list[ScoredGroup], greedy: Mapping[str, float] | None = None
) -> tuple[list[Sample], TokenBatch]:
    """Scored groups as packed tensors, in order. ``logprobs`` is NaN until the learner computes the policy's: who reads
    it before gets noticed. ``greedy`` is what :func:`baselines` gave."""
    samples, sequences = [], []
    for g, scored in enumerate(groups):
        for completion, score in zip(scored.group.rollouts, scored.scores, strict=True):
            samples.append(Sample(completion.prompt_ids, completion.token_ids, g))
            sequences.append((g, completion, score))
    completions = [c for _, c, _ in sequences]

    def per_token(name: str) -> torch.Tensor | None:
        values = [getattr(c, name) for c in completions]
        return None if any(v is None for v in values) else torch.from_numpy(np.concatenate(values))

    config = job.config.rollout
    cut = sampling(job.config, 0, 0).truncates
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    rewards, weights = rewards_of(job, [s for _, _, s in sequences])
    uids = [groups[g].group.prompt.uid for g, _, _ in sequences]
    batch = TokenBatch(
        logprobs=torch.full((int(lengths.sum()),), float("nan")),
        mask=torch.from_numpy(np.concatenate([c.sampled for c in completions])),
        sequence_ids=torch.arange(len(completions)).repeat_interleave(lengths),
        group_ids=torch.tensor([g for g, _, _ in sequences]),
        rewards=rewards,
        reward_weights=weights,
        # Under top-p, top-k or min-p these are off by the mass that was cut away: not the policy's, so not comparable.
        rollout_logprobs=None if cut else per_token("logprobs"),
        entropies=per_token("entropies"),
        correct=torch.tensor([bool(job.plan.correct(s)) for _, _, s in sequences]),
        truncated=torch.tensor([c.finish_reason == "length" for c in completions]),
        baselines=None if greedy is None else torch.tensor([greedy[uid] for uid in uids]),
        max_length=config.max_tokens,
        step_rewards=steps_of(job, [s for _, _, s in sequences]),
    )
    return samples, batch


def steps_of(job: Job, scores: list[Score]) -> Steps | None:
    """The rewards of all steps, where the objective reads them; RewardError where no completion has any."""
    if "step_rewards" not in job.plan.objective.needs:
        return None
    flat = [(i, end, value) for i, score in enumerate(scores) for end, value in score.steps]
    if not flat and any(score.value is not None for score in scores):
        raise RewardError(
            f"objective {job.config.objective.preset} learns from the steps of completions, but no reward scored any: "
            "a function returns a list of (end, value) for each completion, a reward model needs args.step_mark"
        )
    sequences, ends, values = ([entry[k] for entry in flat] for k in range(3))
    return Steps(torch.tensor(values, dtype=torch.float64), torch.tensor(sequences, dtype=torch.int64),
                 torch.tensor(ends, dtype=torch.int64))  # fmt: skip


def rewards_of(job: Job, scores: list[Score]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The combined rewards (S,); or each by itself (S, K) with their weights (K,), where the objective normalises them
    one by one. NaN: not judged, or does not apply."""
    nan = float("nan")
    if not job.plan.objective.advantage.per_reward:
        return torch.tensor([nan if s.value is None else s.value for s in scores], dtype=torch.float32), None
    rows = [[nan if v is None else v for v in job.plan.rewards.each(s)] for s in scores]
    return torch.tensor(rows, dtype=torch.float32), torch.tensor([r.weight for r in job.plan.rewards.rewards])


@dataclasses.dataclass(frozen=True, slots=True)
class Updated:
    """What the updates on a step's rollouts gave: metrics, advantages by prompt uid; and what was not finite."""

    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    advantages: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    bad: NumericsError | None = None
    batch: TokenBatch | None = None


def update(job: Job, groups: list[ScoredGroup], bar: Bar, greedy: Mapping[str, float] | None = None) -> Updated:
    """All optimizer steps on one set of rollouts. One in which something is not finite is not applied, and neither are
    those after it; those before it stay."""
    samples, batch = to_batch(job, groups, greedy)
    bar.note("learning")
    row: dict[str, Any] = {"staleness": guards.staleness(job, groups)}
    outputs: list[StepOutput] = []
    bad = None
    try:
        guards.check_given(batch)
        batch, row["canary_gap"] = with_others_logprobs(job, groups, samples, batch)
        batch = job.plan.objective.prepare(batch)
        guards.check_advantages(batch)
        if _optimizer_steps(job, groups) == 1:
            batch = batch.replace(
                old_logprobs=None
            )  # the policy's own, in the one forward pass: the ratio is exactly 1
        optimize(job, samples, batch, outputs)
    except NumericsError as error:
        bad = error
    sums = reduce_metrics([step_metrics(batch), *(o.metrics for o in outputs)])
    row |= {name: value / count for name, (value, count) in sums.items() if count}
    row |= {
        "loss": sum(o.loss for o in outputs) / max(len(outputs), 1),
        "grad_norm": sum(o.grad_norm for o in outputs) / max(len(outputs), 1),
        "policy_version": job.learner.policy_version,
    }
    if greedy is not None:
        judged = [value for value in greedy.values() if value == value]
        row |= {
            "baseline": sum(judged) / len(judged) if judged else None,
            "baseline/none": 1 - len(judged) / len(greedy),
        }
    # Without a reference model: how far the updates moved, or how far trainer and sampler are apart.
    row.setdefault("kl", row.get("kl_old", row.get("kl_rollout")))
    if batch.advantages is None:
        return Updated(row, {}, bad, batch)
    per_sequence = np.split(batch.advantages.numpy(), np.cumsum([len(s.completion_ids) for s in samples])[:-1])
    by_uid: dict[str, list[np.ndarray]] = {g.group.prompt.uid: [] for g in groups}
    for sample, advantages in zip(samples, per_sequence, strict=True):
        by_uid[groups[sample.group].group.prompt.uid].append(advantages)
    return Updated(row, by_uid, bad, batch)


def with_others_logprobs(
    job: Job, groups: list[ScoredGroup], samples: Sequence[Sample], batch: TokenBatch
) -> tuple[TokenBatch, float | None]:
    """The batch with the log-probs that stay as they are through all updates, where they are needed; and the mean
    difference between the sampler's and the learner's (nats)."""
    config, objective = job.config.learner, job.plan.objective
    # Where weights move between the optimizer steps on these rollouts, the ratio needs them as they were. And what acts
    # on the reward is the KL of the policy that sampled.
    moving = _optimizer_steps(job, groups) > 1
    needed = moving or (objective.beta > 0 and objective.reference.place != "loss")
    differences = guards.canary(job, groups, samples, batch, whole=needed)
    if needed:
        # The sampler computed them already. Its own serve where they are the same numbers: of the same weights, of a
        # distribution of which nothing was cut away, in float32, and equal to the learner's on some completions.
        same = job.config.kernels == "auto" and config.dtype == "float32" and len(differences) > 0
        proven = same and float(differences.max()) <= ROUNDING
        batch = batch.replace(old_logprobs=batch.rollout_logprobs if proven else job.learner.logprobs(samples))
    if "ref_logprobs" in objective.needs:
        batch = batch.replace(ref_logprobs=job.learner.logprobs(samples, reference=True))
    return batch, float(differences.mean()) if len(differences) else None


def _optimizer_steps(job: Job, groups: Sequence[ScoredGroup]) -> int:
    config = job.config.learner
    return -(-len(groups) // (config.minibatch_prompts or len(groups))) * config.inner_updates


def optimize(job: Job, samples: list[Sample], batch: TokenBatch, outputs: list[StepOutput]) -> None:
    """All optimizer steps on a prepared batch; ``outputs`` gets each as it is done."""
    config, learner, objective = job.config.learner, job.learner, job.plan.objective
    groups = int(batch.group_ids.max()) + 1
    minibatch = config.minibatch_prompts or groups
    for _ in range(config.inner_updates):
        for start in range(0, groups, minibatch):
            chosen = ((batch.group_ids >= start) & (batch.group_ids < start + minibatch)).nonzero().squeeze(1)
            # Denominators and shares belong to one optimizer step: they are taken anew from this minibatch.
            part = objective.as_step(batch.select(chosen))
            try:
                outputs.append(learner.step([samples[i] for i in chosen.tolist()], part))
            except NumericsError as error:
                raise error.among(chosen.tolist()) from None
            job.engine.version = learner.policy_version


def measure(job: Job, name: str) -> EvalResult:
    """Accuracy on the held-out prompts; an interrupt leaves at once, since nothing is lost."""
    e, r = job.config.eval, job.config.rollout
    how = Sampling(
        max_tokens=e.max_tokens or r.max_tokens, temperature=e.temperature, stop=r.stop, seed=job.config.seed
    )
    stoppable = job.interrupts.anywhere("during an evaluation; continue with --resume")
    with stoppable, guards.memory(job, "evaluating"), job.display.bar(name, len(job.plan.eval) * e.samples) as bar:
        return evaluate(
            job.engine, job.plan.eval, job.plan.rewards, samples=e.samples, sampling=how,
            correct=job.plan.correct, progress=bar.advance,
        )  # fmt: skip
