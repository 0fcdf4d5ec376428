"""Traces read back, reuse distances against a naive count, and the command that shows them."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.scheduling.replay import replay, reuse_distances
from ferrum_jax.trace import Segment, TracedChoice, TracedRequest, TraceHeader, TraceWriter, read_trace

HEADER = TraceHeader(
    block_size=4, block_bytes=[2048], num_blocks=16, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64
)


def request(prompt: list[int], arrival: int = 0, output: int = 6) -> TracedRequest:
    choice = TracedChoice(token_ids=[9] * output, finish_reason="length")
    return TracedRequest(id=arrival, arrival=arrival, prompt_token_ids=prompt, max_tokens=output, choices=[choice])


@pytest.fixture
def trace(tmp_path):
    """Two prompts of 32 tokens in turn, eight times each; a pool of 16 blocks holds one of them and a half."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(str(path), HEADER)
    for index in range(16):
        writer.write(request([index % 2] * 32 + [2, index], arrival=40 * index))
    return path


def test_a_larger_pool_hits_what_a_smaller_one_has_evicted(trace):
    segments = read_trace(trace)
    small, large = replay(segments, 16), replay(segments, 64)
    assert (small.lookups, large.lookups) == (16, 16)
    assert small.evictions > 0 == large.evictions and small.hit_rate < large.hit_rate
    assert large.hit_tokens == 14 * 32, "all but the first of each hit all of the common part"


def test_a_request_larger_than_the_pool_is_counted_and_the_others_run(trace):
    outcome = replay(read_trace(trace), 9)
    assert (outcome.too_large, outcome.lookups) == (16, 0)


def test_reuse_distances_are_those_of_a_naive_count():
    prompts = [[stem] * (8 + 4 * (stem + turn) % 20) for turn in range(4) for stem in (0, 1, 0, 2, 3)]
    segment = Segment(header=HEADER, requests=[request(ids, output=1 + len(ids) % 7) for ids in prompts])
    expected: list[int | None] = []
    stack: list[tuple[int, ...]] = []  # blocks by their whole prefix, the most recently used last
    for traced in segment.requests:
        ids = traced.prompt_token_ids + traced.choices[0].token_ids[:-1]
        for end in range(4, len(ids) + 1, 4):
            block = tuple(ids[:end])
            if end < len(traced.prompt_token_ids):
                expected.append(len(stack) - 1 - stack.index(block) if block in stack else None)
            if block in stack:
                stack.remove(block)
            stack.append(block)
    found = reuse_distances([segment])
    assert sorted(found.elements(), key=str) == sorted(expected, key=str) and len(set(expected)) > 5


def test_a_line_that_was_cut_short_is_left_out(trace):
    text = trace.read_text()
    trace.write_text(text[:-20])
    assert len(read_trace(trace)[0].requests) == 15


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request that ended"),
        ("nonsense\n", "line 1 is no line of a trace"),
        ('{"ferrum_jax_trace": 7}\n', "line 1 is no line of a trace: its format is 7, this version reads 2"),
        ('{"custom_id": "a", "prompt": "b"}\n', "line 1 is no line of a trace"),
        ("[1]\n", "line 1 is no line of a trace"),
    ],
)
def test_what_is_no_trace_is_refused_by_file_and_line(tmp_path, capsys, text, message):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    assert main(["cache", "simulate", "--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error


def test_a_trace_without_its_header_is_refused(trace):
    lines = trace.read_text().splitlines(keepends=True)
    trace.write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match="does not begin with the header of a trace; write one with --trace"):
        read_trace(trace)


def test_the_command_prints_a_line_for_each_pool_and_draws_a_picture(trace, tmp_path, capsys):
    picture = tmp_path / "rates.png"
    assert main(["cache", "simulate", "--trace", str(trace), "--blocks", "16,64", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "16 requests, blocks of 4 tokens" in out and "*16" in out and "first use" in out
    rates = [f"{replay(read_trace(trace), size).hit_rate:.1%}" for size in (16, 64)]
    assert all(rate in out for rate in rates)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


def test_without_matplotlib_the_error_names_the_extra(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["cache", "simulate", "--trace", str(trace), "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install 'ferrum-jax[plot]'" in capsys.readouterr().err
    assert main(["cache", "simulate", "--trace", str(trace)]) == 0, "the table needs none"


@pytest.mark.parametrize("blocks", ["0", "a", "16,", "-4", "1.5"])
def test_pool_sizes_that_are_none_are_refused(trace, blocks, capsys):
    with pytest.raises(SystemExit):
        main(["cache", "simulate", "--trace", str(trace), f"--blocks={blocks}"])
    assert "is no list of pool sizes" in capsys.readouterr().err


def test_segments_are_summed(trace):
    (segment,) = read_trace(trace)
    once, twice = replay([segment], 16), replay([segment, segment], 16)
    assert dataclasses.asdict(twice) == {
        name: value if name == "num_blocks" else 2 * value for name, value in dataclasses.asdict(once).items()
    }
