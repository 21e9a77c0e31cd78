"""A seccomp filter with the system calls that untrusted code may make; all others fail with EPERM.

Each name is listed with its numbers on x86-64 and aarch64 (none where an architecture lacks the call). Left out are
``socket``, ``ptrace``, ``mount``, ``unshare``, ``bpf``, ``keyctl``, ``io_uring_setup``, and memory that no limit counts
(``memfd_create``, System V).
"""

from __future__ import annotations

import platform
import struct

_READ = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
preadv2:327:286 pwritev2:328:287 open:2: openat:257:56 close:3:57 close_range:436:436 lseek:8:62 stat:4:
fstat:5:80 lstat:6: newfstatat:262:79 statx:332:291 access:21: faccessat:269:48 faccessat2:439:439 readlink:89:
readlinkat:267:78 getdents:78: getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 dup:32:23 dup2:33:
dup3:292:24 fcntl:72:25 flock:73:32 pipe:22: pipe2:293:59 poll:7: ppoll:271:73 select:23: pselect6:270:72
epoll_create:213: epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232: epoll_pwait:281:22 epoll_pwait2:441:441
eventfd:284: eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 signalfd:282:
signalfd4:289:74 fadvise64:221:223 readahead:187:213 copy_file_range:326:285 sendfile:40:71 fsync:74:82
fdatasync:75:83 statfs:137:43 fstatfs:138:44 getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210
getsockopt:55:209 setsockopt:54:208 getsockname:51:204 getpeername:52:205
"""
_PLAIN = """
mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216 madvise:28:233 brk:12:214 msync:26:227 mincore:27:232
membarrier:324:283 futex:202:98 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293
set_tid_address:218:96 gettid:186:178 getpid:39:172 getppid:110:173 getpgid:121:155 getpgrp:111: getsid:124:156
getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148 getresgid:120:150
getgroups:115:158 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 getpriority:140:141 clock_gettime:228:113
clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201: times:100:153
getitimer:36:102 setitimer:38:103 alarm:37: pause:34: timer_create:222:107 timer_settime:223:110
timer_gettime:224:108 timer_delete:226:111 timer_getoverrun:225:109 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132
restart_syscall:219:128 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 getrandom:318:278 uname:63:160
sysinfo:99:179 getrusage:98:165 getrlimit:97:163 setrlimit:160:164 arch_prctl:158: prctl:157:167 umask:95:166
capget:125:90 getcpu:309:168 execve:59:221
"""
_CHANGE_FILES = """
creat:85: mkdir:83: mkdirat:258:34 rmdir:84: unlink:87: unlinkat:263:35 rename:82: renameat:264:38
renameat2:316:276 link:86: linkat:265:37 symlink:88: symlinkat:266:36 chmod:90: fchmod:91:52 fchmodat:268:53
utime:132: utimes:235: utimensat:280:88 futimesat:261: truncate:76:45 ftruncate:77:46 fallocate:285:47
"""
_PROCESSES = """
fork:57: vfork:58: setsid:112:157 setpgid:109:154 kill:62:129 tgkill:234:131 tkill:200:130
"""
# Allowed or refused by their arguments; kill and tgkill only with ``own_pid``.
_JUDGED = "clone:56:220 clone3:435:435 ioctl:16:29 socketpair:53:199 prlimit64:302:261 kill:62:129 tgkill:234:131"
_COLUMN = {"x86_64": 1, "aarch64": 2}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_… of linux/audit.h
# Classic BPF: load a word of seccomp_data, jump if equal, if at least, if any bit is set; return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# SECCOMP_RET_…; the two errors are SECCOMP_RET_ERRNO with the number in the low half (1 and 38).
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments take 8 bytes each, low half first
_NEW_NAMESPACE = 0x7E020000  # all CLONE_NEW… flags of clone
_THREAD = 0x00010000  # CLONE_THREAD
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # ioctls that inject characters into the terminal's input
_AF_UNIX = 1

Instruction = tuple[int, int, int, int]


def supported() -> bool:
    """Returns whether the tables cover this processor."""
    return platform.machine() in _COLUMN


def program(*, own_pid: int | None = None) -> bytes:
    """Builds the filter as an array of ``struct sock_filter``, for ``bwrap --seccomp`` or ``prctl(PR_SET_SECCOMP)``.

    With ``own_pid`` (for use without namespaces) the process cannot start processes, signal others, or change files or
    their permissions; threads stay possible.

    >>> len(program()) % 8, len(program()) > len(program(own_pid=1))
    (0, True)
    """
    column = _COLUMN[platform.machine()]
    lists = [_READ, _PLAIN] + ([] if own_pid is not None else [_CHANGE_FILES, _PROCESSES])
    judged = _numbers(_JUDGED, column)
    # kill and tgkill are allowed by a list without own_pid, and judged below with it.
    allowed = sorted({n for text in lists for n in _numbers(text, column).values()} - set(_always_judged(judged)))
    # An instruction is (operation, skip if true, skip if false, operand), with skips relative to the next one.
    code: list[Instruction] = [
        # The architecture first: with 32-bit calls on x86-64 the same numbers mean other calls.
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHITECTURE[platform.machine()]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 interface, whose calls the list does not cover
        (_RETURN, 0, 0, _ENOSYS),
    ]
    for number in allowed:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    # A filter cannot follow the pointer to clone3's flags. ENOSYS, because libc then falls back to clone.
    code += _when(judged["clone3"], [(_RETURN, 0, 0, _ENOSYS)])
    code += _when(judged["ioctl"], _refuse_values(1, (_TIOCSTI, _TIOCLINUX)))
    code += _when(judged["socketpair"], _only_value(0, _AF_UNIX))
    code += _when(judged["prlimit64"], _only_value(0, 0))  # pid 0: its own limits, nobody else's
    clone: list[Instruction] = [
        (_LOAD, 0, 0, _ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACE),
        (_RETURN, 0, 0, _EPERM),
    ]
    if own_pid is not None:
        # Without a user namespace RLIMIT_NPROC cannot bound one program's processes, so only threads may be made.
        clone += [(_ANY_BIT, 1, 0, _THREAD), (_RETURN, 0, 0, _EPERM)]
        for name in ("kill", "tgkill"):
            code += _when(judged[name], _only_value(0, own_pid))
    code += _when(judged["clone"], [*clone, (_RETURN, 0, 0, _ALLOW)])
    code.append((_RETURN, 0, 0, _EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _numbers(text: str, column: int) -> dict[str, int]:
    rows = [item.split(":") for item in text.split()]
    return {row[0]: int(row[column]) for row in rows if row[column]}


def _always_judged(judged: dict[str, int]) -> list[int]:
    return [judged[name] for name in ("clone", "clone3", "ioctl", "socketpair", "prlimit64")]


def _when(number: int, block: list[Instruction]) -> list[Instruction]:
    """Runs ``block`` for one system call. The block must always return: it may load an argument over the number."""
    return [(_EQUAL, 0, len(block), number), *block]


def _only_value(argument: int, value: int) -> list[Instruction]:
    load = (_LOAD, 0, 0, _ARGUMENT + 8 * argument)
    return [load, (_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]


def _refuse_values(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    block: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENT + 8 * argument)]
    for value in values:
        block += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _EPERM)]
    return [*block, (_RETURN, 0, 0, _ALLOW)]
