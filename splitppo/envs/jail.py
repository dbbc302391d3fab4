"""Runs a Python program that sees its own folder and the interpreter, and nothing else of the
machine. Started by python.py as a script: it imports nothing of this package.

    python -I -S jail.py JSON < PROGRAM      (JSON: arguments of `main`)

If the kernel allows no jail, standard error says why, and only then anything.

Three processes, by namespaces that an ordinary user may make. The first waits for the second, so
that one kill ends them all. The second is process 1 of its namespace: when it ends, the kernel
kills every other process there. The third is the program. Its root folder holds the interpreter's
folders, bound read-only, and /tmp in memory, which is gone with the last process. A filter
(seccomp.py) leaves it the system calls that are known to be harmless.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import NoReturn

# of unshare(2): CLONE_NEWUSER, CLONE_NEWNET, and those for mounts, host names, IPC and processes
NEWUSER = 0x10000000
NEWNET = 0x40000000
OTHERS = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000
# of mount(2): MS_NOSUID and MS_NODEV; MS_BIND with what is mounted below (MS_REC)
BARE = 2 | 4
BIND = 0x1000 | 0x4000
ROOT = "/sys"  # where the new root folder is put together: a folder that every machine has

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object, what: str = "") -> None:
    """Calls a function of the C library. Raises OSError, which says `what` could not be had."""
    values = [os.fsencode(part) if isinstance(part, str) else part for part in arguments]
    if getattr(libc, name)(*values) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what or name}: {os.strerror(error)}")


def fork_and_wait() -> None:
    """Returns in a new process; this one waits for it and ends as it does."""
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    # the kernel kills the child when this process ends
    call("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def new_root(readable: list[str], folder: int, files: int) -> None:
    """Makes a root folder that holds what is `readable`, and /tmp for `folder` bytes in so many
    `files`, and leaves the old one."""
    call("mount", "tmpfs", ROOT, "tmpfs", BARE, "size=1m,mode=755")
    os.mkdir(f"{ROOT}/tmp")
    # before the others: some of them may be below /tmp
    room = f"size={folder},nr_inodes={files},mode=700"
    call("mount", "tmpfs", f"{ROOT}/tmp", "tmpfs", BARE, room)
    for path in (*readable, "/dev/null", "/dev/zero", "/dev/urandom"):
        inside = Path(ROOT + path)
        inside.parent.mkdir(parents=True, exist_ok=True)
        make = Path.mkdir if os.path.isdir(path) else Path.touch
        make(inside)
        call("mount", path, str(inside), None, BIND, None)
    # all with AT_RECURSIVE get MOUNT_ATTR_RDONLY and MOUNT_ATTR_NOSUID; /tmp loses the first
    for path, flags, attributes in ((ROOT, 0x8000, (1 | 2, 0)), (f"{ROOT}/tmp", 0, (0, 1))):
        changes = (ctypes.c_uint64 * 4)(*attributes)
        # mount_setattr(2) by its number on every architecture; AT_FDCWD
        size = ctypes.sizeof(changes)
        call("syscall", 442, -100, path, flags, changes, size, what="mount_setattr")
    os.chdir(ROOT)
    call("pivot_root", ".", ".")
    call("umount2", ".", 2)  # MNT_DETACH
    os.chdir("/tmp")


def main(
    program: bytes, *, network: bool, seconds: int, readable: list[str], path: str, calls: str,
    memory: int = 512 << 20, processes: int = 16, folder: int = 64 << 20, files: int = 4096,
) -> NoReturn:  # fmt: skip
    """Goes into the jail and becomes the program.

    Args:
        readable: files and folders that it sees. path: of Python's packages.
        calls: the filter of system calls, in hexadecimal digits.
        memory: bytes that each of its `processes` (and threads) may map.
        folder: bytes in /tmp, in so many `files`.
    """
    # process 1 of a namespace gets no signal of the others there that it does not handle
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.alarm(seconds)  # ends this process, and so all
    call("prctl", 1, signal.SIGKILL)
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    group = os.getgid()
    if os.getuid() == 0:
        os.setresuid(65534, 0, 0)  # the kernel does not count the processes of root
    user = os.geteuid()
    call("unshare", NEWUSER | OTHERS | (0 if network else NEWNET))
    for name, text in (
        ("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1"),
    ):  # fmt: skip
        Path(f"/proc/self/{name}").write_text(text)
    fork_and_wait()
    new_root(readable, folder, files)
    fork_and_wait()
    os.setsid()  # out of the process group of the others
    Path("main.py").write_bytes(program)
    # a second user namespace, in which no user can be changed to (root's processes are not counted)
    # and nothing mounted
    call("unshare", NEWUSER)
    for limit, value in (
        (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_CORE, 0),
        # what is sent and not received is in memory, too: 0.4 MiB a socket
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_FSIZE, folder),
    ):  # fmt: skip
        resource.setrlimit(limit, (value, value))
    # libraries that start a thread for each core would come to the limit
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {"PYTHONPATH": path, "HOME": "/tmp", "LC_ALL": "C.UTF-8", **threads}
    environment["PYTHONHASHSEED"] = "0"  # sets are printed in the same order each time
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(1, 2)
    code = bytes.fromhex(calls)
    # struct sock_fprog; PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    buffer = ctypes.create_string_buffer(code)
    length = len(code) // struct.calcsize("HBBI")
    call("prctl", 22, 2, struct.pack("HP", length, ctypes.addressof(buffer)), what="seccomp")
    os.execve(sys.executable, [sys.executable, "-s", "main.py"], environment)


if __name__ == "__main__":
    # the program does not get it: its standard error is its output
    complaints = os.fdopen(os.dup(2), "w")
    try:
        main(sys.stdin.buffer.read(), **json.loads(sys.argv[1]))
    except Exception as error:
        print(error, file=complaints, flush=True)
        os._exit(1)
