"""The estimate against what is really there: counts and bytes of small models, and the command line."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import tomllib

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import learner_help as help
import recipe_help
import tiers
import tiny
import trew
from trew import estimate
from trew.cli.main import main
from trew.config import (
    Config,
    CriticConfig,
    EnvironmentConfig,
    LearnerConfig,
    LoraConfig,
    RolloutConfig,
    TeacherConfig,
    parse,
)
from trew.estimate import advice, passes, times
from trew.estimate import run as estimating
from trew.estimate.memory import WHOLE_STEP, coefficients, optimizer, weights
from trew.estimate.sizes import sizes_of
from trew.estimate.storages import StorageCount
from trew.estimate.times import Rates
from trew.learner import Learner
from trew.learner.runner import RunnerSettings
from trew.learner.value_runner import ValueRunner, with_value_head
from trew.models import loading, lora
from trew.objective import preset, presets
from trew.training import frozen
from trew.types import TrainingSample
from trew.utils.console import Silent

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


RATES = Rates(many=1e11, few=1e10)


def saved(tmp_path, kind: str = "llama", **overrides) -> str:
    folder = tmp_path / kind
    tiny.model(kind, **overrides).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def config(model: str, *, lora: LoraConfig | None = None, rollout: dict | None = None, **learner) -> Config:
    sized = RolloutConfig(**{"prompts": 3, "completions": 4, "max_tokens": 10, **(rollout or {})})
    return Config(model=model, rollout=sized, learner=LearnerConfig(**learner), lora=lora or LoraConfig())


MACHINE = estimate.Machine("cpu", 1000, 10**9)


def made(c: Config, *, beta: float = 0.0, prompt: int = 12, held_out: int = 0) -> estimate.Estimate:
    return estimate.estimate(
        c, machine=MACHINE, objective=preset("grpo", beta=beta), prompt=prompt, held_out=held_out, rates=RATES
    )


def held(net) -> int:
    """Bytes of a model's parameters, tied ones once, and of what a quantised one keeps beside them."""
    states = [s for p in net.parameters() if (s := getattr(p, "quant_state", None)) is not None]
    return sum(p.numel() * p.element_size() for p in net.parameters()) + sum(4 * s.absmax.numel() for s in states)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_counts_are_those_of_the_model(kind, tmp_path):
    folder = saved(tmp_path, kind)
    net = loading.load_model(folder)
    sizes = sizes_of(config(folder))
    assert sizes.weights == sizes.trained == sum(p.numel() for p in net.parameters())
    assert sizes.linear == sum(p.numel() for m in lora.linear_layers(net).values() for p in m.parameters(recurse=False))
    assert sizes.head == net.get_output_embeddings().weight.numel()
    assert weights(sizes, config(folder)) == held(net)
    assert {p.is_meta for p in net.parameters()} == {False}


@pytest.mark.parametrize(("base", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("nf4", "float32")])
def test_bytes_of_adapters_and_their_base(base, dtype, tmp_path):
    folder = saved(tmp_path, **WIDE)
    c = config(folder, lora=LoraConfig(rank=4, base=base), dtype=dtype)
    net = lora.load_base(folder, c.lora, device="cpu", dtype=dtype)
    lora.attach(net, c.lora, name="m", seed=0)
    sizes = sizes_of(c)
    assert sizes.trained == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert weights(sizes, c) == held(net)


@pytest.mark.parametrize("name", ["adamw", "adamw-8bit"])
def test_bytes_of_the_optimizer_s_state(name, tmp_path):
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = saved(tmp_path, **shape)
    own = help.learner(loading.load_model(folder), optimizer=name)
    items = help.samples()
    own.step(items, own.objective.prepare(help.batch(items)))
    state = {
        n: t for n, t in own.state()[0].items() if n.startswith("optimizer.") and not n.startswith("optimizer.step")
    }
    real = sum(t.numel() * t.element_size() for t in state.values())
    told = optimizer(sizes_of(config(folder)), config(folder, optimizer=name))
    assert told == pytest.approx(real, rel=0.02)  # small tensors stay in float32


def test_a_storage_count_counts_what_is_made_until_it_is_released():
    with StorageCount() as storages:
        a = torch.zeros(1000)
        view = a[:10]
        assert storages.live == 4000
        b = a + 1
        assert (storages.live, storages.peak) == (8000, 8000)
        del b
        assert (storages.live, storages.peak) == (4000, 8000)
        del a
        assert storages.live == 4000
        del view
        assert storages.live == 0


def test_a_storage_count_does_not_count_what_was_there_before():
    weight, gradient = torch.zeros(1000), torch.zeros(1000)
    with StorageCount() as storages:
        out = weight.view(10, 100).t()
        gradient.add_(1.0)
        assert storages.peak == 0
        kept = out + gradient.view(100, 10)
        assert (storages.live, storages.peak) == (4000, 4000)
        del kept
        assert storages.live == 0


@pytest.mark.parametrize(
    ("kind", "rank", "checkpointing"),
    [*tiers.thinned(["llama", "gpt2", "gemma2"], [0, 4], [False, True], keep=3), ("mixtral", 0, False)],
)
def test_a_pass_without_memory_allocates_what_a_real_one_does(kind, rank, checkpointing, tmp_path):
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3} if kind == "gemma2" else {}
    folder = saved(tmp_path, kind, num_hidden_layers=6, **kinds)
    own = LoraConfig(rank=rank) if rank else None
    c = config(folder, lora=own, gradient_checkpointing=checkpointing)
    c = dataclasses.replace(c, kernels="plain", linear="plain")  # our products' scratch memory is larger than all of it
    sizes = sizes_of(c)
    told = at_depth(passes.training(c, sizes, prompt=12, device="cpu"), sizes.layers)

    net = loading.load_model(folder)
    if own:
        lora.attach(net, own, name="m", seed=0)
    batch = passes.batch(c, net, prompt=12, vocabulary=sizes.vocabulary)
    assert max(told) > 20_000
    assert told == pytest.approx(passes.training_peaks(batch), rel=0.02)


def at_depth(counted: passes.Pass, layers: int) -> tuple[int, ...]:
    return tuple(line.layer * layers + line.rest for line in (counted.before, counted.after))


@pytest.mark.parametrize(("tied", "max_tokens"), [(True, 10), (False, 10), (False, 50)])
def test_a_pass_with_a_large_vocabulary_takes_what_torch_allocates(tied, max_tokens, tmp_path):
    """The logits and the head's gradient, or with a tied head its two gradients and their sum."""
    large = {"vocab_size": 40_000, "tie_word_embeddings": tied}
    folder = saved(tmp_path, num_hidden_layers=2, **large, **WIDE)
    c = config(folder, rollout={"prompts": 1, "completions": 2, "max_tokens": max_tokens})
    c = dataclasses.replace(c, kernels="plain", linear="plain")
    sizes, net = sizes_of(c), loading.load_model(folder)
    items = [TrainingSample(np.arange(12), np.arange(max_tokens), group=0) for _ in range(c.rollout.completions)]
    batch = passes.batch(c, net, prompt=12, vocabulary=sizes.vocabulary)
    assert len(batch.packs) == 1
    (pack,) = batch.runner.packs(items)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        batch.runner.accumulate(pack, lambda part, logprobs, entropies: (torch.ones_like(logprobs), None))
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    told = max(at_depth(passes.training(c, sizes, prompt=12, device="cpu"), sizes.layers))
    assert told == pytest.approx(max(allocated), rel=0.03)


def test_the_proof_makes_the_logits_of_one_sample_at_a_time(tmp_path, monkeypatch):
    folder = saved(tmp_path, **WIDE)
    net, seen = loading.load_model(folder), []
    run = type(net).forward

    @functools.wraps(run)
    def watched(self, *args, **kwargs):
        out = run(self, *args, **kwargs)
        seen.append(len(out.logits.flatten(0, 1)))
        return out

    monkeypatch.setattr(type(net), "forward", watched)
    items = help.samples()
    help.learner(net).logprobs(items)
    longest = max(len(sample.token_ids) for sample in items)
    assert 0 < max(seen) <= longest


def test_a_teacher_counts_by_its_own_size(tmp_path):
    student, larger = saved(tmp_path / "a"), saved(tmp_path / "b", num_hidden_layers=4)
    alone = made(config(student))
    for dtype, of_linear in (("float32", 4), ("bfloat16", 2)):
        taught = made(dataclasses.replace(config(student), teacher=TeacherConfig(model=str(larger), dtype=dtype)))
        s = sizes_of(dataclasses.replace(config(student), model=str(larger)))
        extra = 4 * (s.weights - s.linear) + of_linear * s.linear
        for phase in ("generating", "training"):
            assert taught.memory.total(phase) - alone.memory.total(phase) == extra
    assert taught.seconds["log-probs"] > alone.seconds.get("log-probs", 0.0)


def test_rows_of_episodes_that_wait_for_their_environments_are_kept(tmp_path):
    """As many as are decoded, as ``decode.Schedule`` holds, but no more than a step has episodes."""

    def kept(prompts: int, **more) -> int:
        c = config(
            saved(tmp_path, **WIDE), rollout={"prompts": prompts, "completions": 2, "batch": 16, "max_tokens": 40}
        )
        return made(dataclasses.replace(c, kernels="plain", **more)).memory.parts["generating"]["cache"]

    plays = {"environment": EnvironmentConfig(name="guess", turns=1, observation_tokens=0)}
    assert [kept(8, **plays), kept(8)] == [kept(8)] * 2, "all of a step are decoded at once"
    assert kept(12, **plays) > 1.3 * kept(12)
    assert kept(16, **plays) == kept(40, **plays) > 1.8 * kept(16)


def test_a_replay_takes_no_time_for_generating(tmp_path):
    c = config(saved(tmp_path))
    again = made(dataclasses.replace(c, rollout=dataclasses.replace(c.rollout, replay="runs/x")))
    own = made(c).seconds
    assert {"prefill", "decoding"} <= own.keys()
    assert again.seconds == {phase: own[phase] for phase in own if phase not in ("prefill", "decoding")}


PASSES = [
    ("grpo", {}, 0), ("grpo", {"inner_updates": 2}, 1), ("otb", {}, 1), ("otb", {"minibatch_prompts": 2}, 1),
    ("kl-cov", {}, 1), ("kl-cov", {"minibatch_prompts": 2, "inner_updates": 3}, 4), ("m2po", {"inner_updates": 2}, 3),
    ("rloo", {}, 1), ("reinforce-pp", {}, 1), ("otb in to-go", {}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "learner", "passes"), PASSES, ids=lambda x: str(x))
def test_passes_for_log_probs_alone_are_as_many_as_a_run_makes(name, learner, passes, tmp_path, monkeypatch):
    folder = saved(tmp_path)
    name, _, place = name.partition(" in ")
    options = {"beta": 0.05, "kl": "k1", "kl_place": place} if place else {}
    (tmp_path / "reward.py").write_text(recipe_help.ODD)
    text = recipe_help.recipe(
        folder, reward=f"{tmp_path}/reward.py:odd", out=str(tmp_path / "run"), steps=1, kernels="plain",
        chat_template="plain", objective={"preset": name, **options}, learner={"lr": 1e-2, **learner},
    )  # fmt: skip
    c, read, comparing = parse(tomllib.loads(text)), [0], []

    def counted(function):
        @functools.wraps(function)
        def wrapper(self, samples, **given):
            apart = comparing or given.get("reference")
            read[0] += 0 if apart else sum(len(sample.token_ids) for sample in samples)
            return function(self, samples, **given)

        return wrapper

    def compared(*given, **named):  # the canary, on a few tokens
        comparing.append(True)
        try:
            return compare(*given, **named)
        finally:
            comparing.pop()

    compare = frozen.compare
    monkeypatch.setattr(frozen, "compare", compared)
    for method in ("logprobs", "score_norms", "untempered"):
        monkeypatch.setattr(Learner, method, counted(getattr(Learner, method)))
    trew.train(c, display=Silent())
    sampled = pq.read_table(tmp_path / "run" / "rollouts" / "000001.parquet")["token_ids"].to_pylist()
    assert read[0] == passes * sum(map(len, sampled))
    assert times.policy_passes(c, preset(name, **options)) == passes


def test_what_sees_a_whole_step_computes_its_log_probs_before(tmp_path):
    c = config(saved(tmp_path), inner_updates=2)
    by_token, by_step = (
        estimate.estimate(c, machine=MACHINE, objective=preset(n, beta=0.0), prompt=12, held_out=0, rates=RATES)
        for n in ("grpo", "kl-cov")
    )
    assert by_step.seconds["log-probs"] == pytest.approx(3 * by_token.seconds["log-probs"])  # before, and two updates
    tokens = c.rollout.prompts * c.rollout.completions * c.rollout.max_tokens
    assert (by_token.load.step_tokens, by_step.load.step_tokens) == (0, tokens)
    more = by_step.memory.total("training") - by_token.memory.total("training")
    assert more == by_step.memory.parts["training"]["coefficients"] == 4 * tokens
    # A step of so many tokens that nothing else compares with them.
    large = dataclasses.replace(by_step.load, step_tokens=10**8)
    assert coefficients(large, {"gradients": 10**6, "activations": 10**6}) > 63 * 10**8
    assert coefficients(dataclasses.replace(large, heap=False), {}) == 0


BY_STEP = ["m2po", "kl-cov", "clip-cov"]


def test_who_sees_a_whole_step():
    assert [name for name in presets() if preset(name).sees_step] == [*BY_STEP, "dpo"]


@pytest.mark.parametrize("more", [{}, {"beta": 0.1, "correction": "mis+opsm", "nll": 0.1}], ids=["plain", "more"])
@pytest.mark.parametrize("name", BY_STEP)
def test_coefficients_of_a_whole_step_take_what_is_told(name, more):
    """In float32, as the learner gives log-probs; tensors of one number a sequence are few beside these."""
    items = help.samples([(1, (64,) * 4)] * 32)
    objective = preset(name, **help.OVERRIDES.get(name, {}), **more)
    data = help.batch(
        items, **{f"{who}_logprobs": -torch.rand(len(items) * 64) for who in ("old", "ref", "rollout")},
        logprobs=-torch.rand(len(items) * 64), entropies=torch.rand(len(items) * 64),
    )  # fmt: skip
    data = objective.prepare(data)
    with StorageCount() as storages:
        objective.loss(data)
    taken = storages.peak / len(data.mask)
    assert 0.5 * WHOLE_STEP < taken < WHOLE_STEP


def test_phases_add_up_and_knobs_turn_the_right_way(tmp_path):
    folder = saved(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=1)
    sized = {"max_tokens": 200, "prompts": 8, "batch": 2}
    base = made(config(folder, rollout=sized), beta=0.1)
    m = base.memory
    assert m.peak == max(m.total(p) for p in m.parts) == m.total(m.peak_phase)
    whole, sizes = m.parts["training"]["weights"], base.sizes
    by_layer = whole - 4 * (sizes.linear - sizes.linear // sizes.layers)  # pages of the file, given back
    assert m.parts["training"]["reference"] == (by_layer if base.load.body is None else whole)
    assert m.parts["generating"]["reference"] == 0
    assert m.parts["training"]["optimizer"] == 2 * m.parts["training"]["gradients"]
    for every, saved_bytes in ((0, 2 * base.sizes.linear), (1, 0)):  # rounded, where it is not updated
        other = config(folder, rollout=sized, dtype="bfloat16", reference_every=every)
        low = made(dataclasses.replace(other, kernels="plain"), beta=0.1)
        assert {low.memory.parts[p]["reference"] for p in ("generating", "training")} == {whole - saved_bytes}
    smaller = made(config(folder, rollout=sized, microbatch_tokens=256), beta=0.1)
    assert smaller.memory.total("training") < m.total("training")
    assert smaller.memory.parts["generating"]["cache"] == m.parts["generating"]["cache"]
    lora = made(config(folder, lora=LoraConfig(rank=4), rollout=sized), beta=0.1)
    assert lora.memory.parts["training"]["reference"] == 0
    turns = estimate.knobs(base)
    assert all(k.peak < m.peak for k in turns)
    assert any("learner.microbatch_tokens" in k.settings for k in turns)
    assert any("lora.rank = 16" in str(k) for k in turns)


@pytest.mark.parametrize(("older", "correction", "passes"), [(1, "tis", 1), (1, "none", 0), (0, "tis", 0)])
def test_completions_of_older_weights_take_a_pass_where_they_are_corrected(older, correction, passes):
    """As ``frozen._old_logprobs`` decides."""
    c = dataclasses.replace(Config(model="m"), rollout=RolloutConfig(stale_steps=older))
    assert times.policy_passes(c, preset("grpo", beta=0.0, correction=correction)) == passes


def with_critic(c: Config) -> estimate.Estimate:
    return estimate.estimate(c, machine=MACHINE, objective=preset("ppo"), prompt=12, held_out=0, rates=RATES)


def test_a_critic_is_a_second_model_that_is_trained(tmp_path):
    c = config(saved(tmp_path))
    alone, taught, s = made(c), with_critic(c), sizes_of(c)
    count = s.weights - (0 if s.tied else s.head) + s.hidden  # a single output in the place of the head
    assert {phase["critic"] for phase in taught.memory.parts.values()} == {12 * count}
    assert taught.memory.parts["training"]["gradients"] == max(4 * count, 4 * s.weights)
    assert taught.memory.total("training") - alone.memory.total("training") >= 12 * count
    assert taught.seconds["training"] == pytest.approx(2 * alone.seconds["training"])


@pytest.mark.parametrize("budget", [20_000, 64])
def test_a_critics_pass_takes_what_torch_allocates(budget, tmp_path):
    c = config(saved(tmp_path, num_hidden_layers=6, **WIDE), microbatch_tokens=budget)
    found = passes.critic(c, sizes_of(c), prompt=12, device="cpu")
    net = with_value_head(loading.load_model(c.model), std=1.0)
    runner = ValueRunner(net, RunnerSettings(budget=budget))
    runner.verified = True
    ids = np.arange(12)
    items = [TrainingSample(ids, ids[:10], group=i) for i in range(c.rollout.prompts) for _ in range(4)]
    packs = runner.packs(items)
    assert (len(packs) == 1) == (budget == 20_000)
    if len(packs) > 1:
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        runner.accumulate(max(packs, key=lambda p: p.input_ids.size), lambda part, v, _: (torch.ones_like(v), None))
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    took = max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    made_here = 4 * found.weights if len(packs) == 1 else 0
    assert found.activations + made_here == pytest.approx(took, rel=0.05)


def test_a_critic_of_another_model_counts_by_its_own_size(tmp_path):
    larger = saved(tmp_path / "b", num_hidden_layers=4)
    c = config(saved(tmp_path / "a"))
    own, other = with_critic(c), with_critic(dataclasses.replace(c, critic=CriticConfig(model=larger)))
    more = sizes_of(dataclasses.replace(c, model=larger)).weights - own.sizes.weights
    assert other.memory.parts["training"]["critic"] - own.memory.parts["training"]["critic"] == 12 * more
    assert other.memory.total("training") - own.memory.total("training") > 12 * more
    assert other.seconds["training"] > own.seconds["training"]


def test_a_run_that_does_not_fit_is_told_what_to_turn(tmp_path):
    base = made(config(saved(tmp_path), rollout={"max_tokens": 300, "prompts": 4}, microbatch_tokens=8192))
    assert base.fits
    tight = dataclasses.replace(base, machine=dataclasses.replace(MACHINE, free=1001))
    turns = estimate.knobs(tight)
    assert not tight.fits
    assert len(turns[-1].settings) > 1, "all of them together"
    assert turns[-1].peak <= min(k.peak for k in turns)
    assert "DOES NOT FIT" in "\n".join(estimate.table(tight, turns))


RECIPE = """
model = "{model}"
steps = 3
[data]
task = "arithmetic"
[rollout]
prompts = 4
completions = 3
max_tokens = 6
[objective]
preset = "grpo"
beta = 0.01
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(model=saved(tmp_path)))
    return str(path)


@pytest.fixture
def few(monkeypatch):
    """Two settings to try: each is an estimate of its own, and what all of them save is tested above."""
    candidates = advice._candidates
    monkeypatch.setattr(advice, "_candidates", lambda now: itertools.islice(candidates(now), 2))


def call(*args: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", *args])
    assert left.value.code == code


def test_the_command_says_it_all_and_loads_no_weights(recipe, capsys, monkeypatch, few):
    monkeypatch.setattr(loading, "load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    call(recipe)
    text = capsys.readouterr().out
    for word in ("weights", "gradients", "optimizer", "reference", "cache", "activations", "peak about", "s a step"):
        assert word in text
    assert re.search(r"^eval +\d+ prompts x 1 completion of up to \d+; \d+ rows decoded at once$", text, re.MULTILINE)
    call(recipe, "--json", "--set", "lora.rank=4", "kernels=plain")
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] == max(sum(parts.values()) for parts in found["memory"].values())
    assert found["native"] == {"generating": False, "training": False}
    assert found["trained"] < found["weights"]
    assert set(found["memory"]) == {"generating", "evaluating", "training", "exporting"}
    assert found["fits"] is True


def test_its_exit_code_says_whether_it_fits(recipe, capsys, monkeypatch, few):
    monkeypatch.setattr(estimating, "free_bytes", lambda device: 0)
    monkeypatch.setattr(estimating, "used_bytes", lambda: 1)
    call(recipe, code=1)
    assert "DOES NOT FIT" in capsys.readouterr().out
    call(recipe, "--set", "lora.dropout=0.5", code=2)
