"""What a program of the policy's gets when it tries to leave its jail."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitppo.envs import python
from splitppo.envs.python import python_tool, run_program
from splitppo.errors import UserError


def refusal() -> str:
    try:
        python_tool()
    except UserError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.ranks  # its programs are processes
REFUSAL = refusal()
needs_jail = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
SECRET = "the-secret"
LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
FORK = """
import os, time
count = 0
try:
    while count < 500:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        count += 1
except OSError as error:
    print(error)
assert count < 16, count
"""
# calls of the C library and of the kernel's numbers that are the same everywhere, and their errors
KERNEL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(256)
let_through = []
for name, *given in (
    ("shmget", 0, 1 << 20, 0o1600), ("msgget", 0, 0o1600), ("semget", 0, 1, 0o1600),
    ("mq_open", b"/queue", 0o102, 0o600, None), ("inotify_init1", 0), ("signalfd", -1, room, 0),
    ("timerfd_create", 1, 0), ("splice", 0, None, 1, None, 1, 0), ("vmsplice", 1, room, 1, 0),
    ("tee", 0, 1, 1, 0), ("unshare", 0x10000000), ("setns", 0, 0), ("chroot", b"/tmp"),
    ("ptrace", 0, 0, 0, 0), ("process_vm_readv", 1, room, 1, room, 1, 0), ("mlockall", 1),
    ("setxattr", b"main.py", b"user.a", b"b", 1, 0), ("sethostname", b"a", 1), ("setuid", 1000),
    ("personality", 0), ("swapoff", b"/tmp"), ("quotactl", 0, b"", 0, room),
    ("fanotify_init", 0, 0), ("name_to_handle_at", -100, b"main.py", room, room, 0),
    ("mknod", b"a", 0o10600, 0), ("syscall", 425, 8, room), ("syscall", 434, 1, 0),
    ("syscall", 438, 0, 1, 0), ("syscall", 442, -100, b"/tmp", 0, room, 32), ("syscall", 447, 0),
    ("syscall", 435, room, 88), ("syscall", 450, 0, 0, 0), ("syscall", 500, 0),
):
    result = getattr(libc, name)(*given)
    if result != -1 or ctypes.get_errno() not in (1, 38):
        let_through.append((name, given, result, ctypes.get_errno()))
print("let through:", let_through)
"""
# what programs do that calculate, on the edge of the list of system calls
MAY = """
import asyncio, concurrent.futures, os, select, shutil, signal, socket, sqlite3, tempfile, time
import mmap, selectors, secrets, uuid, resource, fcntl
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(abs, range(-100, 0))) == 5050
async def main():
    await asyncio.gather(*(asyncio.sleep(0.01) for _ in range(9)))
    return await asyncio.to_thread(lambda: 1)
assert asyncio.run(main()) == 1
with sqlite3.connect("data.db") as data:
    data.execute("create table a (b)")
    data.execute("insert into a values (1)")
with tempfile.TemporaryDirectory() as folder:
    for copy in (shutil.copy2, shutil.copyfile, os.rename):
        copy("main.py" if copy is not os.rename else f"{folder}/copy2", f"{folder}/{copy.__name__}")
    shutil.copytree(folder, "tree")
    os.symlink("main.py", f"{folder}/link")
    assert {*os.listdir(folder)} == {"copyfile", "rename", "link"}
with open("main.py", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
    assert text[:7] == b"\\nimport"
    fcntl.flock(file, fcntl.LOCK_EX)
here, there = socket.socketpair()
here.sendall(b"a")
assert select.select([there], [], [], 1)[0] and there.recv(1) == b"a"
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
os.utime("main.py"), os.chmod("main.py", 0o600), uuid.uuid4(), secrets.token_bytes(9)
resource.getrusage(resource.RUSAGE_SELF), os.sched_getaffinity(0), os.uname(), time.localtime()
pid = os.posix_spawn(os.sys.executable, ["python", "-c", "raise SystemExit(7)"], {})
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print("it may")
"""
# families of sockets that are neither of this machine's files nor of the internet
FAMILIES = """
import socket
made = []
for family in range(50):
    for make in (socket.socket, socket.socketpair):
        try:
            make(family, socket.SOCK_DGRAM)
            made.append(family)
        except OSError as error:
            assert family in (1, 2, 10) or error.errno == 38, (family, error)
print(made)
"""
# name -> (the program; part of what it prints). Where the jail is broken they do no harm.
ATTEMPTS: dict[str, tuple[str, str]] = {
    # reading
    "reads /etc/passwd": ("open('/etc/passwd')", "FileNotFoundError"),
    "reads a file of the user's": ("print(open({secret!r}).read())", "FileNotFoundError"),
    "reads it by ..": ("open('../' * 20 + {secret!r}[1:])", "FileNotFoundError"),
    "reads it through a link": (
        "import os; os.symlink({secret!r}, 'link'); open('link')",
        "FileNotFoundError",
    ),
    "reads it through /proc": ("open('/proc/1/root' + {secret!r})", "FileNotFoundError"),
    "reads the trainer's files": ("open({here!r})", "FileNotFoundError"),
    "asks whether a file is there": ("import os; os.stat({secret!r})", "FileNotFoundError"),
    "reads the environment": ("import os; print(os.environ.get('JAIL_SECRET'))", "None"),
    "reads what the trainer has open": (
        "import os\nfound = []\nfor n in range(3, 256):\n"
        "    try: os.fstat(n); found.append(n)\n    except OSError: pass\nprint(found)",
        "[]",
    ),
    "opens a disk": (
        "import os; os.mknod('disk', 0o60600, os.makedev(254, 0))",
        "Function not implemented",
    ),
    # writing
    "writes beside the user's file": ("open({secret!r} + '2', 'w')", "FileNotFoundError"),
    "writes in the root folder": ("open('/file', 'w')", "Read-only file system"),
    "writes in the interpreter": ("import os; open(os.__file__, 'a')", "[Errno "),
    "changes the interpreter's rights": (
        "import os; os.chmod(os.__file__, os.stat(os.__file__).st_mode)",
        "Read-only file system",
    ),
    "mounts the interpreter for writing": (
        LIBC + "print(libc.mount(None, b'/usr/lib', None, 0x1020, None), ctypes.get_errno())",
        "-1 38",
    ),
    "mounts in a namespace of its own": (
        LIBC + "import os\nlibc.unshare(0x10020000)\n"
        "print(libc.mount(None, b'/usr/lib', None, 0x1020, None))\nopen(os.__file__, 'a')",
        "[Errno ",
    ),
    "fills the disk": (
        "with open('file', 'wb') as f:\n    for _ in range(200): f.write(bytes(1 << 20))",
        "No space left on device",
    ),
    "reads what the call before wrote": ("open('/tmp/kept')", "FileNotFoundError"),
    # sockets
    "connects to this machine": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 3)",
        "Network is unreachable",
    ),
    "connects to the network": (
        "import socket; socket.create_connection(('1.1.1.1', 80), 3)",
        "Network is unreachable",
    ),
    "sends a datagram": (
        "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('8.8.8.8', 53))",
        "Network is unreachable",
    ),
    "connects to a socket in a folder": (
        "import socket; socket.socket(socket.AF_UNIX).connect({unix!r})",
        "FileNotFoundError",
    ),
    "connects to an abstract socket": (
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0' + {abstract!r})",
        "ConnectionRefusedError",
    ),
    # processes
    "starts 500 processes": (FORK, "Resource temporarily unavailable"),
    "starts them as another user": (
        "import os\n"
        "for ids in ((0, 0), (1000, 1000), (-1, 1000), (65534, 65534)):\n"
        "    try: os.setreuid(*ids)\n"
        "    except OSError: pass\n" + FORK,
        "Resource temporarily unavailable",
    ),
    "starts 500 threads": (
        "import threading, time\ntry:\n    for _ in range(500):\n"
        "        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
        "except RuntimeError as error: print(error, threading.active_count() < 17)",
        "can't start new thread True",
    ),
    "raises its limits": (
        "import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (500, 500))",
        "not allowed to raise maximum limit",
    ),
    # signals
    "signals a process": ("import os; os.kill({pid}, 9)", "ProcessLookupError"),
    "signals all processes": ("import os; os.kill(-1, 0)", "ProcessLookupError"),
    "signals its parents": (
        "import os\nfor n in range(1, 65): os.kill(os.getppid(), n)\nos.killpg(0, 15)",
        "exit status 143",
    ),
    "traces its parent": (
        LIBC + "import os; print(libc.ptrace(16, os.getppid(), 0, 0), ctypes.get_errno())",
        "-1 38",
    ),
    # memory and time
    "allocates 4 GiB": ("bytearray(4 << 30)", "MemoryError"),
    "allocates it in another process": (
        "import os\nif os.fork() == 0: bytearray(600 << 20)\nos.wait()",
        "MemoryError",
    ),
    "keeps memory in a file without a name": (
        "import os; os.memfd_create('a')",
        "Function not implemented",
    ),
    "keeps memory under a name": (
        "from multiprocessing.shared_memory import SharedMemory as S; S('a', True, 1 << 20)",
        "FileNotFoundError",
    ),
    "makes 643,000 files": (
        "n = 0\ntry:\n    for n in range(643_000): open(str(n), 'w').close()\n"
        "except OSError as error: print(error.strerror, n < 4096)",
        "No space left on device True",
    ),
    "makes as many links": (
        "import os\nfor n in range(5000): os.link('main.py', str(n))",
        "No space left on device",
    ),
    "makes a long file": ("open('a', 'w').truncate(1 << 40)", "File too large"),
    "opens 500 files": ("files = [open('main.py') for _ in range(500)]", "Too many open files"),
    "calls the kernel by what it does not need": (KERNEL, "let through: []"),
    "makes sockets of other families": (FAMILIES, "[1, 1, 2, 10]"),
    "maps 4 GiB": ("import mmap; mmap.mmap(-1, 4 << 30)", "Cannot allocate memory"),
    "never ends": ("while True: pass", "stopped after 1 s"),
    "sleeps": ("print(1, flush=True); import time; time.sleep(60)", "stopped after 1 s"),
    "closes its output and goes on": (
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
        "stopped after 1 s",
    ),
    "prints megabytes": ("while True: print('x' * 1000)", "it printed more than 8192 bytes"),
    "prints too much and ends": ("print('x' * 8192)", "it printed more than 8192 bytes"),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the attempts are after: a file, sockets that answer, a process, a variable."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text(SECRET)
    abstract = f"jail-{os.getpid()}"
    listening = [
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
    ]
    listening[1].bind(str(folder / "socket"))
    listening[2].bind("\0" + abstract)
    for one in listening:
        one.listen()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAIL_SECRET", SECRET)
        run_program("open('/tmp/kept', 'w')")
        yield {
            "secret": str(folder / "secret"),
            "here": __file__,
            "port": listening[0].getsockname()[1],
            "unix": str(folder / "socket"),
            "abstract": abstract,
            "pid": sleeper.pid,
            "sleeper": sleeper,
        }
    sleeper.kill()
    sleeper.wait()
    for one in listening:
        one.close()


def left_over(marker: str) -> list[str]:
    """The command lines of processes that are called so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state != "Z" and line.startswith(marker):
            found.append(line)
    return found


def test_a_machine_that_allows_a_jail_is_not_refused():
    """A jail that is broken would leave out the tests below."""
    if not shutil.which("unshare") or [*map(int, os.uname().release.split(".")[:2])] < [5, 12]:
        pytest.skip("no unshare, or a kernel without mount_setattr")
    mounted = ["unshare", "-Urpfmn", "mount", "-t", "tmpfs", "none", "/sys"]
    if subprocess.run(mounted, check=False).returncode:
        pytest.skip("the kernel allows no mounts in a namespace of one's own")
    assert not REFUSAL


@needs_jail
@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_a_program_gets(outside: dict[str, Any], name: str):
    program, expected = ATTEMPTS[name]
    if "{" in program and "\n" not in program:
        program = program.format(**outside)
    seconds = 1 if "stopped" in expected else 15
    printed = run_program(program, seconds=seconds)
    assert expected in printed
    assert SECRET not in printed
    assert len(printed) < python.OUTPUT + 100
    assert outside["sleeper"].poll() is None
    assert sorted(p.name for p in Path(outside["secret"]).parent.iterdir()) == ["secret", "socket"]


@needs_jail
@pytest.mark.parametrize("end", ["it ends", "time is over", "the worker is killed"])
def test_nothing_is_left_over(end: str):
    """A program that leaves its session and no longer ends with its parent."""
    again = "import time; time.sleep(60)"
    program = (
        "import ctypes, os, sys, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        ctypes.CDLL(None).prctl(1, 0)\n"
        f"        os.execv(sys.executable, ['left-over-daemon', '-c', {again!r}])\n"
        f"time.sleep({0.2 if end == 'it ends' else 60})"
    )
    if end == "the worker is killed":
        script = (
            f"from splitppo.envs.python import run_program; run_program({program!r}, seconds=60)"
        )
        worker = subprocess.Popen([sys.executable, "-c", script])
        wait_until(lambda: len(left_over("left-over-daemon")) == 3)
        worker.kill()
        worker.wait()
    else:
        run_program(program, seconds=1)
    wait_until(lambda: not left_over("left-over-daemon"))


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


@needs_jail
def test_what_a_program_may():
    program = (
        "import subprocess, sys, tempfile, json, random\n"
        "with tempfile.TemporaryFile() as f: f.write(b'x' * 1000)\n"
        "done = subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True)\n"
        "print(done.stdout.decode().strip(), 'ü', end='')"
    )
    assert run_program(program) == "42 ü"
    if Path(sysconfig.get_path("purelib"), "numpy").exists():
        assert run_program("import numpy; print(numpy.arange(4).sum())", seconds=60) == "6\n"
    for status in (3, 125):
        program = f"print(1)\nraise SystemExit({status})"
        assert run_program(program) == f"1\n\n[exit status {status}]"
    assert run_program("import sys; print('a', file=sys.stderr)") == "a\n"
    assert run_program(MAY) == "it may\n"
    # several at once, none in another's way
    letters = "{*'abcdefghij'}"
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(run_program(f"print({n}, {letters})")))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result[0] for result in results) == ["0", "1", "2"]
    assert len({result[1:] for result in results}) == 1, "a set is printed in one order"


@needs_jail
def test_packages_below_tmp_are_read_and_not_written(monkeypatch: pytest.MonkeyPatch):
    given = python._interpreter(False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "mine.py").write_text("print(6 * 7)")
        wanted = {"readable": [*given["readable"], folder], "path": folder}
        monkeypatch.setattr(python, "_interpreter", lambda network: wanted)
        assert run_program("import mine; open('own', 'w').write('1')") == "42\n"
        assert "Read-only" in run_program("import mine; open(mine.__file__, 'a')")


@needs_jail
def test_with_the_network(outside: dict[str, Any]):
    program = (
        "import socket; print(socket.create_connection(('127.0.0.1', {port}), 3).fileno() > 0)"
    )
    assert run_program(program.format(**outside), network=True) == "True\n"


def test_an_interpreter_that_does_not_start_is_refused(monkeypatch, tmp_path: Path):
    jail = tmp_path / "jail.py"
    jail.write_text("raise SystemExit('no libpython')")
    monkeypatch.setattr(python, "_JAIL", str(jail))
    with pytest.raises(UserError, match="no libpython"):
        python_tool()


@pytest.mark.parametrize("part", ["unshare", "mount", "mount_setattr", "pivot_root", "seccomp"])
def test_a_part_that_cannot_be_had_is_refused(part: str, monkeypatch, tmp_path: Path):
    """The kernel says no: the tool is refused at the start, with the part."""
    no = (
        f"\n\ndef call(name, *given, what=''):\n    if (what or name) == {part!r}:\n"
        f"        raise OSError({part!r} + ': not here')\n    real(name, *given, what=what)\n"
    )
    source = Path(python._JAIL).read_text().replace("def call(", "def real(")
    jail = tmp_path / "jail.py"
    jail.write_text(source.replace("\n\ndef fork_and_wait", f"{no}\n\ndef fork_and_wait", 1))
    monkeypatch.setattr(python, "_JAIL", str(jail))
    with pytest.raises(UserError) as caught:
        python_tool()
    # where this machine lacks another part, that is the one
    assert f"({part}: not here)" in str(caught.value) or REFUSAL
    assert "--env.network" in str(caught.value)


def test_an_architecture_whose_calls_are_not_known_is_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(UserError, match="no list of system calls for riscv64"):
        python_tool()
