"""What a function of hostile bytes may do, as one that decodes them: called in a child."""

import os
import signal
import socket
import subprocess
import time
from typing import Any


def reversed_bytes(content: bytes, order: Any) -> bytes:
    return content[::-1] + str(order).encode()


def refuse(content: bytes, order: Any) -> bytes:
    raise ValueError(f"the sound is {content!r}: {order}")


def break_down(content: bytes, order: Any) -> bytes:
    raise KeyError("no such stream")


def crash(content: bytes, order: Any) -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return b""


def leave(content: bytes, order: Any) -> bytes:
    os._exit(3)


def hang(content: bytes, order: Any) -> bytes:
    while True:
        pass


def sleep(content: bytes, order: Any) -> bytes:
    time.sleep(1000)
    return b""


def hoard(content: bytes, order: Any) -> bytes:
    return bytes(1 << 31)


def say_much(content: bytes, order: Any) -> bytes:
    os.write(1, b"A")
    for _ in range(200):
        os.write(1, bytes(1 << 16))
    return b""


def reach(content: bytes, order: Any) -> bytes:
    """Says what could be opened; nothing should be."""
    found = []
    for name, call in {
        "file": lambda: os.open("/etc/hostname", os.O_RDONLY),
        "written": lambda: os.open("/tmp/written", os.O_CREAT | os.O_WRONLY),
        "socket": socket.socket,
        "process": lambda: subprocess.Popen(["/bin/true"]),
    }.items():
        try:
            call()
            found.append(name)
        except OSError:
            pass
    return " ".join([*found, *os.environ]).encode()
