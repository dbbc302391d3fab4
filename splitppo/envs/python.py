"""The tool `python`: runs a program of the policy in a jail (jail.py), with limits."""

import functools
import json
import os
import platform
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitppo.envs.seccomp import seccomp_filter
from splitppo.errors import UserError, one_line

SECONDS = 10
OUTPUT = 8192  # bytes that are kept of what a program prints
_JAIL = str(Path(__file__).with_name("jail.py"))


def python_tool(*, network: bool = False) -> Callable[[str], str]:
    """The function `python`, after a test program has run. Raises UserError if this machine can't
    isolate programs. With `network` they use the machine's network."""
    try:
        if (printed := run_program("print(1)", network=network)) != "1\n":
            raise RuntimeError(one_line(printed))
    except RuntimeError as error:
        raise UserError(
            f"env.tools=python: this machine can't isolate a program ({error}); "
            "allow user namespaces (docker run --security-opt seccomp=unconfined; sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0) on Linux 5.12 or later with seccomp "
            "filters, x86-64 or aarch64; allow the network if that alone fails (--env.network); or "
            "drop the tool"
        ) from error

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program. Print what you want to know: nothing is kept from call to call.

        Returns:
            What it printed, and how it ended if not as it should.
        """
        return run_program(code, network=network)

    return python


def run_program(code: str, *, network: bool = False, seconds: int = SECONDS) -> str:
    """Returns what a program prints, cut to `OUTPUT` bytes, and a line in brackets if it was cut or
    failed. Raises RuntimeError if this machine allows no jail."""
    calls = seccomp_filter(platform.machine()).hex()
    process: Any = subprocess.Popen(
        [
            os.path.realpath(sys.executable), "-I", "-S", _JAIL,
            json.dumps(
                {"network": network, "seconds": seconds, "calls": calls, **_interpreter(network)}
            ),
        ],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={},
        start_new_session=True,
    )  # fmt: skip
    with process:
        with suppress(BrokenPipeError), process.stdin as program:
            program.write(code.encode(errors="replace"))
        printed = process.stdout.read(OUTPUT + 1)
        if len(printed) > OUTPUT:
            process.kill()  # and so all that it has started
        complaint = process.stderr.read().decode(errors="replace")
    if complaint:
        raise RuntimeError(one_line(complaint))
    text = printed[:OUTPUT].decode(errors="replace")
    if len(printed) > OUTPUT:
        return f"{text}\n[stopped: it printed more than {OUTPUT} bytes]"
    ends = {0: "", -signal.SIGALRM: f"\n[stopped after {seconds} s]"}
    return text + ends.get(process.returncode, f"\n[exit status {process.returncode}]")


@functools.cache
def _interpreter(network: bool) -> dict[str, list[str] | str]:
    """What the interpreter needs to read: its file and folders, and the system's libraries. And
    where its packages are."""
    paths = sysconfig.get_paths()
    packages = [paths["purelib"], paths["platlib"]]
    wanted = [
        os.path.realpath(sys.executable), f"{sys.base_prefix}/lib",
        f"{sys.base_prefix}/lib64", paths["stdlib"],
        *packages, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache",
        *["/etc/resolv.conf", "/etc/hosts", "/etc/ssl"] * network,
    ]  # fmt: skip
    existing = {Path(path) for path in wanted if os.path.exists(path)}
    return {
        "readable": [str(path) for path in sorted(existing) if existing.isdisjoint(path.parents)],
        "path": os.pathsep.join(dict.fromkeys(packages)),
    }
