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
needs_jail = pytest.mark.skipif(bool(refusal()), reason=refusal())
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
assert count < 64, count
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
    "opens a disk": ("import os; os.mknod('disk', 0o60600, os.makedev(254, 0))", "PermissionError"),
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
        "-1 1",
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
        "import threading, time\nfor _ in range(500):\n"
        "    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()",
        "can't start new thread",
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
        "-1 1",
    ),
    # memory and time
    "allocates 4 GiB": ("bytearray(4 << 30)", "MemoryError"),
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
    assert not refusal()


@needs_jail
@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_a_program_gets(outside: dict[str, Any], name: str):
    program, expected = ATTEMPTS[name]
    if "{" in program and program is not FORK:
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
    assert run_program("print(1)\nraise SystemExit(3)") == "1\n\n[exit status 3]"
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


def test_a_machine_without_namespaces_is_refused(monkeypatch, tmp_path: Path):
    """The kernel says no: the tool is refused at the start, with the reason."""
    source = Path(python._JAIL).read_text()
    no = "ctypes.set_errno(1) or -1"
    no = f"class No:\n    unshare = prctl = staticmethod(lambda *_: {no})\nlibc = No"
    jail = tmp_path / "jail.py"
    jail.write_text(source.replace("\n\ndef call", f"\n{no}\n\ndef call", 1))
    monkeypatch.setattr(python, "_JAIL", str(jail))
    with pytest.raises(
        UserError, match=r"can't keep a program apart .*Operation not permitted.*env.network"
    ):
        python_tool()
