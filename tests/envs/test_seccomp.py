"""The filter of system calls, run as the kernel runs it."""

import errno
import struct

import pytest

from splitppo.envs.seccomp import ALLOW, FAIL, MACHINES, seccomp_filter

# of AUDIT_ARCH_X86_64, AUDIT_ARCH_AARCH64 and AUDIT_ARCH_I386
X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
NEW_USER, THREAD, FORK = 0x10000000, 0x3D0F00, 0x1200011


def decide(machine: str, architecture: int, number: int, argument: int = 0, third: int = 0) -> int:
    """What the kernel does with a call: 0 if it may be made, else its error. By struct
    seccomp_data and the opcodes of linux/bpf_common.h."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, argument, 0, third, 0, 0, 0)
    code = [*struct.iter_unpack("HBBI", seccomp_filter(machine))]
    at = word = 0
    while True:
        operation, yes, no, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (word,) = struct.unpack_from("=I", data, value)
            case 0x15:
                at += yes if word == value else no
            case 0x45:
                at += yes if word & value else no
            case 0x06:
                assert value in (ALLOW, FAIL)
                return 0 if value == ALLOW else value & 0xFFFF
            case _:
                raise AssertionError(operation)


# the numbers of Linux's tables: x86-64, aarch64
@pytest.mark.parametrize(
    ("name", "numbers", "argument", "error"),
    [
        ("read", (0, 63), 0, 0),
        ("getsockopt", (55, 209), 0, 0),
        ("faccessat2", (439, 439), 0, 0),
        ("close_range", (436, 436), 0, 0),
        ("a thread", (56, 220), THREAD, 0),
        ("a process", (56, 220), FORK, 0),
        ("a process in a namespace", (56, 220), FORK | NEW_USER, errno.ENOSYS),
        ("a process in a namespace for mounts", (56, 220), FORK | 0x20000, errno.ENOSYS),
        ("socket of files", (41, 198), 1, 0),
        ("socket of the internet", (41, 198), 10, 0),
        ("socket of the kernel", (41, 198), 16, errno.ENOSYS),
        ("socket of virtual machines", (41, 198), 40, errno.ENOSYS),
        ("socket of none, in 64 bits", (41, 198), (1 << 32) | 38, errno.ENOSYS),
        ("socketpair", (53, 199), 1, 0),
        ("socketpair of virtual machines", (53, 199), 40, errno.ENOSYS),
        ("memfd_create", (319, 279), 0, errno.ENOSYS),
        ("shmget", (29, 194), 0, errno.ENOSYS),
        ("msgget", (68, 186), 0, errno.ENOSYS),
        ("semget", (64, 190), 0, errno.ENOSYS),
        ("mq_open", (240, 180), 0, errno.ENOSYS),
        ("bpf", (321, 280), 0, errno.ENOSYS),
        ("perf_event_open", (298, 241), 0, errno.ENOSYS),
        ("userfaultfd", (323, 282), 0, errno.ENOSYS),
        ("keyctl", (250, 219), 0, errno.ENOSYS),
        ("add_key", (248, 217), 0, errno.ENOSYS),
        ("splice", (275, 76), 0, errno.ENOSYS),
        ("vmsplice", (278, 75), 0, errno.ENOSYS),
        ("sendfile", (40, 71), 0, errno.ENOSYS),
        ("unshare", (272, 97), 0, errno.ENOSYS),
        ("setns", (308, 268), 0, errno.ENOSYS),
        ("mount", (165, 40), 0, errno.ENOSYS),
        ("ptrace", (101, 117), 0, errno.ENOSYS),
        ("setuid", (105, 146), 0, errno.ENOSYS),
        ("init_module", (175, 105), 0, errno.ENOSYS),
        ("io_uring_setup", (425, 425), 0, errno.ENOSYS),
        ("clone3", (435, 435), 0, errno.ENOSYS),
        ("memfd_secret", (447, 447), 0, errno.ENOSYS),
        ("one of a later kernel", (9999, 9999), 0, errno.ENOSYS),
        ("read of x32", (1 << 30, 1 << 30), 0, errno.ENOSYS),
    ],
)
def test_what_the_filter_lets_through(
    name: str, numbers: tuple[int, int], argument: int, error: int
):
    for machine, architecture, number in zip(
        ("x86_64", "aarch64"), (X86, ARM), numbers, strict=True
    ):
        assert decide(machine, architecture, number, argument) == error


@pytest.mark.parametrize("machine", MACHINES)
def test_programs_of_another_architecture_make_no_call(machine: str):
    own = {"x86_64": X86, "aarch64": ARM}[machine]
    for architecture in {X86, ARM, I386} - {own}:
        assert {decide(machine, architecture, number) for number in range(450)} == {errno.ENOSYS}


def test_a_socket_does_not_get_more_room():
    for machine, architecture, number in (("x86_64", X86, 54), ("aarch64", ARM, 208)):
        for option, error in ((2, 0), (7, errno.ENOSYS)):  # SO_REUSEADDR, SO_SNDBUF
            assert decide(machine, architecture, number, 1, option) == error


def test_the_filter_is_as_long_as_the_kernel_takes():
    for machine in MACHINES:
        assert len(seccomp_filter(machine)) / 8 <= 4096  # BPF_MAXINSNS
    with pytest.raises(RuntimeError, match="riscv64"):
        seccomp_filter("riscv64")
