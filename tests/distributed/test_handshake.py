"""Who may join the processes of an engine: those that know the secret, whoever else knocks, over real sockets."""

import contextlib
import os
import pickle
import socket
import struct
import threading
import time

import pytest

from ferrum_jax.runtime.distributed import handshake, processes, shared_secret
from ferrum_jax.runtime.distributed.handshake import Meeting, come_to
from ferrum_jax.runtime.distributed.messages import encode

HOST, SECRET = "127.0.0.1", b"sixteen bytes or more"


@pytest.fixture
def meeting():
    made = Meeting(HOST, SECRET)
    yield made
    made.close()


@pytest.fixture
def knock(meeting):
    """Opens connections to the meeting, which are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(meeting.address, timeout=10))


def one_joins(meeting, number=1):
    """(the channel of process 0, that of the other) once a process that knows the secret has come."""
    found = []
    port = meeting.address[1]
    thread = threading.Thread(target=lambda: found.append(come_to(HOST, port, number, SECRET)))
    thread.start()
    (leader,) = meeting.channels(1, 10)
    thread.join()
    return leader, found[0]


def ends(connection):
    """Whether the other side has hung up, once it has said what it wants to say."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def test_both_share_a_connection_and_process_0_listens_at_its_address_alone(meeting):
    assert meeting.address[0] == HOST
    leader, follower = one_joins(meeting)
    leader.send(encode(["work", 1]))
    follower.send(encode(7))
    assert (follower.receive(), leader.receive()) == (["work", 1], 7)
    leader.close()
    assert follower.waits(5)
    with pytest.raises(EOFError):
        follower.receive()
    follower.close()


def test_processes_stand_in_their_order_in_whatever_order_they_come(meeting):
    port = meeting.address[1]
    found = {}
    threads = [
        threading.Thread(target=lambda n=number: found.update({n: come_to(HOST, port, n, SECRET)}))
        for number in (3, 1, 2)
    ]
    for thread in threads:
        thread.start()
    leading = meeting.channels(3, 10)
    for thread in threads:
        thread.join()
    for number, channel in enumerate(leading, 1):
        found[number].send(encode(number))
        assert channel.receive() == number
    for channel in (*leading, *found.values()):
        channel.close()


def test_strangers_neither_end_nor_hold_up_a_start(meeting, knock):
    for _ in range(20):
        knock()
    for _ in range(20):
        knock().close()
    for said in (b"\0" * 68, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000, pickle.dumps(Bomb("nothing"))):
        with contextlib.suppress(ConnectionError):
            knock().sendall(said)
    leader, follower = one_joins(meeting)
    leader.send(encode("here"))
    assert follower.receive() == "here"
    leader.close()
    follower.close()


def test_who_holds_more_connections_than_there_are_places_loses_the_oldest(meeting, knock, monkeypatch):
    monkeypatch.setattr(handshake, "_MAX_UNPROVED", 3)
    first = knock()
    for _ in range(3):
        knock()
    assert ends(first)
    for channel in one_joins(meeting):
        channel.close()


def test_who_says_nothing_in_time_is_hung_up_on_however_slowly_it_speaks(meeting, knock, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    silent, slow = knock(), knock()
    slow.sendall(b"\0")
    assert ends(silent) and ends(slow)


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_run_before_the_handshake_or_after_it(meeting, knock, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "written"))
    stranger = knock()
    stranger.sendall(bomb.ljust(68, b"."))
    assert ends(stranger)
    leader, follower = one_joins(meeting)
    follower.send(bomb)  # signed: by a process that knows the secret
    with pytest.raises(ValueError, match="a message cannot be read"):
        leader.receive()
    assert not (tmp_path / "written").exists()
    leader.close()
    follower.close()


def test_a_process_with_another_secret_is_told_so_and_is_not_let_in(meeting):
    with pytest.raises(ValueError, match=r"process 1 cannot join process 0 at 127.0.0.1 .*secret is another"):
        come_to(HOST, meeting.address[1], 1, b"another secret of some length")
    with pytest.raises(TimeoutError, match=r"processes \[1\] did not come .* 1 connections there did not know"):
        meeting.channels(1, 0.1)


def test_process_0_says_itself_that_the_others_have_another_secret(monkeypatch, capfd):
    """jax ends a program whose other processes have gone, with a trace of its own and no word of the secret."""
    assert processes.MEET_S + handshake.HANDSHAKE_S < processes.HEARTBEAT_S

    class JaxStore:
        def key_value_set_bytes(self, _key, port, **_):
            with pytest.raises(ValueError, match="secret is another"):
                come_to(HOST, int(port), 1, b"another secret of some length")

    monkeypatch.setattr(processes, "MEET_S", 0.1)
    with pytest.raises(SystemExit) as end:
        processes._await_others(JaxStore(), HOST, SECRET, 1)
    assert end.value.code == processes.EXIT_LOST
    assert "processes [1] did not come" in (said := capfd.readouterr().err) and "1 connections" in said


def echo(one: socket.socket) -> None:
    """Sends what process 0 would, but for the proof, which a stranger can at most send back."""
    one.sendall(handshake._GREETING + bytes(32))
    one.sendall(one.recv(4096)[-32:])


def say(greeting: bytes):
    return pytest.param(lambda one: one.sendall(greeting), r"hung up|no ferrum-jax", id=repr(greeting[:7]))


@pytest.mark.parametrize(
    ("answer", "says"), [(echo, "does not know the secret"), say(b""), say(b"SSH-2.0-OpenSSH_9.6\r\n" * 9)]
)
def test_a_stranger_in_the_place_of_process_0_is_not_followed(answer, says):
    with socket.create_server((HOST, 0)) as server:

        def pose():
            one, _ = server.accept()
            with one:
                answer(one)

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(ValueError, match=says):
            come_to(HOST, server.getsockname()[1], 1, SECRET)
        thread.join()


def test_a_recorded_handshake_opens_nothing(meeting, knock):
    recorded = bytearray()
    with socket.create_server((HOST, 0)) as between:

        def relay():
            """Hands on and writes down what the follower says."""
            one, _ = between.accept()
            with one, socket.create_connection(meeting.address, timeout=10) as leader:
                one.sendall(handshake._exactly(leader, len(handshake._GREETING) + 32, time.monotonic() + 10))
                recorded.extend(handshake._exactly(one, 68, time.monotonic() + 10))
                leader.sendall(recorded)
                one.sendall(handshake._exactly(leader, 32, time.monotonic() + 10))

        thread = threading.Thread(target=relay)
        thread.start()
        come_to(HOST, between.getsockname()[1], 1, SECRET).close()
        thread.join()
    stranger = knock()
    stranger.sendall(recorded)
    assert ends(stranger)
    for channel in meeting.channels(1, 5):  # that of the first
        channel.close()
    assert meeting.num_refused == 1


@pytest.fixture
def wire():
    """(a channel, what stands at the other end of its connection), without the keys."""
    near, far = socket.socketpair()
    channel = handshake._channel(near, sends=b"out", receives=b"in")
    yield channel, far
    channel.close()
    far.close()


def signed(number, content, key=b"in"):
    frame = handshake._mac(key, struct.pack(">Q", number), content) + content
    return struct.pack("!i", len(frame)) + frame


def test_a_message_that_is_sent_again_left_out_changed_or_turned_round_is_refused(wire):
    channel, far = wire
    first, second = signed(0, encode(1)), signed(1, encode(2))
    far.sendall(first + first)
    assert channel.receive() == 1
    with pytest.raises(ValueError, match="another signature"):
        channel.receive()
    far.sendall(second)
    assert channel.receive() == 2
    for forged in (signed(3, encode(3)), signed(2, encode(3), b"out"), signed(2, encode(3))[:-1] + b"4"):
        far.sendall(forged)
        with pytest.raises(ValueError, match="another signature"):
            channel.receive()


def test_a_message_that_says_it_is_too_long_is_not_read(wire, monkeypatch):
    channel, far = wire
    monkeypatch.setattr(handshake, "MAX_MESSAGE_BYTES", 1000)
    far.sendall(struct.pack("!i", 2000) + bytes(10))
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        channel.receive()


def test_a_forged_message_ends_the_processes_with_the_reason(monkeypatch, wire):
    said = []
    monkeypatch.setattr(processes.Processes, "_exit", lambda self: said.append(self._lost))
    channel, far = wire
    leader = processes.Processes(0, [channel])
    far.sendall(signed(0, encode(1), b"guessed"))
    with pytest.raises(processes.ProcessLost):
        leader._take(0)
    assert leader._lost[0].startswith("process 1: a message bears another signature")
    leader._quiet.set()
    leader._beating.join()


def test_without_a_secret_processes_meet_on_one_host_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_secret, "OWN_FILE", str(tmp_path / "new" / "own"))
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert shared_secret.secret_for(host, None) == (tmp_path / "new" / "own").read_bytes()
    assert (tmp_path / "new" / "own").stat().st_mode & 0o777 == 0o600
    for host in ("0.0.0.0", "10.1.2.3", "no.such.host.invalid"):
        with pytest.raises(ValueError, match=r"no secret is given.*--coordinator-secret-file"):
            shared_secret.secret_for(host, None)
        assert shared_secret.secret_for(host, SECRET) == SECRET
    (tmp_path / "new" / "own").chmod(0o640)
    with pytest.raises(ValueError, match="others can read or write; chmod 600"):
        shared_secret.secret_for(HOST, None)


def test_a_given_secret_is_read_from_its_file_before_the_text_and_checked(tmp_path):
    file = tmp_path / "secret"
    file.write_text("of the file, long enough\n")
    file.chmod(0o600)
    assert shared_secret.given_secret(file, "of the environment") == b"of the file, long enough"
    assert shared_secret.given_secret(None, "of the environment") == b"of the environment"
    assert shared_secret.given_secret(None, None) is None
    file.chmod(0o604)
    with pytest.raises(ValueError, match="chmod 600"):
        shared_secret.given_secret(file, None)
    for short in ("", "short", "x" * 5000):
        with pytest.raises(ValueError, match="a secret has 16 to 4096"):
            shared_secret.given_secret(None, short)


def test_before_any_process_is_looked_for_a_missing_secret_is_an_error(monkeypatch):
    monkeypatch.setattr(processes, "_join_jax", lambda *_: pytest.fail("looked for the others"))
    with pytest.raises(ValueError, match="no secret is given"):
        processes.connect("10.1.2.3:1234", 2, 1)


def test_what_stands_in_jax_s_store_is_a_port_or_an_error():
    assert processes._port_from(b"8476") == 8476
    for wrong in (b"", b"0", b"65536", b"-1", b"8476 ", b"\xff", "²".encode(), pickle.dumps((HOST, 1, b"key"))):
        with pytest.raises(ValueError, match="the port of process 0 is"):
            processes._port_from(wrong)


def test_an_address_that_this_host_has_not_is_refused():
    with pytest.raises(ValueError, match=r"cannot listen at 192.0.2.1 .*name an address that it has"):
        Meeting("192.0.2.1", SECRET)
