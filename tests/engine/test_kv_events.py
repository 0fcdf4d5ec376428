"""What an engine has cached, as told over ZeroMQ to those who route requests, decoded as vLLM 0.33 declares it."""

import itertools
import socketserver
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from ferrum_jax import EngineConfig, SamplingParams
from ferrum_jax.engine.kv_publisher import KVPublisher
from tests.support import answers, fresh_engine, requests_of, small_llm

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def message(number: bytes, events: bytes) -> tuple[int, EventBatch]:
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(events, type=EventBatch)


def replayed(context: zmq.Context, endpoint: str, first: int) -> list[tuple[int, EventBatch]]:
    """All messages from a number on."""
    found = []
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while (parts := socket.recv_multipart())[1] != b"\xff" * 8:
            found.append(message(*parts[1:]))
    return found


def stored(messages: dict[int, EventBatch]) -> set[int | bytes]:
    """The keys of the blocks that are there after these messages, which lack none."""
    assert sorted(messages) == [*range(len(messages))]
    keys: set[int | bytes] = set()
    for number in sorted(messages):
        assert messages[number].data_parallel_rank == 0
        for event in messages[number].events:
            if isinstance(event, AllBlocksCleared):
                keys.clear()
            elif isinstance(event, BlockRemoved):
                keys.difference_update(event.block_hashes)
            else:
                keys.update(event.block_hashes)
    return keys


def test_an_engine_tells_what_it_stores_and_removes_and_again_who_missed_it(tmp_path):
    events, replay = (f"ipc://{tmp_path}/{name}" for name in ("events", "replay"))
    llm = small_llm("qwen3")
    overrides = {"kv_events": f"{events},topic=kv@me,replay={replay}", "num_blocks": 16}
    fresh_engine(llm, **overrides).close()  # gives the endpoints free
    engine = fresh_engine(llm, **overrides)
    whole = (np.random.default_rng(seed).integers(6, 250, 64).tolist() for seed in itertools.count())  # blocks
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.subscribe(b"kv@me")
        socket.connect(events)
        while not socket.poll(50):
            answers(engine, requests_of([next(whole)], GREEDY))
        topic, *first = socket.recv_multipart()
        number, _ = message(*first)
        messages = dict([*replayed(context, replay, 0), message(*first)])
        assert topic == b"kv@me" and isinstance(messages[0].events[0], AllBlocksCleared)
        assert replayed(context, replay, number)[0] == (number, messages[number])

        def hear(wanted: set[bytes]) -> None:
            while stored(messages) != wanted:
                messages.update([message(*socket.recv_multipart()[1:])])

        hear({key for _, key in engine.scheduler.caches[0].pools[0].keyed()})
        assert engine.reset_prefix_cache()
        hear(set())
    engine.close()


@pytest.mark.parametrize("text", ["5557", "tcp://*:1,topics=a", "tcp://*:1,topic=a,topic=b", "tcp://*:1,replay=5558"])
def test_endpoints_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"kv_events is .* must be a ZeroMQ endpoint"):
        EngineConfig(kv_events=text)


def test_an_endpoint_that_cannot_be_had_is_named(tmp_path):
    llm = small_llm("qwen3")
    with pytest.raises(ValueError, match=f"kv_events cannot use ipc://{tmp_path}/none/x"):
        fresh_engine(llm, kv_events=f"ipc://{tmp_path}/none/x")


def test_who_asks_again_may_be_answered_at_one_address_alone():
    with zmq.Context() as context:
        with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as free:
            replay = f"tcp://127.0.0.1:{free.server_address[1]}"
        publisher = KVPublisher(f"inproc://told,replay={replay}", [])
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 60_000)
            socket.connect(replay)
            for asked in ((b"",), (b"", b"x"), (b"", bytes(1 << 20))):  # not all are numbers
                socket.send_multipart(asked)
                assert socket.recv_multipart() == [b"", b"\xff" * 8, b""]
        publisher.close()
