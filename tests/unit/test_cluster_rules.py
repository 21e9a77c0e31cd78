"""The rules of the table [cluster]: every wrong value is named together, with what is accepted."""

import pytest

from trew.config import dumps, parse
from trew.config.cluster import RESERVED
from trew.errors import ConfigError

BASE = {"model": "m", "out": "o"}


def problems(**cluster):
    given = {} if cluster.keys() & {"servers", "endpoints"} else {"endpoints": ["unix:/given"]}
    try:
        parse({**BASE, "cluster": {"rollout": "vllm", **given, **cluster}})
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"servers": -1}, "cluster.servers: got -1, accepts a whole number of at least 0"),
        ({"server_gpus": 0}, "cluster.server_gpus: got 0, accepts a whole number of at least 1"),
        ({"servers": 5000, "rollout": "embedded"}, "cluster.servers: got 5000, accepts at most 1,024"),
        ({"request_timeout_s": 0.0}, "cluster.request_timeout_s: got 0.0, accepts a number of seconds above 0"),
        ({"sync_timeout_s": float("nan")}, "cluster.sync_timeout_s: got nan"),
        ({"endpoints": ["10.0.0.1:8000"]}, "cluster.endpoints[0]: got '10.0.0.1:8000', accepts addresses like"),
        ({"endpoints": ["unix:/a", "unix:/a"]}, "cluster.endpoints[1]: got 'unix:/a' twice"),
        ({"endpoints": ["unix:/a"], "servers": 2}, "cluster.endpoints: got 1 with cluster.servers = 2"),
        ({"rollout": "vllm", "endpoints": []}, "cluster.rollout: got 'vllm' without servers"),
        ({"rollout": "embedded", "servers": 2}, "cluster.servers: got 2 with cluster.rollout = 'embedded'"),
        ({"rollout": "embedded", "servers": 0, "sync": "files"}, "cluster.sync: got 'files' with"),
        ({"rollout": "embedded", "servers": 0, "server_gpus": 2}, "cluster.server_gpus: got 2 with cluster.rollout"),
        ({"rollout": "embedded", "servers": 0, "sync_timeout_s": 9.0}, "cluster.sync_timeout_s: got 9.0 with cluster."),
        ({"rollout": "embedded", "servers": 0, "request_timeout_s": 9.0}, "cluster.request_timeout_s: got 9.0 with"),
        ({"sync": "mpi"}, "cluster.sync: got 'mpi', accepts 'auto', 'files', 'nccl', 'ipc'"),
        (
            {"sync": "ipc", "endpoints": ["http://127.0.0.1:8000", "http://10.0.0.1:8000"]},
            "cluster.sync: got 'ipc' with 'http://10.0.0.1:8000' in cluster.endpoints; only servers on the host of",
        ),
        ({"sync": "nccl", "servers": 1, "colocate": True}, "cluster.sync: got 'nccl' with cluster.colocate = true;"),
        ({"colocate": True}, "cluster.colocate: got true with cluster.endpoints; only servers that the run starts"),
        ({"rollout": "embedded", "servers": 0, "colocate": True}, "cluster.colocate: got True with cluster.rollout"),
        ({"server_args": {"enable-sleep-mode": True}}, "cluster.server_args.enable-sleep-mode: got True, but"),
        ({"server_args": {"seed": 3}}, "cluster.server_args.seed: got 3, but trew sets seed itself: the"),
        ({"server_args": {"max_model_len": 9}}, "cluster.server_args.max_model_len: got 9, but trew sets max"),
        ({"server_args": {"--dtype": "half"}}, "cluster.server_args.--dtype: got 'half', but trew sets dtype"),
        ({"server_args": {"logprobs-m": "raw"}}, "cluster.server_args.logprobs-m: got 'raw', but trew sets logpro"),
        ({"server_args": {"no-enable-scale-out": True}}, "cluster.server_args.no-enable-scale-out: got True, but"),
        ({"server_args": {"weight-transfer-config.backend": "nccl"}}, "cluster.server_args.weight-transfer-"),
        ({"server_args": {"a b": 1}}, "cluster.server_args.a b: is not the name of an option"),
        ({"server_args": {"swap-space": [[1]]}}, "cluster.server_args.swap-space: got [[1]] (list), accepts"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(cluster, said):
    found = problems(**cluster)
    assert len(found) == 1
    assert found[0].startswith(said)


@pytest.mark.parametrize(
    ("section", "value", "said"),
    [
        ("rollout", 0.005, "rollout.temperature: got 0.005 with cluster.rollout = 'vllm', accepts 0.01 to 2: vLLM"),
        ("rollout", 2.5, "rollout.temperature: got 2.5 with cluster.rollout = 'vllm', accepts 0.01 to 2: vLLM"),
        ("eval", 0.005, "eval.temperature: got 0.005 with cluster.rollout = 'vllm', accepts 0, or 0.01 to 2: vLLM"),
        ("eval", 0.0, ""),
        ("rollout", 0.01, ""),
        ("rollout", 2.0, ""),
    ],
)
def test_temperatures_are_those_that_vllm_samples_at(section, value, said):
    """It takes 0.005 for 0.01, while the learner would compute at 0.005."""
    given = {**BASE, section: {"temperature": value}}
    parse(given)
    servers = {**given, "cluster": {"rollout": "vllm", "servers": 1}}
    if not said:
        parse(servers)
        return
    with pytest.raises(ConfigError) as error:
        parse(servers)
    [problem] = error.value.problems
    assert problem.startswith(said)


def test_a_teacher_s_server_and_a_replay_have_a_limit_of_waiting_too():
    cluster = {"request_timeout_s": 9.0}
    assert parse({**BASE, "cluster": cluster, "rollout": {"replay": "runs/one"}}).cluster.request_timeout_s == 9
    taught = {"objective": {"preset": "opd"}, "teacher": {"endpoint": "unix:/t"}}
    assert parse({**BASE, "cluster": cluster, **taught}).cluster.request_timeout_s == 9


def test_all_problems_are_told_at_once():
    assert len(problems(servers=-1, server_gpus=0, sync_timeout_s=-1.0, endpoints=["x"], server_args={"port": 1})) == 5


@pytest.mark.parametrize("name", RESERVED)
def test_no_option_that_trew_sets_itself_can_be_given(name):
    (said,) = problems(server_args={name.replace("-", "_"): 1})
    assert "itself: " in said


def test_other_options_of_vllm_survive_toml():
    given = {
        "max-num-seqs": 64, "enable_prefix_caching": False, "gpu-memory-utilization": 0.5, "config-format": "hf",
        "compilation-config": {"level": 0}, "compilation-config.mode": 3, "allowed-origins": ["*"],
    }  # fmt: skip
    config = parse({**BASE, "cluster": {"rollout": "vllm", "server_args": given, "servers": 1}})
    assert dict(config.cluster.server_args) == given
    assert "gpu-memory-utilization" in dumps(config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"learner": {"optimizer": "adamw-8bit"}}, "learner.optimizer: got 'adamw-8bit', accepts 'adamw' or"),
        ({"lora": {"rank": 2, "base": "nf4"}}, "lora.base: got 'nf4', accepts 'float32' or 'bfloat16'"),
    ],
)
def test_what_cannot_leave_a_gpu_is_refused_with_colocate(settings, said):
    cluster = {"rollout": "vllm", "servers": 1, "colocate": True}
    with pytest.raises(ConfigError) as error:
        parse({**BASE, **settings, "cluster": cluster})
    assert [line for line in error.value.problems if line.startswith(said)]
    assert parse({**BASE, **settings, "cluster": {**cluster, "colocate": False}})
