"""Landlock and seccomp without bubblewrap: the second choice, for containers in which no user namespace can be made.

A process gives up its own rights before it becomes the untrusted program.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from . import seccomp

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_NO_NEW_PRIVS, _SECCOMP, _PDEATHSIG, _DUMPABLE, _CAPBSET_DROP = 38, 22, 1, 4, 24
_SIGKILL = 9
_O_PATH = getattr(os, "O_PATH", 0) | os.O_CLOEXEC  # Linux; this module is imported everywhere
_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Landlock's version in this kernel; 0 where it is missing or switched off."""
    return max(_libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)), 0)


def ruleset(readable: Sequence[str], listable: Sequence[str] = (), *, devices: Sequence[str] = ()) -> int:
    """A descriptor of rules: ``readable`` files and folders may be read and executed, names in ``listable`` be listed,
    ``devices`` be read and written; nothing else may be opened, and nothing at all be created.

    Raises OSError where the kernel refuses.
    """
    abi = version()
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1  # every right of files that this version knows
    attributes = struct.pack("=QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = _checked(_libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)))
    os.set_inheritable(rules, False)
    for paths, rights in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (listable, _READ_DIR),
                          (devices, _READ_FILE | _WRITE_FILE)):  # fmt: skip
        for path in paths:
            _allow(rules, path, rights if Path(path).is_dir() else rights & ~_READ_DIR)
    return rules


def _allow(rules: int, path: str, rights: int) -> None:
    parent = os.open(path, _O_PATH)
    try:
        rule = struct.pack("=Qi", rights, parent)
        _checked(_libc.syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0)))
    finally:
        os.close(parent)


def give_up_rights(rules: int, *, user: int | None) -> None:
    """Called in a fresh child, before it becomes the program: from here on there is no way back.

    ``user`` is whom to become where this is root; root that cannot become anybody else loses its capabilities.
    """
    _checked(_libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0))
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers that the kernel does not have
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        _checked(_libc.prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0))  # a change of user clears it
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_libc.syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0)))
    code = seccomp.program(own_pid=os.getpid())
    held = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p).value)
    _checked(_libc.prctl(_SECCOMP, 2, ctypes.byref(program), 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
