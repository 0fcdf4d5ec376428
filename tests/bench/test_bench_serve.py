"""`ferrum-jax bench serve`: what it asks is as the flags say, and its numbers are those of a server that is known."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import statistics
import threading

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.bench.serving.http_client import Address, Answered
from ferrum_jax.bench.serving.loads import Load, TimedRequest, read_trace, requests_of
from ferrum_jax.bench.serving.run import limits_of, summary_of


class FakeServer:
    """Speaks as a server of one model does. asked: the bodies it got. Prompts that begin with 13 break off."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.loop = asyncio.new_event_loop()
        self.server = self.loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.server.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _answer(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        content = await reader.readexactly(length)
        if head.startswith("get"):
            answer = json.dumps({"data": [{"id": "fake"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        else:
            body = json.loads(content)
            self.asked.append(body)
            events = [{"choices": [{"text": "x"}]} for _ in range(body["max_tokens"])]
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            events.append({"choices": [], "usage": usage})
            parts = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
            if body["prompt"][0] != 13:
                parts.append(b"data: [DONE]\n\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in parts:  # an event may be cut anywhere
                for piece in (part[:7], part[7:]):
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()


@pytest.fixture
def server():
    found = FakeServer()
    yield found
    found.close()


def bench(*words: str) -> int:
    return main(["bench", "serve", *words])


def test_a_run_gives_the_numbers_of_its_requests(server, tmp_path, capsys):
    flags = ["--num-prompts", "8", "--input-len", "20", "--output-len", "5", "--request-rate", "1000"]
    assert bench("--url", server.url, *flags, "--output", str(tmp_path / "out.json"), "--goodput", "ttft:60000") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model_id"], found["completed"], found["failed"]) == ("fake", 8, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (160, 40)
    assert (
        found["request_goodput"] == pytest.approx(found["request_throughput"]) == pytest.approx(8 / found["duration"])
    )
    assert 0 <= found["median_ttft_ms"] <= found["p99_ttft_ms"] <= 1000 * found["duration"]
    details = json.loads((tmp_path / "out.json").read_text())
    assert details["output_lens"] == [5] * 8 and [len(each) for each in details["itls"]] == [4] * 8
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in server.asked)


@pytest.mark.slow
def test_a_run_is_drawn(server, tmp_path):
    assert bench("--url", server.url, "--num-prompts", "4", "--plot", str(tmp_path / "out.png")) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_streams_that_break_off_are_failures(server, tmp_path, capsys):
    lines = [{"timestamp": 0, "prompt": [token, 20], "max_tokens": 2} for token in (13, 14)]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
    assert bench("--url", server.url, "--trace", str(tmp_path / "trace")) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["failed"], found["request_rate"]) == (1, 1, "trace")
    assert "broke off" in found["first_error"]


def test_a_url_where_nobody_answers_is_an_error_that_names_it(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert bench("--url", f"http://127.0.0.1:{port}") == 2
    assert f"no server answers at 127.0.0.1:{port}" in capsys.readouterr().err
    assert bench("--url", "127.0.0.1") == 2
    assert "--url is '127.0.0.1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--request-rate", "0"), "rate is 0.0"),
        (("--load", "shared-prefix", "--prefix-len", "256"), "prefix_len is 256"),
        (("--goodput", "speed:1"), "--goodput has 'speed:1'"),
        (("--max-concurrency", "0"), "--max-concurrency is 0"),
    ],
)
def test_flags_that_cannot_be_are_named(flags, said, capsys):
    assert bench("--url", "http://127.0.0.1:1", *flags) == 2
    assert said in capsys.readouterr().err


def test_without_serve_a_model_and_a_workload_are_needed(capsys):
    assert main(["bench"]) == 2
    assert "bench needs --model" in capsys.readouterr().err


def test_arrivals_have_their_rate_and_bursts():
    for burstiness in (0.2, 1.0, 5.0):
        found = requests_of(Load(num_prompts=4000, input_len=1, request_rate=10.0, burstiness=burstiness))
        gaps = [later.at_s - sooner.at_s for sooner, later in itertools.pairwise(found)]
        assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.15)
        assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.15)
    assert {each.at_s for each in requests_of(Load(request_rate=float("inf")))} == {0.0}


def test_loads_have_the_lengths_and_the_prefixes_that_were_asked_for():
    shared = requests_of(Load(load="shared-prefix", input_len=50, prefix_len=40, num_prefixes=3))
    assert {len(each.prompt) for each in shared} == {50}
    assert len({tuple(each.prompt[:40]) for each in shared}) == 3 < len({tuple(each.prompt) for each in shared})
    ragged = requests_of(Load(load="ragged", input_len=50, output_len=9, num_prompts=500))
    assert {len(each.prompt) for each in ragged} == set(range(1, 51))
    assert {each.max_tokens for each in ragged} == set(range(1, 10))
    assert requests_of(Load(seed=1)) == requests_of(Load(seed=1)) != requests_of(Load(seed=2))


def test_a_trace_of_lengths_shares_prefixes_where_its_hashes_are_equal(tmp_path):
    path = tmp_path / "trace"
    lines = [
        {"timestamp": 2000 + 1000 * place, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2 + place // 2, 9]}
        for place in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = read_trace(path)
    assert [first.at_s, second.at_s, third.at_s] == [0.0, 1.0, 2.0]
    assert first.prompt == second.prompt and first.prompt[:512] == third.prompt[:512] != third.prompt[512:1024]
    assert first.prompt[512:1024] != third.prompt[512:1024] and len(third.prompt) == 1030 and third.max_tokens == 7
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match="line 1, is no request"):
        read_trace(path)


def test_a_summary_counts_by_hand():
    asked = TimedRequest(at_s=0.0, prompt=[1], max_tokens=3)
    times = [[0.1, 0.2, 0.4], [1.5, 1.6, 1.7]]
    answers = [
        Answered(asked=asked, sent=float(place), event_times=each, ended=each[-1], num_prompt_tokens=4, num_tokens=3)
        for place, each in enumerate(times)
    ]
    found = summary_of(answers, limits_of(["ttft:200"]))
    assert found["duration"] == pytest.approx(1.7) and found["request_goodput"] == pytest.approx(1 / 1.7)
    assert found["mean_ttft_ms"] == pytest.approx(300) and found["median_itl_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(125) and found["mean_e2el_ms"] == pytest.approx(550)
    assert found["p99_ttft_ms"] == pytest.approx(496) and found["max_concurrent_requests"] == 1
    assert found["max_output_tokens_per_s"] == 3


def test_a_url_is_taken_apart():
    assert (Address.of("https://h/api/v1").path, Address.of("https://h/api").port) == ("/api", 443)
    assert Address.of("http://h:5/").path == "" and Address.of("http://[::1]:5").host == "::1"
