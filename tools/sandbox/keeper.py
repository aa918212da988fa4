"""A parent for a candidate's process that outlives whatever the candidate does, and ends all that it started.

It is forked off before the candidate is imported. It ends the candidate and every descendant, those in sessions of
their own too, as soon as the candidate's process ends or the run lets go of ``control``, killed or not.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
ENDING_SECONDS = 5.0


def fork(control: socket.socket, channel: socket.socket) -> None:
    """Fork: the child returns, it is the candidate's process; the parent keeps it and never returns."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    mine, theirs = socket.socketpair()
    for end in (mine, theirs):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(theirs.fileno())
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (mine, theirs, control):
            end.close()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    channel.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    status = None
    while status is None and control not in select.select([control, mine], [], [])[0]:
        mine.recv(4096)
        status = _reap(worker)
    _end_all(worker)
    if status is not None:
        with contextlib.suppress(OSError):  # the run has let go meanwhile
            control.send(f"signal {-status}".encode() if status < 0 else f"exit {status}".encode())
    os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap(worker: int) -> int | None:
    """Bury who has died; the exit code of ``worker`` if it was among them, negative for a signal."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == worker:
            found = os.waitstatus_to_exitcode(status)


def _end_all(worker: int) -> None:
    """Kill all children; theirs become ours then, and are next."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (children := _children(worker)) and time.monotonic() < deadline:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        _reap(worker)


def _children(worker: int) -> list[int]:
    """Our children that are not buried; without /proc only the one that we know."""
    me, found = os.getpid(), []
    if not os.path.isdir("/proc/self"):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return []
        return [worker]
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal():
                with open(f"/proc/{name}/stat", "rb") as file:
                    # "pid (name) state parent …", and the name may hold anything.
                    if int(file.read().rpartition(b")")[2].split()[1]) == me:
                        found.append(int(name))
        except OSError:  # gone meanwhile
            continue
    return found
