"""The work that step.py measures, defined once for all sides: models, prompts, settings, and how a process is watched.

Imported by processes that have no trew (the peer's environment), so that nothing here needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPES: dict[str, dict[str, Any]] = {
    # about 5 M parameters
    "A": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 2048, "tie_word_embeddings": True},
    # SmolLM2-135M
    "B": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
          "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    # Qwen2.5-0.5B: a large vocabulary on a small body
    "C": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
          "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    # 503 M parameters, of which a tenth is the head: for memory
    "D": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 36, "num_attention_heads": 16,
          "num_key_value_heads": 8, "vocab_size": 49152, "tie_word_embeddings": True},
    # the vocabulary of C on the body of A
    "V": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": True},
    # for a quick look whether everything runs
    "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True},
}  # fmt: skip
BATCHES = {"A": (16, 8), "B": (2, 8), "C": (16, 8), "D": (1, 2), "tiny": (4, 8)}
"""Prompts per step, completions per prompt."""

MEAN_END = 40
"""Ragged completions end after any token with probability 1 / 40: with at most 64 tokens, their mean is 32."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One process's work: ``steps`` sets of rollouts, each with its ``inner`` updates, after one more as a warm-up."""

    shape: dict[str, Any]
    prompts: int
    group: int
    prompt_tokens: int = 96
    completion_tokens: int = 64
    ragged: bool = False
    beta: float = 0.0
    inner: int = 1
    dtype: str = "float32"
    peer_defaults: bool = False  # the peer's own choice of precision, checkpointing and micro-batch
    peer_rows: int = 0  # sequences that the peer has in one micro-batch; 0 = all
    train: bool = True  # False: completions are generated and nothing is learned
    greedy: bool = False
    device: str = "cpu"
    threads: int = 0
    steps: int = 2
    overrides: tuple[str, ...] = ()  # of our configuration: key=value

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text()))


# ------------------------------------------------------------------------------------------------ models and prompts


def model_of(shape: dict[str, Any], *, positions: int = 2048) -> LlamaForCausalLM:
    """A model with random weights, always the same ones."""
    torch.manual_seed(0)
    end = shape["vocab_size"] - 1
    return LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=positions, bos_token_id=None, eos_token_id=end)
    )


def save_model(folder: Path, shape: dict[str, Any], *, positions: int = 2048) -> None:
    """A model with random weights and a tokenizer of as many words as it has embeddings, in Hugging Face layout."""
    transformers.logging.disable_progress_bar()
    model_of(shape, positions=positions).save_pretrained(folder)
    words = [f"w{i}" for i in range(shape["vocab_size"] - 1)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    assert len(tokenizer) == shape["vocab_size"]
    tokenizer.save_pretrained(folder)


def texts(work: Work) -> list[str]:
    """Distinct prompts for all steps, each of exactly ``prompt_tokens`` words."""
    draw = torch.Generator().manual_seed(1)
    size = ((1 + work.steps) * work.prompts, work.prompt_tokens)
    ids = torch.randint(0, work.shape["vocab_size"] - 1, size, generator=draw)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def rewards(count: int) -> list[float]:
    """1, 0, 1, 0, ...: every group has a signal, on both sides the same one."""
    return [float(i % 2 == 0) for i in range(count)]


def end_ids(work: Work) -> list[int]:
    """The end tokens of ragged work: so many that a model with random weights draws one with probability 1 / 40."""
    vocabulary = work.shape["vocab_size"]
    return list(range(vocabulary - max(1, round(vocabulary / MEAN_END)), vocabulary))


class EndAt:
    """A logits processor that ends row i with its ``lengths[i]``-th token, and never before: what our side drew."""

    def __init__(self, lengths: list[int], *, prompt_tokens: int, end: int):
        self.prompt_tokens, self.end = prompt_tokens, end
        self.rows: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            self.rows[length].append(row)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.end] = -torch.inf
        if rows := self.rows.get(input_ids.shape[1] - self.prompt_tokens + 1):
            scores[rows] = -torch.inf
            scores[rows, self.end] = 0.0
        return scores


# --------------------------------------------------------------------------------------------------------- the clocks


class Clock:
    """Seconds by phase, per step. On a GPU every reading waits until its work is done."""

    def __init__(self, device: str):
        self.device = device
        self.now: dict[str, float] = defaultdict(float)
        self.inside: list[str] = []

    def time(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts for ``name``, unless another phase is open: then it belongs to that one."""
        outermost = not self.inside
        start = self.time() if outermost else 0.0
        self.inside.append(name)
        try:
            yield
        finally:
            self.inside.pop()
            if outermost:
                self.now[name] += self.time() - start

    def wrap(self, owner: Any, method: str, name: str | Callable[..., str]) -> None:
        """From here on, calls of ``owner.method`` count for phase ``name``, or for the one that ``name(...)`` says."""
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(*args, **kwargs)):
                return function(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        found, self.now = dict(self.now), defaultdict(float)
        return found


class Watch:
    """Memory of this process from here on, and how busy others keep the machine. Made once the model is loaded."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again; Linux alone has this
        self.loaded = self._memory("VmRSS")
        self.load = Load()

    def _memory(self, field: str) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated() if field == "VmHWM" else torch.cuda.memory_allocated()
        status = Path("/proc/self/status")
        if not status.exists():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        line = next(x for x in status.read_text().splitlines() if x.startswith(field))
        return 1024 * int(line.split()[1])

    def result(self) -> dict[str, Any]:
        # Both are sums over threads that the kernel brings up to date now and then: the peak may seem the smaller one.
        peak = max(self._memory("VmHWM"), self.loaded)
        return {"loaded_bytes": self.loaded, "peak_bytes": peak, "foreign_cpu": self.load.foreign()}


class Load:
    """How busy others keep this machine, from the making of this object on."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), busy_seconds(), own_seconds()

    def foreign(self) -> float:
        """Cores that other processes kept busy, on average, or other guests of the same host took away."""
        now = time.perf_counter(), busy_seconds(), own_seconds()
        wall, busy, own = (b - a for a, b in zip(self.start, now, strict=True))
        return max(busy - own, 0.0) / wall


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used; 0 where that cannot be seen."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(patience: float, *, below: float = 0.15) -> None:
    """Returns as soon as less than ``below`` cores were busy for two seconds, or after ``patience`` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(2)
        if busy_seconds() - before < 2 * below:
            return


def own_seconds() -> float:
    """CPU seconds of this process and of what it waited for."""
    return sum(os.times()[:4])
