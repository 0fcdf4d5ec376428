"""How processes of one engine meet: each proves to the other that it knows their secret, which never crosses the wire.

    process 0                                   another
    GREETING, nonce ───────────────────────────►
            ◄─────────────── its number, nonce, HMAC("follower", both nonces, its number)
    HMAC("leader", both nonces, its number) ───►

All three have fixed lengths, so nothing that a stranger sends is read further or understood. Nonces are fresh on both
sides, so a recording proves nothing. From secret and nonces follow two keys, one for each direction, and every message
after it bears its HMAC with its number, so none can be forged, repeated, left out or put elsewhere. Nothing is
encrypted: who can read the network reads prompts and answers.
"""

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from ferrum_jax.runtime.distributed.messages import MAX_MESSAGE_BYTES, decode

HANDSHAKE_S = 10.0  # for a handshake, however slowly its bytes come
_GREETING = b"ferrum_jax processes 1\n"
_NONCE, _MAC, _NUMBER = 32, 32, struct.Struct(">I")
_COUNT = struct.Struct(">Q")
_MAX_UNPROVED = 64  # connections at once; of more, the oldest is closed


class Channel:
    """A connection between two processes that know the same secret; both ends are given keys the other way round."""

    def __init__(self, connection: Connection, *, sends: bytes, receives: bytes) -> None:
        """sends, receives: keys of the messages that go out and come in."""
        self._connection = connection
        self._sends, self._receives = sends, receives
        self._num_sent = self._num_received = 0

    def send(self, content: bytes) -> None:
        """Raises OSError where the other end is gone."""
        mac = _mac(self._sends, _COUNT.pack(self._num_sent), content)
        self._num_sent += 1
        self._connection.send_bytes(mac + content)

    def waits(self, seconds: float) -> bool:
        """Whether something comes in that time: a message, or the end."""
        return self._connection.poll(seconds)

    def receive(self) -> Any:
        """The next message's value. Raises EOFError or OSError at the end, and ValueError if it is not a message."""
        try:
            frame = self._connection.recv_bytes(_MAC + MAX_MESSAGE_BYTES)
        except OSError as error:
            if error.args == ("bad message length",):
                raise ValueError(f"a message has more than {MAX_MESSAGE_BYTES:,} bytes") from error
            raise
        content = frame[_MAC:]
        if not hmac.compare_digest(frame[:_MAC], _mac(self._receives, _COUNT.pack(self._num_received), content)):
            raise ValueError("a message bears another signature than one of this connection has")
        self._num_received += 1
        return decode(content)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


class Meeting:
    """Process 0's side: an address at which the others come, each in its own time and beside all that come in vain."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Raises ValueError where `host` is not an address of this host."""
        self._secret = secret
        self._proved: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        self._unproved: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.num_refused = 0
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
            self._listening = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as error:
            raise ValueError(f"process 0 cannot listen at {host} ({error}); name an address that it has") from error
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def channels(self, count: int, timeout_s: float) -> list[Channel]:
        """Channels to processes 1 to `count`, in order. Raises TimeoutError naming the processes that did not come."""
        end, found = time.monotonic() + timeout_s, {}
        while len(found) < count:
            try:
                number, channel = self._proved.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                missing = [number for number in range(1, count + 1) if number not in found]
                raise TimeoutError(
                    f"the processes {missing} did not come to {self.address[0]} port {self.address[1]} in "
                    f"{timeout_s:g} s; {self.num_refused} connections there did not know the secret"
                ) from None
            if 1 <= number <= count and number not in found:
                found[number] = channel
            else:
                channel.close()
        return [found[number] for number in sorted(found)]

    def close(self) -> None:
        """Lets nobody come any more."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would wait on
        self._listening.close()
        with self._lock:
            for one in self._unproved:
                _hang_up(one)
        while not self._proved.empty():
            self._proved.get()[1].close()

    def _accept(self) -> None:
        """Runs in a thread until `close`."""
        while True:
            try:
                one, _ = self._listening.accept()
            except ConnectionError:  # it has gone already
                continue
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.1)  # out of files, perhaps: some are closed soon
                continue
            with self._lock:
                self._unproved[one] = None
                oldest = next(iter(self._unproved)) if len(self._unproved) > _MAX_UNPROVED else None
            if oldest is not None:
                _hang_up(oldest)
            threading.Thread(target=self._meet, args=(one,), name="handshake", daemon=True).start()

    def _meet(self, one: socket.socket) -> None:
        """Runs in a thread: whoever is there proves what it knows in HANDSHAKE_S, or is hung up on."""
        try:
            found = _lead(one, self._secret)
        except (OSError, EOFError, ValueError):
            self.num_refused += 1
            one.close()
        else:
            self._proved.put(found)
        finally:
            with self._lock:
                self._unproved.pop(one, None)


def come_to(host: str, port: int, number: int, secret: bytes) -> Channel:
    """The channel from a following process to process 0. Raises ValueError saying what is wrong there."""
    try:
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(socket.create_connection((host.strip("[]"), port), timeout=HANDSHAKE_S))
            channel = _follow(one, number, secret)
            stack.pop_all()
            return channel
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"process {number} cannot join process 0 at {host} port {port}: {error}; give all processes the same "
            "secret, and an address of process 0 that this host can reach"
        ) from error


def _lead(one: socket.socket, secret: bytes) -> tuple[int, Channel]:
    end = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(_NONCE)
    one.settimeout(HANDSHAKE_S)
    one.sendall(_GREETING + ours)
    answer = _exactly(one, _NUMBER.size + _NONCE + _MAC, end)
    number, theirs = answer[: _NUMBER.size], answer[_NUMBER.size : -_MAC]
    if not hmac.compare_digest(answer[-_MAC:], _mac(secret, b"follower", ours, theirs, number)):
        raise ValueError("its secret is another")
    one.sendall(_mac(secret, b"leader", ours, theirs, number))
    to_follower, to_leader = (_mac(secret, way, ours, theirs, number) for way in (b"to follower", b"to leader"))
    return _NUMBER.unpack(number)[0], _channel(one, sends=to_follower, receives=to_leader)


def _follow(one: socket.socket, number: int, secret: bytes) -> Channel:
    end = time.monotonic() + HANDSHAKE_S
    greeting = _exactly(one, len(_GREETING) + _NONCE, end)
    if not greeting.startswith(_GREETING):
        raise ValueError("what answers there is no ferrum-jax of this version")
    theirs, ours, me = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE), _NUMBER.pack(number)
    one.sendall(me + ours + _mac(secret, b"follower", theirs, ours, me))
    try:
        proof = _exactly(one, _MAC, end)
    except (ConnectionError, EOFError) as error:
        raise ValueError("it hung up, for its secret is another") from error
    if not hmac.compare_digest(proof, _mac(secret, b"leader", theirs, ours, me)):
        raise ValueError("what answers there does not know the secret")
    to_follower, to_leader = (_mac(secret, way, theirs, ours, me) for way in (b"to follower", b"to leader"))
    return _channel(one, sends=to_leader, receives=to_follower)


def _channel(one: socket.socket, *, sends: bytes, receives: bytes) -> Channel:
    one.settimeout(None)
    with contextlib.suppress(OSError):  # no TCP
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(Connection(one.detach()), sends=sends, receives=receives)


def _exactly(one: socket.socket, count: int, end: float) -> bytes:
    """So many bytes. Raises OSError where they have not come by then, and EOFError where the other has gone."""
    found = b""
    while len(found) < count:
        one.settimeout(max(end - time.monotonic(), 0.001))
        more = one.recv(count - len(found))
        if not more:
            raise EOFError("it hung up")
        found += more
    return found


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Signs the parts; the first fixes the lengths of all but the last, so that no two lists look alike."""
    return hmac.digest(key, b"".join(parts), "sha256")


def _hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
