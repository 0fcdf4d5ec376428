"""The machine as jobs, batches, stores and lockstep see it: clocks, chance, threads, processes and files.

They ask for these by `system.NAME` and nowhere else (tests/house/test_seams.py), so that a test's world can put another
machine in their place: one that loses power, whose disk is full, whose clocks jump, where one seed decides who goes on.
"""

import functools
import os
from builtins import open  # noqa: UP029 - so that it is a name of this module
from os import _exit as leave
from os import access, chmod, fsync, getpid, link, listdir, lstat, makedirs, rename, replace, stat, unlink
from os.path import exists, isdir, isfile, islink, lexists, realpath, samefile
from pathlib import Path
from queue import SimpleQueue
from random import random
from secrets import token_hex
from signal import signal
from tempfile import TemporaryDirectory, TemporaryFile, mkstemp
from threading import Event, Lock, Thread, Timer, current_thread, main_thread
from time import monotonic, perf_counter, sleep
from time import time as now

__all__ = ["access", "exists", "isdir", "isfile", "islink", "lexists", "listdir", "lstat", "realpath", "stat"]
__all__ += ["chmod", "fsync", "link", "makedirs", "mkstemp", "open", "rename", "replace", "samefile", "unlink"]
__all__ += ["TemporaryDirectory", "TemporaryFile", "monotonic", "now", "perf_counter", "random", "sleep", "sync_folder"]
__all__ += [
    "Event",
    "Lock",
    "SimpleQueue",
    "Thread",
    "Timer",
    "getpid",
    "in_main_thread",
    "leave",
    "process_place",
    "process_start",
    "signal",
    "token_hex",
]


def in_main_thread() -> bool:
    """Whether signals reach the calling thread."""
    return current_thread() is main_thread()


def process_start(pid: object) -> str | None:
    """When a process of this place began, in ticks since boot; None if no such process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fsync(handle)
    finally:
        os.close(handle)


def _new_file_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@functools.cache
def process_place() -> str:
    """The place in which numbers of processes are unique, "" where the system hides it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


NEW_FILE_MODE = _new_file_mode()  # read once: reading it changes it for a moment
