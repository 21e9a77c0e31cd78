"""Landlock and seccomp without bubblewrap: the fallback for containers that forbid user namespaces.

A process gives up its own rights before it executes the untrusted program.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from ...isolation.lifelines import die_with_parent
from . import seccomp

# landlock_create_ruleset, landlock_add_rule, landlock_restrict_self: the same numbers on every architecture.
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
# LANDLOCK_ACCESS_FS_…, the first four of them, and the options of prctl.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_NO_NEW_PRIVS, _SECCOMP, _CAPBSET_DROP = 38, 22, 24
_O_PATH = getattr(os, "O_PATH", 0) | os.O_CLOEXEC  # O_PATH is Linux only; this module is imported everywhere
_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Returns the kernel's Landlock ABI version; 0 if it is missing or disabled."""
    # LANDLOCK_CREATE_RULESET_VERSION (1) asks for the version. An error is -1, hence the max.
    return max(_libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)), 0)


def ruleset(readable: Sequence[str], listable: Sequence[str] = (), *, devices: Sequence[str] = ()) -> int:
    """Makes a ruleset and returns its descriptor. Files and folders in ``readable`` may be read and executed, names in
    ``listable`` listed, ``devices`` read and written. Nothing else may be opened, and nothing created.

    Raises OSError if the kernel refuses.
    """
    # The kernel refuses unknown bits, so the masks grow with the ABI: 13 file rights in version 1, then REFER (2),
    # TRUNCATE (3) and IOCTL_DEV (5); TCP bind and connect since 4; scopes (abstract sockets, signals) since 6.
    abi = version()
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    attributes = struct.pack("=QQQ", files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8  # bytes of the struct that this version knows
    rules = _checked(_libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)))
    os.set_inheritable(rules, False)
    for paths, rights in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (listable, _READ_DIR),
                          (devices, _READ_FILE | _WRITE_FILE)):  # fmt: skip
        for path in paths:
            # The kernel refuses a rule with READ_DIR for anything but a folder.
            _allow(rules, path, rights if Path(path).is_dir() else rights & ~_READ_DIR)
    return rules


def _allow(rules: int, path: str, rights: int) -> None:
    parent = os.open(path, _O_PATH)
    try:
        rule = struct.pack("=Qi", rights, parent)  # struct landlock_path_beneath_attr, which is packed
        _checked(_libc.syscall(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint32(0)))
    finally:
        os.close(parent)


def give_up_rights(rules: int, *, user: int | None) -> None:
    """Irrevocably drops this process's rights. Called in a fresh child, before it executes the program.

    ``user`` is the user that root becomes; without one, root only loses its capabilities.
    """
    die_with_parent()
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # unchecked: fails for numbers that the kernel does not know
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        die_with_parent()  # the change of user cleared it
    # Landlock and seccomp both require this of a process without CAP_SYS_ADMIN.
    _checked(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_libc.syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0)))
    # Seccomp last: its list lacks most of the calls above. The pid is known already, since exec keeps it.
    code = seccomp.program(own_pid=os.getpid())
    held = ctypes.create_string_buffer(code, len(code))

    class FilterProgram(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = FilterProgram(len(code) // 8, ctypes.cast(held, ctypes.c_void_p).value)
    _checked(_libc.prctl(_SECCOMP, 2, ctypes.byref(program), 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
