import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trew.backends.cpu import arena

GROWTH = """
import ctypes, resource, sys
from trew.backends.cpu import arena as heap
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

    plain = faults("plain")
    assert plain > 1000  # 2.5 GiB, in pages of whatever size the machine gives
    assert faults("keep") * 10 < plain


APART = """
import resource
from trew.backends.cpu import arena as heap
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


@pytest.mark.nightly  # of speed alone; two new processes each
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_was_freed_grows_together_again():
    run = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 24


INSIDE = """
import sys
from trew.backends.cpu import arena as heap
import torch
if sys.argv[1] == "plain":
    heap._room_for_small = lambda: None
assert heap.keep_freed_memory()
large = [torch.ones((1 << 20) + 7) for _ in range(24)]
first, last = min(t.data_ptr() for t in large), max(t.data_ptr() for t in large)
del large
c = heap._c_library()
small = [size for size in (24, 40, 56, 120) for _ in range(600)]  # more than imports have left behind
print(sum(first <= c.malloc(size) <= last for size in small + 25 * [500, 1000, 3000]))
"""


@pytest.mark.nightly  # of speed alone; two new processes each
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_small_objects_do_not_come_to_lie_where_large_blocks_were():
    def inside(how):
        run = subprocess.run([sys.executable, "-c", INSIDE, how], capture_output=True, text=True, check=True)
        return int(run.stdout)

    if inside("plain") == 0:
        pytest.skip("here the allocator keeps them apart by itself")
    assert inside("apart") == 0


HOLES = """
from trew.backends.cpu import arena as heap
import torch
from trew.utils.memory import return_freed, used_bytes
assert heap.keep_freed_memory()
blocks = [torch.ones(1 << 20) for _ in range(50)]  # 4 MiB each
full = used_bytes()
blocks = blocks[::2]  # what is left lies between what was freed
torch.ones(1 << 20)
kept = used_bytes()
return_freed()
print((full - kept) >> 20, (full - used_bytes()) >> 20, all(bool((b == 1).all()) for b in blocks))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_was_freed_is_given_back_from_between_what_is_left():
    run = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    kept, given, same = run.stdout.split()
    assert int(kept) < 20
    assert int(given) > 80
    assert same == "True"


def test_an_arena_that_gives_back_has_nothing_unless_it_is_leased():
    room = arena.Arena()
    with room.lease() as held:
        here = held.alloc(1000, dtype=torch.float32).fill_(3)
        room.give_back()
        again = held.alloc(10, dtype=torch.float32).fill_(4)
        assert (here == 3).all()
        assert (again == 4).all()
        assert room._blocks
    room.give_back()
    assert not room._blocks
    assert (here == 3).all(), "whoever still has it keeps it"


def test_zeros_of_their_own_mapping_are_zeros_and_do_not_overlap():
    shapes = [(), (3,), (5, 7), (1000, 999)]
    made = arena.zeros(shapes)
    assert [tuple(t.shape) for t in made] == shapes
    assert all(t.dtype == torch.float32 and t.data_ptr() % 64 == 0 and not t.any() for t in made)
    for number, t in enumerate(made):
        t.fill_(number)
    assert all((t == number).all() for number, t in enumerate(made))
    assert arena.zeros([]) == []


ADVISED = """
from trew.backends.cpu import arena as heap
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
    assert arena.keep_freed_memory() is False


def addresses(room, *sizes):
    with room.lease() as held:
        return [held.alloc(size, dtype=torch.float32).data_ptr() for size in sizes]


def test_a_room_gives_the_same_memory_turn_after_turn():
    room = arena.Arena()
    addresses(room, 100, 3000)
    first = addresses(room, 100, 3000, 7)  # what was not enough in the first turn is made once
    assert addresses(room, 100, 3000, 7) == first
    assert all(a % 64 == 0 for a in first)
    assert first[1] - first[0] == 7 * 64, "one after the other, as whole lines of a cache"
    with room.lease() as held:
        parts = [held.alloc(50, n, dtype=torch.bfloat16) for n in (3, 1000, 40_000)]
        for i, part in enumerate(parts):
            part.fill_(i)
        assert [part.float().mean().item() for part in parts] == [0, 1, 2], "nobody has another's, across blocks too"
        assert parts[2].shape == (50, 40_000)


def test_a_room_gives_what_is_taken_for_a_while_again():
    with arena.Arena().lease() as room:
        kept = room.alloc(10, dtype=torch.float32)
        seen = []
        for _ in range(3):
            with room.again():
                seen.append(room.alloc(1000, dtype=torch.float32).data_ptr())
        assert seen[1] == seen[2]
        assert kept.data_ptr() not in seen


def test_a_room_that_is_held_is_nobody_else_s():
    room = arena.Arena()
    with room.lease() as mine:
        a = mine.alloc(100, dtype=torch.float32).fill_(1)
        with room.lease() as other:
            assert other is not room
            other.alloc(100, dtype=torch.float32).fill_(2)
        assert (a == 1).all()
    with pytest.raises(ZeroDivisionError), room.lease():
        raise ZeroDivisionError
    with room.lease() as again:
        assert again is room
