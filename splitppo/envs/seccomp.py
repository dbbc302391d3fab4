"""The system calls that a program in the jail may make, as a filter for the kernel (seccomp(2)).

A list of what is known to be harmless: files, processes, sockets of three families, and memory that
counts for the limits of a process. What is not in it fails, so also what a later kernel brings:
memory behind file descriptors or keys (memfd_create, shmget, splice), io_uring, bpf, keyrings,
other users, mounts, new namespaces.
"""

import errno
import socket
import struct

# name, and number on x86-64 and aarch64: linux/arch/x86/entry/syscalls/syscall_64.tbl and
# linux/include/uapi/asm-generic/unistd.h
CALLS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
statx 332 291, lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69,
pwritev 296 70, access 21 -, faccessat 269 48, faccessat2 439 439, dup 32 23, dup2 33 -,
dup3 292 24, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83, truncate 76 45,
ftruncate 77 46, fallocate 285 47, fadvise64 221 223, getdents 78 -, getdents64 217 61,
getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38, renameat2 316 276,
mkdir 83 -, mkdirat 258 34, rmdir 84 -, creat 85 -, link 86 -, linkat 265 37, unlink 87 -,
unlinkat 263 35, symlink 88 -, symlinkat 266 36, readlink 89 -, readlinkat 267 78, chmod 90 -,
fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
umask 95 166, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -, statfs 137 43,
fstatfs 138 44, openat 257 56, ioctl 16 29, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10,
listxattr 194 11, llistxattr 195 12, flistxattr 196 13, close_range 436 436, pipe 22 -,
pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, madvise 28 233, msync 26 227,
membarrier 324 283,
fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
kill 62 129, tkill 200 130, tgkill 234 131, getpid 39 172, getppid 110 173, gettid 186 178,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158,
getresuid 118 148, getresgid 120 150, setpgid 109 154, getpgid 121 155, getpgrp 111 -,
setsid 112 157, getsid 124 156, set_tid_address 218 96, set_robust_list 273 99,
get_robust_list 274 100, rseq 334 293, futex 202 98, sched_yield 24 124, sched_getaffinity 204 123,
sched_setaffinity 203 122, sched_getparam 143 121, sched_getscheduler 145 120, prlimit64 302 261,
getrlimit 97 163, setrlimit 160 164, getrusage 98 165, getpriority 140 141, setpriority 141 140,
uname 63 160, sysinfo 99 179, arch_prctl 158 -, prctl 157 167, getcpu 309 168, capget 125 90,
getrandom 318 278,
nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
gettimeofday 96 169, time 201 -, times 100 153, alarm 37 -, pause 34 -, getitimer 36 102,
setitimer 38 103, restart_syscall 219 128,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132,
bind 49 200, connect 42 203, listen 50 201, accept 43 202, accept4 288 242, sendto 44 206,
recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243,
shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209
"""
# column in that list; AUDIT_ARCH_...; clone, setsockopt, socket and socketpair
MACHINES = {
    "x86_64": (1, 0xC000003E, 56, 54, (41, 53)),
    "aarch64": (2, 0xC00000B7, 220, 208, (198, 199)),
}
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
NAMESPACES = 0x7E020000  # CLONE_NEW... of clone(2)

# of linux/filter.h
LOAD = 0x20  # a word
EQUAL = 0x15
HAS = 0x45  # one of the bits
RETURN = 0x06
ALLOW = 0x7FFF0000
# as if the kernel had no such call, for which programs may know another one
FAIL = 0x00050000 | errno.ENOSYS
# places in struct seccomp_data; of an argument that of the low half
NUMBER = 0
ARCHITECTURE = 4
FIRST = 16
THIRD = 32


def seccomp_filter(machine: str) -> bytes:
    """The filter for an architecture, as `platform.machine()` has it: an array of `sock_filter`.
    Raises RuntimeError if its calls are not known."""
    if machine not in MACHINES:
        raise RuntimeError(f"no list of system calls for {machine}")
    column, architecture, clone, setsockopt, sockets = MACHINES[machine]
    # 32-bit programs have other numbers
    code = [
        _line(LOAD, ARCHITECTURE),
        _line(EQUAL, architecture, skip=(1, 0)),
        _line(RETURN, FAIL),
        _line(LOAD, NUMBER),
    ]
    for call in CALLS.split(","):
        if (number := call.split()[column]) != "-":
            code += _when(EQUAL, int(number), [_line(RETURN, ALLOW)])
    for number, argument, test, values, answer, otherwise in (
        (clone, FIRST, HAS, [NAMESPACES], FAIL, ALLOW),
        # else a socket could hold as much unread as the machine allows
        (setsockopt, THIRD, EQUAL, [socket.SO_SNDBUF], FAIL, ALLOW),
        *((number, FIRST, EQUAL, FAMILIES, ALLOW, FAIL) for number in sockets),
    ):
        choice = [_line(LOAD, argument)]
        for value in values:
            choice += _when(test, value, [_line(RETURN, answer)])
        code += _when(EQUAL, number, [*choice, _line(RETURN, otherwise)])
    return b"".join([*code, _line(RETURN, FAIL)])


def _when(test: int, value: int, then: list[bytes]) -> list[bytes]:
    """Lines that are left out unless the loaded word passes a test."""
    return [_line(test, value, skip=(0, len(then))), *then]


def _line(code: int, value: int, skip: tuple[int, int] = (0, 0)) -> bytes:
    """A `sock_filter`; `skip`: lines that are left out if a test is passed, and if not."""
    return struct.pack("HBBI", code, *skip, value)
