"""The system calls that a program in the sandbox cannot make: seccomp, a list of what is refused.

Namespaces and the lack of rights refuse most of them already. What only this refuses: sockets of families that no
network namespace holds back (vsock), memory that belongs to no process and that no watch over processes sees (memfd,
System V), and the large, young parts of the kernel that programs seldom need (io_uring, bpf, userfaultfd, keys).
"""

import ctypes
import os
import platform
import struct

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, EACCES, ENOSYS = 1, 13, 38
AF_UNIX = 1
NEW_NAMESPACES = 0x7E020000  # the flags of clone that make one
X32 = 0x40000000  # calls of another ABI, with numbers of their own
# Of struct seccomp_data.
NUMBER, ARCH, ARGUMENT = 0, 4, 16
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

# The same on every architecture: pidfd_getfd, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr,
# the three of io_uring, memfd_secret.
YOUNG = (438, 428, 429, 430, 431, 432, 433, 442, 425, 426, 427, 447)
# AUDIT_ARCH, and the numbers of socket, socketpair, clone, and of those refused:
# ptrace, process_vm_readv, process_vm_writev, mount, umount2, pivot_root, chroot, unshare, setns, name_to_handle_at,
# open_by_handle_at, add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, memfd_create, shmget, msgget,
# semget, mq_open, kexec_load, init_module, finit_module, delete_module, swapon, swapoff, reboot, acct, personality.
CALLS = {
    "x86_64": (
        (0xC000003E, 41, 53, 56),
        (101, 310, 311, 165, 166, 155, 161, 272, 308, 303, 304, 248, 249, 250, 321, 298, 323, 319, 29, 68, 64, 240, 246)
        + (175, 313, 176, 167, 168, 169, 163, 135),
    ),
    "aarch64": (
        (0xC00000B7, 198, 199, 220),
        (117, 270, 271, 40, 39, 41, 51, 97, 268, 264, 265, 217, 218, 219, 280, 241, 282, 279, 194, 186, 190, 180, 104)
        + (105, 273, 106, 224, 225, 142, 89, 92),
    ),
}
CLONE3 = 435


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def filter_program(machine: str) -> bytes:
    """The filter in classic BPF. Raises ValueError for an architecture whose numbers are not known here."""
    if machine not in CALLS:
        raise ValueError(f"system calls can be filtered on {' and '.join(CALLS)}, not on {machine}")
    (arch, socket, socketpair, clone), refused = CALLS[machine]
    lines = [
        instruction(LOAD, ARCH),
        instruction(EQUAL, arch, if_true=1),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
        instruction(AT_LEAST, X32, if_false=1),
        instruction(RETURN, REFUSE | EPERM),
        instruction(EQUAL, CLONE3, if_false=1),  # its flags lie in memory; libc falls back to clone
        instruction(RETURN, REFUSE | ENOSYS),
    ]
    for number in (*refused, *YOUNG):
        lines += [instruction(EQUAL, number, if_false=1), instruction(RETURN, REFUSE | EPERM)]
    for number in (socket, socketpair):
        lines += [
            instruction(EQUAL, number, if_false=4),
            instruction(LOAD, ARGUMENT),
            instruction(EQUAL, AF_UNIX, if_true=1),
            instruction(RETURN, REFUSE | EACCES),
            instruction(RETURN, ALLOW),
        ]
    lines += [
        instruction(EQUAL, clone, if_false=3),
        instruction(LOAD, ARGUMENT),
        instruction(ANY_BIT, NEW_NAMESPACES, if_false=1),
        instruction(RETURN, REFUSE | EPERM),
        instruction(RETURN, ALLOW),
    ]
    return b"".join(lines)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def install_filter(libc: ctypes.CDLL) -> None:
    """For this process and all that it starts, for good. Needs no_new_privs. Raises ValueError or OSError."""
    lines = filter_program(platform.machine())
    program = _Program(len(lines) // 8, lines)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
