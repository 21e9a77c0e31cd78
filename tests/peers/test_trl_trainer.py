"""trew inside TRL's trainer: loss and gradients are trew's own on the same batch, however TRL splits and repeats it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import trl_help
from datasets import Dataset
from peer_compare import GROUPS, LENGTHS, MAX_LENGTH, TOLERANCE, WRONG, apart, noise
from test_trl_rewards import CUT, scripted
from torch import Tensor
from transformers import TrainingArguments
from trl import GRPOTrainer as Plain

import tiers
import trew
from trew.errors import ConfigError, DataError
from trew.integrations.trl import GRPOTrainer, hooks, refusals, rewards, step
from trew.objective.ratio import TokenRatio

ROWS = len(LENGTHS)
REFUSED = {name for name in trew.presets() if refusals.of_objective(trew.preset(name, dynamic_sampling=False))}
OFFERED = [name for name in trew.presets() if name not in REFUSED]
SPLITS = {
    "whole": {},
    "accumulated": {"gradient_accumulation_steps": 4},
    "two steps of two": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "twice": {"gradient_accumulation_steps": 2, "num_iterations": 2},
}
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 0.9, 1.0, 0.0)
STEPS = [[(1, 0.5), (n, float(i % 3))] for i, n in enumerate(LENGTHS)]
STEPPED = rewards.steps(lambda completions, **_: STEPS)
OPTIONS = [
    ("grpo", {"beta": 0.0, "correction": "tis"}),
    ("dapo", {"correction": "mis"}),
    ("dapo", {"correction": "mis-token"}),
    ("dapo", {"correction": "icepop"}),
    ("dapo", {"correction": "tis-sequence"}),
    ("dapo", {"correction": "geo-mask", "correction_low": 0.9, "correction_high": 1.1}),
    ("grpo", {"beta": 0.0, "correction": "opsm", "opsm_delta": 0.001}),
    ("vespo", {"correction": "tis"}),
    ("grpo", {"beta": 0.3, "kl": "k1"}),
    ("grpo", {"beta": 0.3, "kl": "k2"}),
    ("grpo", {"beta": 0.3, "kl": "k3-corrected"}),
    ("dapo", {"beta": 0.3, "kl": "k1", "kl_place": "reward"}),
    ("dapo", {"beta": 0.3, "kl": "k2", "kl_place": "to-go"}),
    ("trw-logistic", {"entropy_bonus": 0.3}),
    ("clip-cov", {"entropy_bonus": 0.3}),
    ("kl-cov", {"correction": "tis", "beta": 0.1}),
    ("trw-entropy", {"aggregate": "prompt-mean-token-mean"}),
    ("trw-triangular", {"aggregate": "constant"}),
    ("grpo", {"beta": 0.0, "overlong_filtering": True}),
    ("dapo", {"overlong_cache": 6}),
]


def constant(completions: list, **_: Any) -> list[float]:
    return [1.0] * len(completions)


def objective(name: str, **settings: Any) -> trew.Objective:
    return trew.preset(name, **{"dynamic_sampling": False, **settings})


@functools.cache
def sampler() -> Tensor:
    """The sampler's log-probs (B, T), off from the policy's; of float32 numbers, as TRL carries them."""
    made = trl_help.trainer({"loss_type": "grpo"}, rollout_func=scripted(REWARDS, cut=CUT)[1])
    inputs = made._generate_and_score_completions([{"prompt": trl_help.PROMPTS[g]} for g in GROUPS])
    mu = trl_help.forward(made.model, inputs)[0].detach() + noise(5, ROWS, max(LENGTHS), size=0.3)
    return mu.float().double()


def trainer(chosen: trew.Objective, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    """Ours, around scripted answers and rewards; what it plans also says which row is which."""
    settings = dict(settings or {})
    parts = settings.get("steps_per_generation", settings.get("gradient_accumulation_steps", 1))
    # bf16 or a rounding of the sampler's numbers would be seen at 1e-5.
    mu = sampler() if "rollout_logprobs" in chosen.needs else None
    functions, rollout = scripted(more.pop("table", REWARDS), cut=CUT, mu=mu)
    if "step_rewards" in chosen.needs:
        functions = [STEPPED]
    made = trl_help.trainer(
        settings, rows=ROWS // parts, kind=functools.partial(GRPOTrainer, objective=chosen),
        reward_funcs=functions, rollout_func=rollout, **more,
    )  # fmt: skip
    if made.ref_model is not None:
        with torch.no_grad():
            for parameter in made.ref_model.double().parameters():
                parameter.mul_(0.9)  # a reference that is not the policy
    inner = made._generate_and_score_completions

    def numbered(inputs: Any) -> dict[str, Any]:
        made.seen = inner(inputs) | {"row": torch.arange(ROWS)}
        return made.seen

    made._generate_and_score_completions = numbered
    return made


def theirs(made: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(loss, gradient, rows) of each optimizer step that TRL makes of one generation; the policy moves in between."""
    out = []
    size, args = made.args.gradient_accumulation_steps, made.args
    for number in range(args.steps_per_generation * made.num_iterations // size):
        nudge(made.model, number)
        made.model.zero_grad()
        loss, rows = torch.zeros((), dtype=torch.float64), []
        for _ in range(size):
            inputs = made._prepare_inputs([{"prompt": trl_help.PROMPTS[g]} for g in GROUPS])
            part = made.compute_loss(made.model, inputs)
            part.backward()
            loss += part.detach()
            rows.append(inputs["row"])
            made._step += 1
        out.append((loss, trl_help.gradient(made.model), torch.cat(rows)))
    return out


def nudge(policy: Any, number: int) -> None:
    """The weights that step ``number`` starts from."""
    with torch.no_grad():
        for i, (parameter, start) in enumerate(zip(policy.parameters(), trl_help.model().parameters(), strict=True)):
            parameter.copy_(start + (noise(i, *start.shape, size=0.01) * number if number else 0))


def ours(chosen: trew.Objective, made: Any, number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """trew's own loss and gradient of the same optimizer step, with forward passes of the test's own."""
    inputs, policy = made.seen, trl_help.model().train()
    old, sampled = (v.detach() for v in trl_help.forward(policy, inputs))
    if "old_per_token_logps" in inputs:  # the batch's own, float32: products over whole completions would show it
        assert apart(old * inputs["completion_mask"], inputs["old_per_token_logps"] * inputs["completion_mask"]) < 1e-6
        old = inputs["old_per_token_logps"].double()
    nudge(policy, number)
    logprobs, entropies = trl_help.forward(policy, inputs)
    bonus = chosen.entropy_bonus.active
    reference = trl_help.forward(made.ref_model, inputs)[0].detach() if made.ref_model is not None else None
    batch = trew.TokenBatch.from_padded(
        logprobs=logprobs, mask=inputs["completion_mask"], group_ids=torch.tensor(GROUPS),
        rewards=torch.tensor(REWARDS, dtype=torch.float64), old_logprobs=old, ref_logprobs=reference,
        rollout_logprobs=sampler() if "rollout_logprobs" in chosen.needs else None,
        entropies=entropies if bonus else sampled, truncated=torch.tensor([i in CUT for i in range(ROWS)]),
        step_rewards=STEPS if "step_rewards" in chosen.needs else None, max_length=MAX_LENGTH,
    )  # fmt: skip
    prepared = chosen.prepare(batch)
    loss = chosen.loss(chosen.renormalised_for(prepared.select(rows)) if len(rows) < ROWS else prepared).loss
    loss.backward()
    return loss.detach(), trl_help.gradient(policy)


def distance(chosen: trew.Objective, made: Any, found: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float]:
    """The farthest that any step's (loss, gradient) is from trew's own."""
    losses, gradients = [], []
    for number, (loss, gradient, rows) in enumerate(found):
        own_loss, own_gradient = ours(chosen, made, number, rows)
        losses.append(abs(float(own_loss - loss)) / max(abs(float(own_loss)), 0.5))  # of terms around 1 that may cancel
        # A step may be all of tokens that nothing is learned from.
        gradients.append(apart(own_gradient, gradient) if own_gradient.any() or gradient.any() else 0.0)
    return max(losses), max(gradients)


def check(chosen: trew.Objective) -> None:
    """An objective in all splits, and that there was something to learn from in each."""
    for settings in SPLITS.values():
        made = trainer(chosen, settings)
        found = theirs(made)
        assert any(gradient.any() for _, gradient, _ in found)
        assert max(distance(chosen, made, found)) <= TOLERANCE


@pytest.mark.parametrize("name", tiers.one_in(3, OFFERED))
def test_loss_and_gradient_of_every_preset(name):
    # With all four completions of a group drawn, every draw succeeds.
    check(objective(name, **({"k": 2} if name == "pass-at-k" else {})))


@pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_loss_and_gradient_with_options(name, options):
    check(objective(name, **options))


def test_presets_that_are_refused():
    assert {
        "remax",
        "ppo",
        "vapo",
        "ppo-clip",
        "gigpo",
        "mt-grpo",
        "turn-returns",
        "opd",
        "otb",
        "sft",
        "rft",
        "dpo",
    } == REFUSED


class TestWhatMustDiffer:
    """The same comparison with something wrong: it has to notice."""

    @pytest.mark.parametrize(
        ("name", "right", "wrong"),
        [
            ("trw-logistic", {}, {"aggregate": "token-mean"}),
            ("grpo", {"beta": 0.3}, {"beta": 0.2}),
            ("dapo", {"correction": "tis"}, {}),
            ("dapo", {"correction": "tis"}, {"correction": "mis"}),
            ("gtpo", {}, {"a2": 0.5}),
            ("trw-logistic", {"entropy_bonus": 0.3}, {"entropy_bonus": 0.2}),
            ("kl-cov", {"share": 0.2}, {"share": 0.4}),
        ],
    )
    def test_another_setting(self, name, right, wrong):
        made = trainer(objective(name, **right), SPLITS["twice"])
        assert distance(objective(name, **wrong), made, theirs(made))[1] >= WRONG

    def test_denominators_of_the_micro_batch(self, monkeypatch):
        chosen = objective("dapo")
        made = trainer(chosen, SPLITS["accumulated"])
        inner = made._compute_loss
        made._compute_loss = lambda model, inputs: inner(
            model, inputs | step.renormalised_for(chosen, inputs, max_length=MAX_LENGTH)
        )
        assert distance(chosen, made, theirs(made))[1] >= WRONG

    def test_denominators_of_the_whole_generation(self):
        chosen = objective("dapo")
        made = trainer(chosen, SPLITS["two steps of two"])
        made._own_denominators = lambda parts: None
        assert distance(chosen, made, theirs(made))[1] >= WRONG

    def test_old_log_probs_forgotten(self):
        chosen = objective("trw-logistic")
        made = trainer(chosen, SPLITS["twice"])
        inner = made._compute_loss
        made._compute_loss = lambda model, inputs: inner(
            model, {k: v for k, v in inputs.items() if k != "old_per_token_logps"}
        )
        assert distance(chosen, made, theirs(made))[1] >= WRONG

    def test_advantages_of_trl(self):
        chosen = objective("gtpo")
        made = trainer(chosen)
        made._plan = lambda output: step.plan(
            objective("grpo", beta=0.0), logprobs=torch.zeros(output["completion_mask"].shape),
            mask=output["completion_mask"], rewards=torch.tensor(REWARDS), group_ids=torch.tensor(GROUPS),
        )  # fmt: skip
        assert distance(chosen, made, theirs(made))[1] >= WRONG


class TestRefusals:
    @pytest.mark.parametrize(
        ("chosen", "settings", "says"),
        [
            (objective("dr-grpo"), {"loss_type": "dr_grpo"}, "loss_type: got 'dr_grpo'.*the objective decides"),
            (objective("dapo"), {"epsilon": 0.3}, "epsilon: got 0.3.*eps_low"),
            (objective("dapo"), {"epsilon_high": 0.3}, "epsilon_high"),
            (objective("dapo"), {"delta": 4.0}, "delta: got 4.0"),
            (objective("dapo"), {"beta": 0.1}, "beta: got 0.1, but the objective's is 0.0"),
            (objective("dapo"), {"scale_rewards": "none"}, "scale_rewards"),
            (objective("gdpo"), {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
            (objective("gspo"), {"importance_sampling_level": "sequence"}, "importance_sampling_level"),
            (objective("dapo"), {"mask_truncated_completions": True}, "overlong_filtering=True"),
            (objective("dapo"), {"top_entropy_quantile": 0.2}, "high-entropy-tokens"),
            (objective("dapo"), {"entropy_coef": 0.1}, "entropy_bonus"),
            (objective("dapo"), {"use_adaptive_entropy": True}, "use_adaptive_entropy"),
            (objective("dapo"), {"off_policy_mask_threshold": 0.5}, "opsm"),
            (objective("dapo"), {"use_bias_correction_kl": False}, "k3-corrected"),
            (objective("dapo"), {"vllm_importance_sampling_mode": "token_mask"}, "mis-token"),
            (objective("dapo"), {"vllm_importance_sampling_clip_max": 2.0}, "correction_high"),
            (objective("dapo"), {"sapo_temperature_pos": 2.0}, "tau_pos"),
            (objective("dapo"), {"vespo_k_pos": 1.0}, "k_pos"),
            (trew.preset("dapo"), {}, "dynamic_sampling=False"),
            (trew.preset("remax"), {}, "greedy"),
            (trew.preset("ppo-clip"), {}, "critic"),
            (objective("dapo", entropy_bonus=0.1, entropy_target=0.2), {}, "adaptive"),
            (objective("dapo", correction="tis"), {}, "use_vllm=True"),
            (objective("dppo-tv"), {}, "sampler"),
            (objective("grpo-process"), {}, "rewards.steps"),
            (objective("dapo"), {"use_vllm": True}, 'correction="mis"'),
            (objective("dapo"), {"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "accepts a multiple"),
            # Its mask is against the sampler, but it corrects nothing.
            (objective("dapo", correction="opsm"), {"use_vllm": True}, "vllm_importance_sampling_correction"),
            (objective("prime-rl").replace(ratio=TokenRatio()), {"use_vllm": True}, "has no correction"),
            (objective("dapo", correction="tis"), {"use_vllm": True, "top_p": 0.9}, "top_p: got 0.9"),
            (objective("dapo", correction="tis"), {"use_vllm": True, "repetition_penalty": 1.1}, "accepts 1.0 here"),
            (objective("aipo"), {"use_vllm": True, "generation_kwargs": {"min_p": 0.1}}, "min_p: got 0.1"),
            (objective("pass-at-k", k=4), {}, "k: got 4, accepts less than num_generations = 4"),
            (objective("dapo", overlong_cache=13), {}, "overlong_cache: got 13, accepts at most .* 12"),
        ],
    )  # fmt: skip
    def test_reason(self, chosen, settings, says):
        with pytest.raises(ConfigError, match=says):
            trl_help.trainer(settings, kind=functools.partial(GRPOTrainer, objective=chosen))

    @pytest.mark.parametrize(
        ("functions", "settings", "says"),
        [
            ([STEPPED, STEPPED], {}, "put one rewards.steps.*got 2"),
            ([STEPPED, len], {}, "the others .* would be dropped"),
            ([STEPPED, len], {"reward_weights": [2.0, 0.0]}, "accepts 1 for the function that scores steps"),
        ],
    )
    def test_reward_functions_that_would_be_dropped(self, functions, settings, says):
        with pytest.raises(ConfigError, match=says):
            trl_help.trainer(
                settings, kind=functools.partial(GRPOTrainer, objective=objective("grpo-process")),
                reward_funcs=functions,
            )  # fmt: skip

    def test_functions_beside_the_steps_are_logged_alone(self):
        chosen, found = objective("grpo-process"), []
        unjudged = rewards.steps(lambda completions, **_: [None, *STEPS[1:]])
        for functions, settings in (([unjudged], {}), ([unjudged, constant], {"reward_weights": [1.0, 0.0]})):
            made = trl_help.trainer(
                settings, kind=functools.partial(GRPOTrainer, objective=chosen), reward_funcs=functions,
                rollout_func=scripted(REWARDS)[1],
            )  # fmt: skip
            inputs = made._generate_and_score_completions([{"prompt": trl_help.PROMPTS[g]} for g in GROUPS])
            found.append(inputs)
        assert not found[0][step.MASK][0].any()
        for name in ("advantages", step.TOKEN_WEIGHTS, step.MASK):
            assert found[0][name].equal(found[1][name])
        assert made._metrics["train"]["rewards/constant/mean"] == [1.0]

    def test_a_setting_that_nobody_has_looked_at(self, monkeypatch):
        known = refusals.TRLS - {"top_p"}
        monkeypatch.setattr(refusals, "TRLS", known)
        trainer(objective("dapo"))
        with pytest.raises(ConfigError, match=r"top_p: got 0.5, which is newer than what trew knows"):
            trainer(objective("dapo"), {"top_p": 0.5})

    def test_all_at_once(self):
        settings = {"loss_type": "grpo", "delta": 4.0}
        with pytest.raises(ConfigError) as caught:
            trl_help.trainer(settings, kind=functools.partial(GRPOTrainer, objective=trew.preset("dapo")))
        assert len(caught.value.problems) == 3

    def test_what_is_no_objective(self):
        with pytest.raises(ConfigError, match="accepts an Objective"):
            trl_help.trainer({}, kind=functools.partial(GRPOTrainer, objective="dapo"))

    def test_every_setting_is_either_decided_or_trl_s(self):
        parents = {f for base in trl_help.GRPOConfig.__mro__[2:] for f in getattr(base, "__dataclass_fields__", {})}
        own = set(trl_help.GRPOConfig.__dataclass_fields__) - (parents - set(trl_help.GRPOConfig.__annotations__))
        general = set(TrainingArguments.__dataclass_fields__)
        assert own - general == (set(refusals.DECIDED) | refusals.TRLS) - general
        assert not set(refusals.DECIDED) & refusals.TRLS

    def test_a_batch_that_nobody_planned(self):
        made = trainer(objective("dapo"), SPLITS["accumulated"])
        with pytest.raises(DataError, match="denominators are unknown"):
            made._compute_loss(made.model, trl_help.batch())

    def test_changed_hooks(self, monkeypatch):
        assert hooks.misfits(Plain) == []
        monkeypatch.setattr(Plain, "_compute_loss", lambda self, model, inputs, extra: None)
        assert hooks.misfits(Plain) == ["GRPOTrainer._compute_loss has other parameters: +extra"]
        with pytest.raises(ConfigError, match="_compute_loss has other parameters"):
            trainer(objective("dapo"))


def run(kind: Any, settings: dict[str, Any], **more: Any) -> Any:
    """A real ``train()`` from the usual weights; the trainer afterwards."""
    usual = {"max_steps": 5, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1}
    made = trl_help.trainer({**usual, **settings}, kind=kind, **more)
    made.train()
    return made


@pytest.mark.parametrize("parts", [{"gradient_accumulation_steps": 2, "rows": 4}, {"num_iterations": 2, "rows": 8}])
def test_grpo_of_trl_and_ours_have_the_same_weights_after_five_steps(parts):
    settings = dict(parts)
    rows = settings.pop("rows")
    functions, rollout = scripted(REWARDS)
    chosen = trew.preset("grpo", beta=0.0, std_eps=1e-4)  # TRL's beta, and what it adds to the deviation
    with_ours = functools.partial(GRPOTrainer, objective=chosen)
    start = torch.cat([p.detach().flatten() for p in trl_help.model().parameters()])
    moved = [
        torch.cat([p.detach().flatten() for p in made.model.parameters()]) - start
        for made in (
            run(kind, settings | extra, rows=rows, reward_funcs=functions, rollout_func=rollout)
            for kind, extra in ((Plain, {"loss_type": "grpo"}), (with_ours, {}), (Plain, {"loss_type": "dr_grpo"}))
        )
    ]
    assert apart(moved[1], moved[0]) <= 10 * TOLERANCE  # five steps of Adam, from float32
    assert apart(moved[2], moved[0]) >= WRONG


def test_a_real_run_learns_and_logs():
    def low(completion_ids: list, **_: Any) -> list[float]:
        return [sum(t < 128 for t in ids) / len(ids) for ids in completion_ids]

    chosen = objective("trw-logistic", beta=0.001)
    kind = functools.partial(GRPOTrainer, objective=chosen)
    settings = {"max_steps": 12, "learning_rate": 1e-2, "num_generations": 8, "gradient_accumulation_steps": 2,
                "eval_strategy": "steps", "eval_steps": 12, "per_device_eval_batch_size": 16}  # fmt: skip
    data = Dataset.from_dict({"prompt": list(trl_help.PROMPTS)})
    made = run(kind, settings, rows=8, reward_funcs=[low], eval_dataset=data)
    logged = [entry for entry in made.state.log_history if "reward" in entry]
    first, last = (sum(entry["reward"] for entry in part) / 3 for part in (logged[:3], logged[-3:]))
    assert last > first + 0.1
    names = {"loss", "kl", "entropy", "clip_ratio/region_mean", "completions/mean_length", "rewards/low/mean",
             "trew/ratio", "trew/weight", "trew/ess", "trew/kl", "trew/zero_signal_share"}  # fmt: skip
    assert names <= set(logged[-1])
    assert any("eval_trew/weight" in entry for entry in made.state.log_history)


def test_several_rewards_with_weights_and_gaps():
    table = ((1.0, 0.3), (0.0, float("nan")), (float("nan"), float("nan")), (0.2, 0.0),
             (0.1, float("nan")), (float("nan"), 1.0), (1.0, 0.5), (0.3, 0.5))  # fmt: skip
    for name in ("grpo", "gdpo"):
        chosen = objective(name, beta=0.0)
        made = trainer(chosen, {"gradient_accumulation_steps": 2, "reward_weights": [0.3, 1.7]}, table=table)
        [(_, gradient, _)] = theirs(made)
        policy = trl_help.model().train()
        given = {"rewards": torch.tensor(table, dtype=torch.float64), "max_length": MAX_LENGTH,
                 "mask": made.seen["completion_mask"], "group_ids": torch.tensor(GROUPS)}  # fmt: skip
        for weights, near in (([0.3, 1.7], True), ([1.0, 1.0], False)):
            policy.zero_grad()
            logprobs = trl_help.forward(policy, made.seen)[0]
            batch = trew.TokenBatch.from_padded(logprobs=logprobs, reward_weights=torch.tensor(weights), **given)
            chosen.loss(batch).loss.backward()
            far = apart(trl_help.gradient(policy), gradient)
            assert far <= TOLERANCE if near else far >= WRONG
        shown = list(made._logs["advantages"])
        assert shown[2] == 0
        assert (
            apart(torch.tensor(shown), (made.seen["advantages"].sum(1) / made.seen[step.MASK].sum(1).clamp(min=1)))
            < 1e-6
        )


def test_tokens_of_tools_carry_no_loss():
    functions, rollout = scripted(REWARDS)

    def with_tools(prompts: list, trainer: Any) -> dict[str, Any]:
        out = rollout(prompts, trainer)
        return out | {"env_mask": [[int(t % 3 != 1) for t in range(len(ids))] for ids in out["completion_ids"]]}

    chosen = objective("trw-logistic")
    made = trl_help.trainer(
        {}, kind=functools.partial(GRPOTrainer, objective=chosen), reward_funcs=functions, rollout_func=with_tools,
    )  # fmt: skip
    inputs = made._prepare_inputs([{"prompt": trl_help.PROMPTS[g]} for g in GROUPS])
    assert not inputs["tool_mask"].all()
    made.model.zero_grad()
    made._compute_loss(made.model, inputs).backward()
    gradient, rewarded = trl_help.gradient(made.model), inputs[step.REWARDS].double()
    order = {"rewards": rewarded, "group_ids": inputs[step.GROUPS]}
    for mask, near in ((None, True), (inputs["completion_mask"].bool(), False)):
        far = apart(trl_help.ours(chosen, made.model, inputs, mask=mask, **order)[1], gradient)
        assert far <= TOLERANCE if near else far >= WRONG
