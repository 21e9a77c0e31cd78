"""Pages of weights that lie in files: gone when they were given back, the same when they are read again; and never one
that somebody wrote."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import cpu_help as cpu
import learner_help as help
from trew.backends.cpu import build, file_backed
from trew.backends.cpu.backend import CpuBackend
from trew.backends.cpu.file_backed import FileBacked
from trew.objective import preset

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says which pages are whose")
PAGE = mmap.PAGESIZE


def there(tensor) -> int:
    """Pages that hold nothing but this tensor and are in the process's memory."""
    ((start, stop),) = file_backed._whole_pages([tensor], [(0, 1 << 62)])
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(start // PAGE * 8)
        entries = memoryview(table.read((stop - start) // PAGE * 8)).cast("Q")
    return sum(bool(e & file_backed.PRESENT) for e in entries)


@pytest.fixture
def pair(tmp_path):
    """Two tensors of a mapped file, side by side, 100 and a half pages each."""
    count = (100 * PAGE + PAGE // 2) // 4
    given = {"a": torch.arange(count, dtype=torch.float32), "b": -torch.arange(count, dtype=torch.float32)}
    save_file(given, tmp_path / "x.safetensors")
    length = int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    whole = torch.from_file(str(tmp_path / "x.safetensors"), shared=False, size=(8 + length + 8 * count) // 4)
    assert (8 + length) % 4 == 0
    first = (8 + length) // 4
    a, b = whole[first : first + count], whole[first + count : first + 2 * count]
    assert torch.equal(a, given["a"])
    assert torch.equal(b, given["b"])
    return a, b, given


def test_pages_go_and_come_again(pair):
    a, b, given = pair
    weights = FileBacked([[a], [b]])
    before = there(b)
    assert there(a) >= 99
    weights.release_pages(0)
    assert there(a) == 0
    assert there(b) == before >= 99  # not even the page that both have a part of
    assert torch.equal(a, given["a"])
    assert torch.equal(b, given["b"])
    assert there(a) >= 99


@pytest.mark.parametrize("at", [700, -700])
def test_what_was_written_stays(pair, at):
    a, b, given = pair
    weights = FileBacked([[a, b]])
    a[at] = 0.5
    weights.release_pages(0)
    assert a[at] == 0.5
    a[at] = given["a"][at]
    assert torch.equal(a, given["a"])
    assert torch.equal(b, given["b"])


def test_what_lies_in_no_file_stays():
    tensor = torch.arange(1 << 16, dtype=torch.float32)
    weights = FileBacked([[tensor, torch.zeros(0)], []])
    weights.release_all()
    assert torch.equal(tensor, torch.arange(1 << 16, dtype=torch.float32))


def test_where_the_kernel_does_not_say_whose_a_page_is_nothing_is_given_back(pair, monkeypatch):
    a, _, _ = pair
    weights, before = FileBacked([[a]]), there(a)

    def refused(*_):
        raise PermissionError

    with monkeypatch.context() as changed:
        changed.setattr(file_backed.os, "open", refused)
        weights.release_pages(0)
    assert there(a) == before


WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_reference_does_not_stay_in_memory(kernels, dtype, tmp_path, monkeypatch):
    if kernels and isinstance(build.library(), str):
        pytest.skip("no compiler")
    help.model(seed=5, **WIDE).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    layers = [[p for p in layer.parameters() if p.dim() > 1] for layer in reference.model.layers]
    options = {"backend": CpuBackend(layers=kernels), "dtype": dtype, "microbatch_tokens": 32}
    learner = cpu.learner(help.model(**WIDE), preset("grpo", beta=0.1), reference=reference, **options)
    items, left = help.samples(), []
    give_back = FileBacked.release_pages

    def watched(self, part):
        left.append((part, there(layers[0][0]), sum(map(there, layers[1]))))
        give_back(self, part)

    monkeypatch.setattr(FileBacked, "release_pages", watched)
    found = learner.logprobs(items, reference=True)
    assert sum(there(p) for layer in layers for p in layer) == 0
    own = cpu.learner(help.model(**WIDE), preset("grpo", beta=0.1), reference=help.model(seed=5, **WIDE), **options)
    assert torch.equal(found, own.logprobs(items, reference=True))
    if kernels:  # layer by layer: the second is read when the first has gone
        assert [part for part, *_ in left[:2]] == [0, 1]
        assert left[1][1] == 0
        assert left[1][2] > 0
        passes = [part for part, *_ in left].count(0)
        assert passes > 2  # several micro-batches, and the end


def test_a_reference_that_is_updated_keeps_what_was_written(tmp_path):
    help.model(seed=5).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    learner = cpu.learner(
        help.model(), preset("grpo", beta=0.1), reference=reference, reference_every=1, reference_mix=1.0
    )
    items = help.samples()
    learner.logprobs(items, reference=True)
    learner.update_reference()
    for _ in range(2):
        assert torch.equal(learner.logprobs(items, reference=True), learner.logprobs(items))
