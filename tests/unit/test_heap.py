import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trew import heap

GROWTH = """
import ctypes, resource, sys
from trew import heap
import torch
if sys.argv[1] == "keep":
    assert heap.keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for i in range(50):
    if i == 10:
        before = faults()
    x = torch.ones(8 << 20)  # 32 MiB
    y = torch.ones(8 << 20)
    del x, y
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_memory_that_was_freed_is_taken_again():
    def faults(how):
        return int(
            subprocess.run([sys.executable, "-c", GROWTH, how], capture_output=True, text=True, check=True).stdout
        )

    assert faults("plain") > 1000  # 2.5 GiB, in pages of whatever size the machine gives
    assert faults("keep") * 10 < faults("plain")


APART = """
import resource
from trew import heap
import numpy as np
import torch
assert heap.keep_freed_memory()
alive = []
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(6):
    large = [torch.ones((1 << 20) + 7) for _ in range(24)]  # 96 MiB
    alive = [np.ones(size, dtype=bool) for size in (64, 32, 48, 500, 3000) for _ in range(25)]  # outlives them
    if i == 0:
        before = peak()
    del large
print((peak() - before) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_was_freed_grows_together_again():
    run = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 24


INSIDE = """
import sys
from trew import heap
import torch
if sys.argv[1] == "plain":
    heap._room_for_small = lambda: None
assert heap.keep_freed_memory()
large = [torch.ones((1 << 20) + 7) for _ in range(24)]
first, last = min(t.data_ptr() for t in large), max(t.data_ptr() for t in large)
del large
c = heap._c_library()
print(sum(first <= c.malloc(size) <= last for size in (24, 40, 56, 120, 500, 1000, 3000) for _ in range(25)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_small_objects_do_not_come_to_lie_where_large_blocks_were():
    def inside(how):
        run = subprocess.run([sys.executable, "-c", INSIDE, how], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert inside("plain") > 0
    assert inside("apart") == 0


def test_zeros_of_their_own_mapping_are_zeros_and_do_not_overlap():
    shapes = [(), (3,), (5, 7), (1000, 999)]
    made = heap.zeros(shapes)
    assert [tuple(t.shape) for t in made] == shapes
    assert all(t.dtype == torch.float32 and t.data_ptr() % 64 == 0 and not t.any() for t in made)
    for number, t in enumerate(made):
        t.fill_(number)
    assert all((t == number).all() for number, t in enumerate(made))
    assert heap.zeros([]) == []


ADVISED = """
from trew import heap
assert heap.keep_freed_memory()
maps, where = open("/proc/self/smaps").read().split("VmFlags:"), []
for before, after in zip(maps, maps[1:]):
    if "[heap]" in before:
        where.append(" hg" in after.splitlines()[0])
print(any(where))
"""


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without transparent huge pages"
)
def test_what_the_heap_grows_by_may_lie_in_huge_pages():
    done = subprocess.run([sys.executable, "-c", ADVISED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_it_says_so_where_there_is_no_such_setting(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert heap.keep_freed_memory() is False
