"""Runs a command in a child process that file permissions bind, also where the tests run as root."""

import ctypes
import io
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
VERSION_3 = 0x20080522


def give_up_rights() -> None:
    """From now on this process is refused what the permission bits refuse (Linux's capabilities)."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    mask = ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH) & 0xFFFFFFFF
    for word in (0, 1, 2):  # effective, permitted, inheritable
        data[word] &= mask
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


def run(
    command: Callable[[], int], output: Path, *, largest_file: int = 0, environ: dict | None = None
) -> tuple[int, str]:
    """Calls a function in a forked process.

    Args:
        command: returns the exit status.
        output: a file for what it prints.
        largest_file: bytes that a file of it may have, as on a disk that becomes full; 0: any.
        environ: further environment variables.

    Returns:
        The exit status, and what it printed; 99 and a traceback where it raised.
    """
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = 99
        try:
            stream = io.open(output, "w", buffering=1)  # noqa: UP020, SIM115
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            sys.stdout = sys.stderr = stream
            os.environ.update(environ or {})
            give_up_rights()
            if largest_file:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
            status = command()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, output.read_text()
