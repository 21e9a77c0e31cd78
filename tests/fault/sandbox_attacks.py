"""Programs that try to get out of the sandbox, or to hurt from inside. Each prints ``ESCAPED`` only if it succeeds.

``HOST`` in a program stands for a dictionary of the host's things: ports, sockets, files, process numbers.
"""

# ruff: noqa: E501
from __future__ import annotations

_SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    result = libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return result, ctypes.get_errno()
def must_fail(number, *args):
    result, code = call(number, *args)
    if result >= 0 or code not in (1, 13, 38):
        print("ESCAPED", number, result, code)
"""
_TRY_OPEN = """
import os
def must_not_open(*paths, flags=os.O_RDONLY):
    for path in paths:
        try:
            found = os.open(path, flags)
        except (OSError, ValueError):
            continue
        print("ESCAPED", path, os.read(found, 20) if flags == os.O_RDONLY and not os.path.isdir(path) else "")
"""
_TRY = """
def must_raise(function, *args):
    try:
        value = function(*args)
    except (OSError, ValueError, PermissionError, ImportError, MemoryError):
        return
    print("ESCAPED", function, value)
"""

# (name, program). Every one must end by itself with status 0 and without a word of escape.
CONTAINED: dict[str, str] = {
    # ---- files of the host
    "passwd": _TRY_OPEN + "must_not_open('/etc/passwd', '/etc/shadow', '/etc/hosts', '/etc/ssl/private')",
    "home": _TRY_OPEN
    + """
import sys
must_not_open(*HOST['home'], '/home', '/root/.bashrc', '/root/.ssh', '/root/.netrc')
for folder in (HOST['home_itself'], '/'):
    try: names = os.listdir(folder)
    except OSError: continue
    way = [name for name in names if sys.base_prefix.startswith(os.path.join(folder, name))]  # to the interpreter
    if set(names) - set(way) - {'tmp', 'dev', 'etc', 'lib', 'lib64', 'usr', 'bin'}: print('ESCAPED', folder, names)
""",
    "repository": _TRY_OPEN + "must_not_open(HOST['this'], HOST['repository'])",
    "canary": _TRY_OPEN + "must_not_open(HOST['canary']); must_not_open(HOST['canary'], flags=os.O_WRONLY)",
    "site-packages": """
try:
    import numpy; print("ESCAPED numpy", numpy.__file__)
except ImportError: pass
try:
    import trew; print("ESCAPED trew")
except ImportError: pass
""",
    "other-roots": _TRY_OPEN
    + "must_not_open('/sys/kernel', '/var/log', '/run/docker.sock', '/boot', '/oldroot', '/newroot')",
    "upwards": _TRY_OPEN + "must_not_open('../' * 30 + 'etc/passwd', '/tmp/../etc/passwd', '/dev/../etc/passwd')",
    "symlink": _TRY_OPEN
    + """
for i, target in enumerate(('/etc/passwd', HOST['canary'], '/proc/self/root/etc/passwd')):
    try: os.symlink(target, f'/tmp/link{i}')
    except OSError: pass
    must_not_open(f'/tmp/link{i}')
""",
    "hard-link": _TRY + "import os; must_raise(os.link, HOST['canary'], '/tmp/hard')",
    "environment": """
import os
for name, value in os.environ.items():
    if 'CANARY' in name or 'canary' in value or name.startswith(('HF_', 'AWS_', 'VIRTUAL_ENV')): print('ESCAPED', name)
""",
    "environ-of-others": _TRY_OPEN
    + "must_not_open('/proc/1/environ', f'/proc/{HOST[\"pid\"]}/environ', '/proc/2/environ')",
    "proc-of-parent": _TRY_OPEN
    + """
must_not_open(f'/proc/{os.getppid()}/mem', f'/proc/{HOST["pid"]}/mem', f'/proc/{HOST["pid"]}/maps', '/proc/1/mem')
must_not_open('/proc/1/root/etc/passwd', '/proc/self/root/etc/passwd', '/proc/kcore', '/proc/kallsyms', '/proc/keys')
""",
    "inherited-descriptors": """
import os, stat
for fd in range(3, 200):
    try: kind = os.fstat(fd).st_mode
    except OSError: continue
    if stat.S_ISDIR(kind) or stat.S_ISSOCK(kind) or stat.S_ISREG(kind): print('ESCAPED', fd, oct(kind))
""",
    # ---- writing
    "write-outside": _TRY
    + """
import os, sys
flags = os.O_WRONLY | os.O_CREAT
for path in ('/x', '/etc/x', '/usr/x', '/dev/x', '/dev/shm/x', '/home/x', '/root/x', '/var/tmp/x', '/proc/sys/kernel/x'):
    must_raise(os.open, path, flags)
must_raise(os.open, os.__file__, os.O_WRONLY)
must_raise(os.open, sys.executable, os.O_WRONLY)
must_raise(os.unlink, os.__file__)
must_raise(os.rename, os.__file__, os.__file__ + 'x')
must_raise(os.chmod, sys.executable, 0o777)
must_raise(os.truncate, os.__file__, 0)
must_raise(os.mkdir, '/new')
""",
    "change-modes": _TRY
    + """
import os
for path in ('/', '/dev', '/tmp/..', '/lib', '/usr'):
    must_raise(os.chmod, path, 0o777)
    must_raise(os.chown, path, 0, 0)
""",
    "devices": _TRY_OPEN
    + """
must_not_open('/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda', '/dev/nvidia0', '/dev/kvm', '/dev/fuse', '/dev/tty', '/dev/ptmx')
try:
    os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0)); must_not_open('/tmp/disk')
except OSError: pass
""",
    # ---- network
    "tcp": _TRY
    + """
import socket
must_raise(lambda: socket.create_connection(('127.0.0.1', HOST['port']), 0.3))
must_raise(lambda: socket.create_connection(('8.8.8.8', 53), 0.3))
must_raise(lambda: socket.create_server(('0.0.0.0', 0)))
""",
    "udp": _TRY
    + """
import socket
must_raise(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', HOST['port'])))
must_raise(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
must_raise(lambda: socket.getaddrinfo('example.com', 80))
""",
    "unix-socket": _TRY + "import socket\nmust_raise(lambda: socket.socket(socket.AF_UNIX).connect(HOST['unix']))",
    "abstract-socket": _TRY
    + "import socket\nmust_raise(lambda: socket.socket(socket.AF_UNIX).connect(HOST['abstract']))",
    "raw-netlink-vsock": _TRY
    + """
import socket
for family, kind, protocol in ((2, 3, 1), (17, 3, 3), (16, 3, 0), (40, 1, 0), (38, 5, 0), (31, 3, 1), (29, 3, 1)):
    must_raise(socket.socket, family, kind, protocol)
must_raise(socket.socketpair, socket.AF_INET)
""",
    # ---- rights
    "setuid": _TRY
    + """
import os
if os.getuid() != 0:
    must_raise(os.setuid, 0); must_raise(os.setresuid, 0, 0, 0); must_raise(os.setgid, 0)
must_raise(os.setgroups, [0]); must_raise(os.chroot, '/tmp'); must_raise(os.setuid, 1234)
""",
    "mount": _SYSCALL
    + "must_fail(165, b'none', b'/tmp', b'tmpfs', 0, None); must_fail(166, b'/tmp', 2); must_fail(155, b'/', b'/')\n"
    "for new in (428, 429, 430, 431, 432, 442): must_fail(new, 0, 0, 0, 0, 0)",
    "namespaces": _SYSCALL
    + """
must_fail(272, 0x10000000); must_fail(272, 0x20000); must_fail(308, 0, 0)
for flags in (0x10000011, 0x20000011, 0x40000011, 0x30000011): must_fail(56, flags, 0, 0, 0, 0)
must_fail(435, ctypes.create_string_buffer(b'\\0' * 88), 88)
""",
    "ptrace": _SYSCALL
    + """
must_fail(101, 16, os.getppid(), 0, 0); must_fail(101, 0, 0, 0, 0); must_fail(101, 16, HOST['pid'], 0, 0)
""",
    "memory-of-others": _SYSCALL
    + "must_fail(310, os.getppid(), 0, 0, 0, 0, 0); must_fail(311, HOST['pid'], 0, 0, 0, 0, 0)\n"
    "must_fail(434, os.getpid(), 0); must_fail(438, 3, 0, 0); must_fail(312, 1, 1, 0, 0, 0); must_fail(440, 3, 0, 0, 0, 0)",
    "keyctl": _SYSCALL
    + "must_fail(250, 0, -3, 0, 0, 0); must_fail(248, b'user', b'x', b'y', 1, -3); must_fail(249, b'user', b'x', None, 0)",
    "bpf-perf-uring": _SYSCALL
    + "must_fail(321, 0, 0, 0); must_fail(298, 0, 0, 0, 0, 0); must_fail(425, 8, 0); must_fail(426, 3, 0, 0, 0, 0); must_fail(323, 0)",
    "uncounted-memory": _SYSCALL
    + "must_fail(319, b'x', 0); must_fail(29, 0, 1 << 20, 0o1666); must_fail(68, 1, 0o1666); must_fail(447, 0)",
    "kernel-management": _SYSCALL
    + "must_fail(169, 0xfee1dead, 0x28121969, 0x1234567, 0); must_fail(175, 0, 0, b''); must_fail(313, 3, b'', 0)\n"
    "must_fail(246, 0, 0, 0, 0); must_fail(167, b'/tmp/x', 0); must_fail(170, b'x', 1); must_fail(227, 0, 0); must_fail(164, 0, 0); must_fail(103, 3, 0, 0)\n"
    "must_fail(135, 0x0040000); must_fail(172, 3); must_fail(304, 0, 0, 0); must_fail(303, 0, b'/', 0, 0, 0)",
    "compat-interface": _SYSCALL + "must_fail(0x40000000 + 39); must_fail(0x40000000 + 101, 0, 0, 0, 0)",
    "terminal-input": """
import fcntl, os
for fd in (0, 1, 2):
    try: fcntl.ioctl(fd, 0x5412, b'x'); print('ESCAPED')
    except OSError: pass
""",
    "signals": """
import os, signal
for pid in (os.getppid(), HOST['pid'], -1):
    try:
        os.kill(pid, 0)
        if pid == HOST['pid']: print('ESCAPED', pid)
    except OSError: pass
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try: os.kill(HOST['pid'], signal.SIGTERM); print('ESCAPED')
except OSError: pass
""",
    "raise-limits": """
import resource, os
for what in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
    for limits in ((resource.RLIM_INFINITY,) * 2, (resource.getrlimit(what)[1] + 1,) * 2):
        try: resource.setrlimit(what, limits); print('ESCAPED', what)
        except (ValueError, OSError): pass
try: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1)); print('ESCAPED prlimit')
except (OSError, PermissionError): pass
try: os.nice(-5); print('ESCAPED nice')
except OSError: pass
try: os.sched_setaffinity(HOST['pid'], {0}); print('ESCAPED affinity')
except OSError: pass
""",
    # ---- quantities that end with an error for the program
    "disk-bomb": """
import os
total = 0
try:
    for i in range(100):
        with open(f'/tmp/{i}', 'wb') as f:
            for _ in range(64): total += f.write(b'x' * (1 << 20))
except OSError: pass
if total > 40 << 20: print('ESCAPED', total)
""",
    "file-bomb": """
import os
made = 0
try:
    for i in range(300000): os.close(os.open(f'/tmp/{i}', os.O_CREAT | os.O_WRONLY)); made += 1
except OSError: pass
if made >= 300000: print('ESCAPED', made)
""",
    "descriptor-bomb": """
import os
held = []
try:
    while len(held) < 5000: held.append(os.open('/dev/null', os.O_RDONLY))
except OSError: pass
if len(held) > 1000: print('ESCAPED', len(held))
""",
    "thread-bomb": """
import threading
stop = threading.Event(); made = 0
try:
    for _ in range(3000): threading.Thread(target=stop.wait, daemon=True).start(); made += 1
except RuntimeError: pass
if made > 200: print('ESCAPED', made)
stop.set()
""",
    "core-dump": """
import os, signal
pid = None
try: pid = os.fork()
except OSError: pass
if pid == 0: os.abort()
if pid:
    status = os.waitpid(pid, 0)[1]
    if os.WCOREDUMP(status) or [n for n in os.listdir('/tmp') if 'core' in n]: print('ESCAPED')
""",
    "stdin": "import sys; data = sys.stdin.read(); print('ESCAPED' if data != 'input\\n' else 'ok')",
    "write-to-stdin": """
import os
try: os.write(0, b'x'); print('ESCAPED')
except OSError: pass
""",
    "daemon": """
import os, sys, time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
except OSError: pass
""",
    "zombies": """
import os
for _ in range(40):
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: break
""",
}

# (name, program, words of which one must be in the reason, or in the status): stopped by a limit, or dead by itself.
STOPPED: dict[str, tuple[str, tuple[str, ...]]] = {
    "fork-bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        ("ran", "slept", "processes", "status"),
    ),
    "fork-bomb-of-sleepers": (
        "import os, time\nfor _ in range(500):\n    try:\n        if os.fork() == 0: time.sleep(100)\n    except OSError: pass\ntime.sleep(100)",
        ("slept", "processes", "status"),
    ),
    "memory-bomb": ("x = []\nwhile True: x.append(bytearray(1 << 22))", ("status 1", "memory")),
    "memory-bomb-by-forks": (
        "import os, time\nfor _ in range(30):\n    try:\n        if os.fork() == 0:\n            x = bytearray(60 << 20); time.sleep(100)\n"
        "    except OSError: pass\ntime.sleep(100)",
        ("memory", "slept", "processes"),
    ),
    "spin": ("while True: pass", ("ran",)),
    "spin-in-threads": (
        "import threading\ndef f():\n    while True: pass\nfor _ in range(4): threading.Thread(target=f).start()",
        ("ran",),
    ),
    "spin-in-processes": (
        "import os\nfor _ in range(3):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass",
        ("ran",),
    ),
    "spin-deaf": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        ("ran",),
    ),
    "spin-in-c": ("9**9**9", ("ran", "status")),
    "regex": ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", ("ran",)),
    "sleep": ("import time; time.sleep(1000)", ("slept",)),
    "stop-itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ("slept",)),
    "wait-for-ever": ("import threading; threading.Event().wait()", ("slept",)),
    "flood-stdout": ("while True: print('x' * 10000)", ("bytes to stdout",)),
    "flood-stderr": ("import sys\nwhile True: sys.stderr.write('x' * 10000)", ("bytes to stderr",)),
    "flood-from-daemon": (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: os.write(1, b'x' * 65536)\nimport time; time.sleep(100)",
        ("bytes to stdout", "status 1"),
    ),
    "recursion": ("import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", ("status", "memory", "ran")),
    "segfault": ("import ctypes; ctypes.string_at(0)", ("status",)),
    "nesting": ("x = " + "(" * 5000 + ")" * 5000, ("status 1",)),
    "unary-nesting": ("x = " + "-" * 200000 + "1", ("status",)),
    "syntax-error": ("def f(:\n", ("status 1",)),
    "nul": ("print(1)\0", ("status 1",)),
    "surrogate": ("print('\ud800')", ("status 1",)),
    "bad-cookie": ("# coding: no-such-coding\nprint(1)", ("status 1",)),
    "kill-group": ("import os; os.kill(0, 9); import time; time.sleep(100)", ("status", "slept")),
    "kill-everything": ("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nos.abort()", ("status",)),
    "close-everything": ("import os; os.closerange(0, 200)\nwhile True: pass", ("ran",)),
    "exit-status": ("import os; os._exit(3)", ("status 3",)),
}
