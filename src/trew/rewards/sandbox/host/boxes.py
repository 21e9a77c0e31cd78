"""Starts a process behind one of the two boundaries: bubblewrap, or landlock with seccomp."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...isolation import tree
from ...isolation.lifelines import adopt_orphans
from . import landlock, runtime, seccomp, stage

NOBODY = 65534
WORK_BYTES = 16 << 20  # size of the folder that a program may write in
_NEIGHBOURS = 4  # programs of one user at once that its limit of tasks leaves room for


@dataclass(frozen=True, slots=True)
class Design:
    """A boundary and its user: ``user`` None keeps the caller's; ``staged`` mounts the runtime first."""

    kind: Literal["bubblewrap", "landlock"]
    user: int | None = None
    staged: bool = False


def designs() -> list[Design]:
    """Lists the designs that could work here, best first. ``choose.self_test`` decides which one does."""
    found: list[Design] = []
    root = os.geteuid() == 0
    if not seccomp.supported():
        return found
    if shutil.which("bwrap"):
        if root:  # RLIMIT_NPROC does not bind root: become nobody first where possible
            found += [Design("bubblewrap", NOBODY, True), Design("bubblewrap", NOBODY)]
        found.append(Design("bubblewrap"))
    if landlock.version():
        if root:
            found.append(Design("landlock", NOBODY))
        found.append(Design("landlock"))
    return found


class Boxes:
    """Starts programs behind one boundary. Made once per process, because a stage changes the process's mounts."""

    def __init__(self, design: Design):
        self.design = design
        self.runtime = runtime.find()
        adopt_orphans()  # of a box, which this process can then kill and reap
        self._filter = self._rules = -1
        if design.kind == "bubblewrap":
            self._bwrap = os.path.realpath(shutil.which("bwrap") or "bwrap")
            # Options are looked up in the help: older releases of bubblewrap lack some of them.
            self._has = subprocess.run([self._bwrap, "--help"], capture_output=True, text=True, check=False).stdout
            self._root = (
                stage.build(self.runtime, keep=(self._bwrap, os.path.realpath(__file__))) if design.staged else ""
            )
            self._filter = sealed(seccomp.program())
            self._arguments = self._bwrap_arguments()
        else:
            library = Path(self.runtime.library)
            # Landlock grants whole subtrees and cannot exclude one, so the entries of the library are granted one by
            # one, without site-packages.
            parts = [str(p) for p in library.iterdir() if str(p) not in self.runtime.hidden]
            files = [real for _, real in self.runtime.files]
            self._rules = landlock.ruleset([*parts, *files], [str(library)], devices=["/dev/null", "/dev/urandom"])

    def task_limit(self, processes: int) -> int:
        """Returns RLIMIT_NPROC for a program that may have ``processes``.

        In bubblewrap's user namespace the kernel counts the program's tasks alone. Behind Landlock it counts all tasks
        of the user, so the limit adds the tasks there are, and room for neighbours that start later. That is safe:
        seccomp forbids new processes there, and the supervisor counts each program's threads.
        """
        if self.design.kind == "bubblewrap":
            return processes
        user = os.geteuid() if self.design.user is None else self.design.user
        return _NEIGHBOURS * processes + tree.tasks_of_user(user)

    def start(self, arguments: Sequence[str], *, stdin: int, stdout: int, stderr: int, keep: Sequence[int]) -> int:
        """Starts the interpreter with ``arguments`` in a fresh box; returns the pid of a child process."""
        command = [self.runtime.python, "-I", "-S", "-B", "-X", "utf8", *arguments]
        become = self._become_nobody() if self.design.kind == "bubblewrap" else self._give_up_rights()
        opened: list[int] = []
        if self.design.kind == "bubblewrap":
            # Reopened, not duplicated: a duplicate would share the file offset, at its end after the first box.
            opened = [os.open(f"/proc/self/fd/{self._filter}", os.O_RDONLY)]
            command = [*self._arguments, "--seccomp", str(opened[0]), "--", *command]
        try:
            process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=[*keep, *opened],
                                       env={}, cwd="/", start_new_session=True, preexec_fn=become)  # fmt: skip
        finally:
            for descriptor in opened:
                os.close(descriptor)
        process.returncode = 0  # the supervisor waits for the pid itself; Popen must not reap it
        return process.pid

    def _become_nobody(self) -> Callable[[], None] | None:
        user = self.design.user
        if user is None:
            return None

        def become() -> None:
            # Groups first, the user last: without root's rights neither groups nor group can be changed.
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)

        return become

    def _give_up_rights(self) -> Callable[[], None]:
        return lambda: landlock.give_up_rights(self._rules, user=self.design.user)

    def _bwrap_arguments(self) -> list[str]:
        # Namespaces and rights: nothing is shared, and no capability is left.
        made = [
            self._bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
            "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox",
        ]  # fmt: skip
        if "--clearenv" in self._has:
            made.append("--clearenv")
        if "--disable-userns" in self._has:
            made.append("--disable-userns")
        # The runtime, read-only.
        if self._root:
            made += ["--ro-bind", self._root, "/"]
        else:
            for path, real in self.runtime.mounts:
                made += ["--ro-bind", real, path]
            for hidden in self.runtime.hidden:
                made += ["--tmpfs", hidden, "--remount-ro", hidden]
        # Devices, and the one folder that takes files.
        for device in ("/dev/null", "/dev/urandom"):
            made += ["--dev-bind", device, device]
        if "--size" in self._has:  # a tmpfs without a size limit could fill the memory, so then there is none
            made += ["--size", str(WORK_BYTES), "--tmpfs", "/tmp"]
        elif not self._root:
            made += ["--dir", "/tmp"]
        if not self._root:
            made += ["--remount-ro", "/"]  # the root is a tmpfs too, and would take files without limit
        return [
            *made,
            "--chdir",
            "/tmp",
            "--setenv",
            "HOME",
            "/tmp",
            "--setenv",
            "PATH",
            os.path.dirname(self.runtime.python),
        ]


def sealed(data: bytes) -> int:
    """Writes ``data`` to a sealed in-memory file, which cannot be changed; the caller closes the descriptor."""
    # Sealed, because boxes share one file with the code and the filter: an untrusted program must not alter the next.
    made = os.memfd_create("trew", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(made, view) :]
    fcntl.fcntl(
        made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    )
    os.lseek(made, 0, os.SEEK_SET)
    return made
