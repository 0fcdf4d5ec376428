"""Processes: several of them, most often one on each host, that run one engine over all their devices.

Process 0 leads. It alone reads requests, keeps journals and speaks; each call that changes its engine it sends to the
others, which make the same call on engines of their own (`ferrum_jax/engine/lockstep.py`). So all keep the same books
and make the same plans, and each dispatches its own devices' part of a step.

What goes between them are the messages of `messages.py`, over the connections of `handshake.py`.

A process that ends closes its connection, and the others end at once. A host that vanishes, or a process that is
stopped, closes nothing: all say every few seconds that they are there, and who says nothing for SILENCE_S is lost.
Either way the same command on all hosts goes on.
"""

import contextlib
import queue
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import distributed  # the store of keys that jax's processes share has no public name
from jax.sharding import Mesh

from ferrum_jax.io import system
from ferrum_jax.runtime.distributed.handshake import Channel, Meeting, come_to
from ferrum_jax.runtime.distributed.messages import Beat, Broken, Digest, End, Failure, encode, joined
from ferrum_jax.runtime.distributed.shared_secret import require_own_name, secret_for

EXIT_LOST = 75  # as after a preemption (EX_TEMPFAIL): the same command goes on
SILENCE_S = 20.0
HEARTBEAT_S = 45  # of jax, which ends a program in its own words: it comes first only where processes are not connected
START_S = 300  # how long processes wait for one another when they start
MEET_S = 30  # and then, when all are there, for their connections: less than HEARTBEAT_S, so that the reason is said
CHECK_STEPS = 64
_BEATS = 4  # in SILENCE_S
_ORDERLY_S = 5.0  # how long this process has to end in order once another is lost
_MAX_DIGESTS = 16
_KEY = "ferrum_jax/port"  # at which process 0 listens; whoever is there must prove that it knows the secret


class ProcessLost(SystemExit):
    """Another process has ended, or does other things. It passes by whoever handles the errors of rows."""


class Processes:
    """The processes of an engine, as one of them sees them; `connect` makes it."""

    def __init__(self, index: int, connections: Sequence[Channel]) -> None:
        """connections: of process 0 to all others in their order; of others to process 0."""
        self.index = index
        self._connections = list(connections)
        self._received: list[queue.SimpleQueue[Any]] = [system.SimpleQueue() for _ in connections]
        self._digests: dict[int, tuple[int, bytes]] = {}  # by step: of the process that was first, its digest
        self._lock = system.Lock()
        self._sending = system.Lock()  # a message at a time
        self._opened = self._ended = self._may_renew = False
        self._has_gone = False  # another process, which was to end in order
        self._lost: tuple[str, int] | None = None  # why, and the exit code
        self._quiet = system.Event()  # once nobody needs to know that this process is there
        self._threads = [
            system.Thread(target=self._receive, args=(number,), name="process", daemon=True)
            for number in range(len(connections))
        ]
        self._beating = system.Thread(target=self._beat, name="beats", daemon=True)
        for thread in (*self._threads, self._beating):
            thread.start()

    @property
    def leads(self) -> bool:
        return self.index == 0

    def send(self, what: object) -> None:
        """To all that this one is connected to. Raises ProcessLost where one of them is lost."""
        self._send(encode(what))

    def send_all(self, encoded: Sequence[bytes]) -> None:
        """Sends lists of values that `encode` has encoded."""
        for message in joined(encoded):
            self._send(message)

    def _send(self, content: bytes) -> None:
        self.check()
        with self._sending:
            for connection, thread in zip(self._connections, self._threads, strict=True):
                try:
                    connection.send(content)
                except OSError as error:
                    thread.join(_ORDERLY_S)  # it reads the other's last words, and then what this is about
                    raise ProcessLost(EXIT_LOST) from error

    def open(self, arguments: dict[str, Any]) -> None:
        """On process 0, lets the others open an LLM with these arguments. Raises ValueError for a second one."""
        if self._opened:
            raise ValueError("several processes run one LLM, and this program has one already; start them again")
        self._opened = True
        self.send(arguments)

    def receive(self) -> Any:
        """Waits for process 0's next message. Raises SystemExit where it is the end."""
        return self._take(0)

    def agree(self, value: int) -> int:
        """The smallest of all processes' values. All must ask, in the same order."""
        if not self.leads:
            self.send(value)
            return self.receive()
        smallest = min([value, *(self._take(number) for number in range(len(self._connections)))])
        self.send(smallest)
        return smallest

    def compare(self, step: int, digest: bytes) -> None:
        """Says what the plans up to a step have been; process 0 finds out whether they differ."""
        if self.leads:
            self._compare(0, Digest(step, digest))
            self.check()
        else:
            self.send(Digest(step, digest))

    def break_together(self, call: int, reason: str) -> None:
        """Returns once all processes have said that their engines broke in the same call, so that all may renew them.

        Raises ProcessLost, with the reason, where one does not: it waits for a device, or is elsewhere.
        """
        self.send(Broken(call))
        for received in self._received:
            try:
                found = received.get(timeout=_ORDERLY_S)
            except queue.Empty:
                found = None
            if found != Broken(call):
                raise self.lose(reason)
        with self._lock:
            self._digests.clear()  # steps are counted anew
        self._may_renew = True

    def renew(self) -> None:
        """Lets an engine follow one that broke in all processes. Raises ValueError for one that broke in this alone."""
        if not self._may_renew:
            raise ValueError(
                "a call was broken off in this process and not in the others, so their engines differ; start the "
                "program again on all of them"
            )
        self._may_renew = False

    def check(self) -> None:
        """Raises ProcessLost once another process is lost."""
        if self._lost is not None:
            raise ProcessLost(self._lost[1])

    def lose(self, reason: str, code: int = EXIT_LOST) -> ProcessLost:
        """Raised when this process cannot go on, or another does not. It has little time to end in order."""
        with self._lock:
            if self._lost is None:
                self._lost = reason, code
                timer = system.Timer(_ORDERLY_S if self.leads else 0.0, self._exit)
                timer.daemon = True
                timer.start()  # the main thread may wait for a device that never answers
        for received in self._received:
            received.put(None)
        return ProcessLost(code)

    def fail(self, message: str, code: int) -> None:
        """Ends this process, once it has said to process 0 why."""
        with contextlib.suppress(ProcessLost):  # it is ending too
            self.send(Failure(message, code))
        system.leave(code)

    def end(self, code: int) -> None:
        """On process 0, lets the others end with this exit code; on another that was let end, says that it comes.

        A process that lost another ends at once, and so does process 0 with a code where another does not come in
        time, because it opens its model, or has gone: jax would wait for it, and then end the program by a signal.
        """
        if self._lost is None and self.leads and not self._ended:
            self._ended = True
            with contextlib.suppress(ProcessLost):
                self.send(End(code))
            self._quiet.set()
            for thread in self._threads:  # the others' last words
                thread.join(_ORDERLY_S)
            all_come = not self._has_gone and not any(thread.is_alive() for thread in self._threads)
            if code and self._lost is None and not all_come:
                self._leave(code)
        elif self._lost is None and self._ended:
            with contextlib.suppress(ProcessLost):
                self.send(End(code))
        if self._lost is not None:
            self._exit()

    # -- inside ----------------------------------------------------------------------------------------

    def _take(self, number: int) -> Any:
        found = self._received[number].get()
        if isinstance(found, End):
            raise SystemExit(found.code)
        self.check()
        return found

    def _receive(self, number: int) -> None:
        """Runs in a thread: puts messages where they are awaited, until the connection ends or is silent.

        A process that process 0 let end is to be gone when that is, whatever it still does.
        """
        peer, connection, code = number + 1 if self.leads else 0, self._connections[number], 0
        try:
            while True:
                if not connection.waits(SILENCE_S) and not self._ended:
                    self.lose(f"process {peer} has said nothing for {SILENCE_S:g} s")
                    return
                found = connection.receive()
                if isinstance(found, Beat):
                    continue
                if isinstance(found, Digest):
                    self._compare(peer, found)
                elif isinstance(found, Failure):
                    self.lose(f"process {peer}: {found.message}", found.code)
                else:
                    self._received[number].put(found)
                    if isinstance(found, End):
                        self._ended = True
                        self._quiet.set()
                        if self.leads:
                            return
                        code = found.code
        except (EOFError, OSError):
            self._has_gone = True
            if not self._ended:
                self.lose(f"process {peer} has ended")
            elif not self.leads:
                self._leave(code)
        except ValueError as error:
            self.lose(f"process {peer}: {error}")

    def _beat(self) -> None:
        """Runs in a thread: says that this process is there, until it ends or another does."""
        with contextlib.suppress(ProcessLost):  # whoever reads from that process says so
            while not self._quiet.wait(SILENCE_S / _BEATS):
                self.send(Beat())

    def _compare(self, process: int, found: Digest) -> None:
        with self._lock:
            first, digest = self._digests.setdefault(found.step, (process, found.digest))
            if len(self._digests) > _MAX_DIGESTS:
                del self._digests[min(self._digests)]
        if digest != found.digest:
            self.lose(
                f"at step {found.step} the plans of process {max(process, first)} differ from those of process "
                f"{min(process, first)}: their engines were not given the same calls"
            )

    def _exit(self) -> None:
        assert self._lost is not None
        reason, code = self._lost
        text = (
            f"ferrum-jax, process {self.index}: {reason}. All processes end; the same command on all of them goes on."
        )
        print(text, file=sys.stderr, flush=True)
        self._leave(code)

    def _leave(self, code: int) -> None:
        """An exit in order would wait for the process that is lost."""
        sys.stdout.flush()
        system.leave(code)


_current: Processes | None = None


def current() -> Processes | None:
    """The processes that this one has joined, if they are several."""
    return _current


def smallest(value: int) -> int:
    """The smallest of all processes' values, so that all plan with the same."""
    return value if _current is None else _current.agree(value)


def told(value: Any) -> Any:
    """Process 0's value, on all of them."""
    if _current is None:
        return value
    if not _current.leads:
        return _current.receive()
    _current.send(value)
    return value


def own_device(mesh: Mesh) -> Any:
    """A device of the mesh that this process can ask things."""
    return next(device for device in mesh.devices.flat if device.process_index == jax.process_index())


def refuse_several_processes(what: str) -> None:
    """Raises ValueError where this process is one of several."""
    if _current is not None:
        raise ValueError(f"{what} is for one process, and this engine has several; run it on one host")


def require_all_processes(mesh: Mesh) -> None:
    """Raises ValueError where a process has no device of the mesh: it could not fetch what a step gives."""
    taking = {device.process_index for device in mesh.devices.flat}
    if len(taking) < jax.process_count():
        raise ValueError(
            f"a mesh of {mesh.size} devices leaves out {jax.process_count() - len(taking)} of the "
            f"{jax.process_count()} processes; give a mesh of all {jax.device_count()} devices, such as "
            f"tp={jax.device_count()}"
        )


def connect(
    coordinator: str, num_processes: int | None, process_id: int | None, secret: bytes | None = None
) -> Processes | None:
    """Joins the other processes of a job, before anything asks for devices; None where there are no others.

    coordinator: HOST:PORT of process 0, or "auto", which jax finds in a TPU slice or under Slurm. secret: see
    `shared_secret.py`. Raises ValueError where the processes cannot be found, or a secret is missing or another, and
    SystemExit where the others do not come in time.
    """
    global _current
    where: dict[str, Any] = {}
    if coordinator != "auto":
        secret = secret_for(_host_of(coordinator), secret)
        if process_id == 0:
            require_own_name(_host_of(coordinator))
        where = {"coordinator_address": coordinator, "num_processes": num_processes, "process_id": process_id}
        where["coordinator_bind_address"] = coordinator
    _join_jax(coordinator, where)
    state = distributed.global_state
    if state.num_processes == 1:
        return None
    assert state.client is not None and state.coordinator_address is not None
    host = _host_of(state.coordinator_address)
    secret = secret_for(host, secret)
    if state.process_id == 0:
        connections = _await_others(state.client, host, secret, state.num_processes - 1)
    else:
        port = _port_from(state.client.blocking_key_value_get_bytes(_KEY, MEET_S * 1000))
        connections = [come_to(host, port, state.process_id, secret)]
    _current = Processes(state.process_id, connections)
    return _current


def _join_jax(coordinator: str, where: dict[str, Any]) -> None:
    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=HEARTBEAT_S,
        )
    except ValueError as error:
        raise ValueError(
            f"coordinator is {coordinator!r}, and the processes cannot be found ({error}); give HOST:PORT of process 0 "
            "with num_processes and process_id"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        print(f"ferrum-jax: the other processes did not come in {START_S} s: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_LOST) from error


def _await_others(client: Any, host: str, secret: bytes, count: int) -> list[Channel]:
    """Channels to all other processes, in their order."""
    meeting = Meeting(host, secret)
    try:
        client.key_value_set_bytes(_KEY, str(meeting.address[1]).encode(), allow_overwrite=True)
        return meeting.channels(count, MEET_S)
    except TimeoutError as error:
        print(f"ferrum-jax: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_LOST) from error
    finally:
        meeting.close()


def _port_from(content: bytes) -> int:
    """Anyone can write to jax's store, so that nothing but a number is taken from it."""
    text = content[:8].decode("ascii", "replace")
    if not (text.isdecimal() and len(content) <= 5 and 0 < int(text) < 65536):
        raise ValueError(f"the port of process 0 is {text!r} in jax's store of keys; has something else written there?")
    return int(text)


def _host_of(address: str) -> str:
    return address.rpartition(":")[0]
