"""What a student's process may not ask of the kernel, as a program for seccomp.

Files and processes end with a submission, because they are counted and cleared. These calls could
leave something that is neither (System V memory, message queues, keys), reach into another process
(the one that serves the next submission), or open a large part of the kernel for nothing.
"""

import errno
import platform
import struct

_X86_64, _AARCH64 = "x86_64", "aarch64"
#: By architecture: what the kernel calls it, and the place of a call's number in `_DENIED`.
_ARCHITECTURES = {_X86_64: (0xC000003E, 0), _AARCH64: (0xC00000B7, 1)}
#: Refused whatever their arguments; numbers of Linux's ``unistd.h``, x86-64 and arm64.
_DENIED = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # memory that belongs to no process, and what outlives all of them
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # parts of the kernel that no exercise needs
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "perf_event_open": (298, 241),
    "syslog": (103, 116),
    "userfaultfd": (323, 282),
}
#: Refused unless the process means itself: the first argument is 0.
_ONLY_ITSELF = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}

# The instructions, of <linux/bpf_common.h>, and where a call's facts lie, of <linux/seccomp.h>.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_FOREIGN_NUMBERS = 0x40000000  # x32's, a second set on x86-64


def filter_program(machine: str | None = None) -> bytes | None:
    """The program for ``bwrap --seccomp``, or None where the numbers of the calls are not known.

    Args:
        machine: `x86_64` or `aarch64`; this one by default.
    """
    known = _ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, column = known
    refused, allowed = (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)
    steps = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, architecture), refused]
    steps += [(_LOAD, 0, 0, _NUMBER), (_IF_AT_LEAST, 0, 1, _FOREIGN_NUMBERS), refused]
    for numbers in _DENIED.values():
        steps += [(_IF_EQUAL, 0, 1, numbers[column]), refused]
    for numbers in _ONLY_ITSELF.values():
        steps += [(_IF_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        steps += [(_IF_EQUAL, 1, 0, 0), refused, allowed]
    return b"".join(struct.pack("<HBBI", *step) for step in [*steps, allowed])
