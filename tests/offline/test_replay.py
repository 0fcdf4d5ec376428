"""Request logs read back, reuse distances against a naive count, and the command that shows them."""

import dataclasses
import json
import sys

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.core.outputs import NOT_FINITE_REASON
from ferrum_jax.core.scheduler.request_log import (
    LoggedChoice,
    LoggedRequest,
    PlanLimit,
    RequestLogWriter,
    Segment,
    read_request_log,
)
from ferrum_jax.inputs.prompt import MediaSpan, PlacedImage
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes
from ferrum_jax.io.paths import install_command
from ferrum_jax.planning.offline.replay import replay, reuse_distances
from ferrum_jax.planning.offline.simulate_cache import outcome_table
from tests.rows import rows_beside

SIZES = EngineSizes(
    block_size=4, block_bytes=[2048], group_blocks=[16], max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64
)


def request(prompt: list[int], arrival: int = 0, output: int = 6) -> LoggedRequest:
    choice = LoggedChoice(token_ids=[9] * output, finish_reason="length")
    return LoggedRequest(id=arrival, arrival=arrival, prompt_token_ids=prompt, max_tokens=output, choices=[choice])


@pytest.fixture
def request_log(tmp_path):
    """Two prompts of 32 tokens in turn, eight times each; a pool of 16 blocks holds one of them and a half."""
    path = tmp_path / "requests.jsonl"
    writer = RequestLogWriter(str(path), SIZES)
    for index in range(16):
        writer.write(request([index % 2] * 32 + [2, index], arrival=40 * index))
    return path


def test_a_larger_pool_hits_what_a_smaller_one_has_evicted(request_log):
    segments = read_request_log(request_log)
    small, large = replay(segments, 16), replay(segments, 64)
    assert (small.lookups, large.lookups) == (16, 16)
    assert small.evictions > 0 == large.evictions and small.hit_rate < large.hit_rate
    assert large.hit_tokens == 14 * 32, "all but the first of each hit all of the common part"


def test_preempted_rows_that_find_themselves_again_are_no_hits_of_a_small_pool():
    """Prompts that share nothing: no pool can hit, and 32 blocks of them hit no more than 512."""
    sizes = dataclasses.replace(SIZES, max_num_seqs=8)
    segment = Segment(sizes=sizes, requests=[request([stem] * 20, stem, output=24) for stem in range(8)])
    small, large = replay([segment], 32), replay([segment], 512)
    assert small.preemptions > 0 == large.preemptions
    assert small.resumed_tokens > 0 == large.resumed_tokens
    assert small.hit_tokens == large.hit_tokens == 0
    assert small.missed_tokens == large.missed_tokens == 8 * 20 and small.lookups == large.lookups == 8


def test_a_replay_plans_within_the_token_limits_that_were_logged(tmp_path):
    """An engine that was ready before all of its executables were: from its third step on it has the largest."""
    path, sizes, found = tmp_path / "requests.jsonl", dataclasses.replace(SIZES, max_num_batched_tokens=32), []
    writer = RequestLogWriter(str(path), sizes)
    writer.event(PlanLimit(arrival=0, token_limit=8))
    writer.event(PlanLimit(arrival=2, token_limit=None))
    writer.write(request([5] * 50))
    replay(read_request_log(path), 64, on_plan=lambda plan: found.append(plan.num_tokens))
    assert found[:4] == [8, 8, 32, 2]


def test_a_request_without_finite_logits_ends_in_a_replay_at_its_token():
    ended = LoggedChoice(token_ids=[9] * 2, finish_reason="error", stop_reason=NOT_FINITE_REASON)
    logged = [dataclasses.replace(request([5] * 20, arrival), choices=[ended]) for arrival in (0, 20)]
    plans = []
    outcome = replay([Segment(sizes=SIZES, requests=logged)], 64, on_plan=plans.append)
    assert (outcome.lookups, outcome.hit_tokens) == (2, 0)
    assert [plan.num_tokens for plan in plans] == [16, 4, 1, 1, 1] * 2, "the last is dropped"


def test_a_request_larger_than_the_pool_is_counted_and_the_others_run(request_log):
    outcome = replay(read_request_log(request_log), 9)
    assert (outcome.too_large, outcome.lookups) == (16, 0)


def test_reuse_distances_are_those_of_a_naive_count():
    prompts = [[stem] * (8 + 4 * (stem + turn) % 20) for turn in range(4) for stem in (0, 1, 0, 2, 3)]
    segment = Segment(sizes=SIZES, requests=[request(ids, output=1 + len(ids) % 7) for ids in prompts])
    expected: list[int | None] = []
    stack: list[tuple[int, ...]] = []  # blocks by their whole prefix, the most recently used last
    for logged in segment.requests:
        ids = logged.prompt_token_ids + logged.choices[0].token_ids[:-1]
        for end in range(4, len(ids) + 1, 4):
            block = tuple(ids[:end])
            if end < len(logged.prompt_token_ids):
                expected.append(len(stack) - 1 - stack.index(block) if block in stack else None)
            if block in stack:
                stack.remove(block)
            stack.append(block)
    found = reuse_distances([segment])
    assert sorted(found.elements(), key=str) == sorted(expected, key=str) and len(set(expected)) > 5


def pictured(name: str, arrival: int, *, start: int = 2, length: int = 20, whole: bool = False) -> LoggedRequest:
    """A request with one image of 80 patches before its last three tokens."""
    grid, digest = (1, 8, 10), name.encode()
    image = PlacedImage(start=start, length=length, digest=digest, grid=grid, rope_grid=(1, 4, 5), sees_both_ways=whole)
    span = MediaSpan(kind="image", digest=digest, start=start, length=length)
    prompt = [arrival] * start + [5] * length + [7] * 3
    return dataclasses.replace(request(prompt, arrival), media=(span,), images=(image,))


def imaged(num_runs: int = 4, patches: int = 80, **sizes) -> EngineSizes:
    return dataclasses.replace(SIZES, group_blocks=[64], num_image_runs=num_runs, max_image_patches=patches, **sizes)


def test_images_of_a_request_log_are_read_back_as_they_were_placed(tmp_path):
    path = tmp_path / "requests.jsonl"
    wanted = [pictured("cat", 0), request([1] * 9, 1), pictured("dog", 2, whole=True)]
    writer = RequestLogWriter(str(path), imaged())
    for each in wanted:
        writer.write(each)
    (segment,) = read_request_log(path)
    assert segment.requests == wanted and segment.sizes.num_image_runs == 4


def test_a_replay_encodes_an_image_once_and_again_after_its_runs_were_taken():
    """Each image takes 2 runs of 16 tokens; no prompt hits another's KV, as their first tokens differ."""
    names = ["cat", "dog", "cat", "bird", "cat", "dog"]
    logged = [pictured(name, 20 * index) for index, name in enumerate(names)]
    large, small = (replay([Segment(sizes=imaged(num_runs), requests=logged)], 64) for num_runs in (6, 4))
    assert (large.images_encoded, large.image_hits, large.image_evictions) == (3, 3, 0)
    assert (small.images_encoded, small.image_hits, small.image_evictions) == (4, 2, 4)


def test_a_replay_admits_prompts_with_waiting_images_a_step_later():
    logged = [
        request([1] * 4, 0, output=20),
        pictured("cat", 1),
        dataclasses.replace(pictured("dog", 1), id=2),
        dataclasses.replace(request([2] * 4, 1), id=3),
    ]
    sizes, plans = imaged(max_num_seqs=4, max_num_batched_tokens=64), []
    replay([Segment(sizes=sizes, requests=logged)], 64, on_plan=plans.append)
    assert [[request for *_, request in plan.admitted] for plan in plans[:4]] == [[1], [2, 4], [3], []]
    assert [[order.request for order in plan.encodes] for plan in plans[:4]] == [[], [2], [3], []]


def test_no_chunk_of_a_replay_ends_inside_an_image_that_is_seen_whole():
    ends = {}
    for whole in (False, True):
        plans = []
        segment = Segment(sizes=imaged(max_num_batched_tokens=21), requests=[pictured("cat", 0, whole=whole)])
        replay([segment], 64, on_plan=plans.append)
        ends[whole] = [int(plan.shards[0].starts[0] + plan.shards[0].counts[0]) for plan in plans[:2]]
    assert ends == {False: [21, 25], True: [2, 22 + 1]}


@pytest.mark.parametrize("format_", [3, 4])
def test_undescribed_images_of_a_log_are_refused_by_line(tmp_path, format_):
    path = tmp_path / "requests.jsonl"
    writer = RequestLogWriter(str(path), SIZES)
    writer.write(request([1] * 9))
    writer.write(pictured("cat", 1))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["ferrum_jax_request_log"] = format_
    for line in lines[1:]:
        del line["images"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    assert len(read_request_log(path)[0].requests) == 1, "logs of text are read as before"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        ValueError, match=r"line 3 .* has images, and only logs of format 5 or later say what was encoded"
    ):
        read_request_log(path)


@pytest.mark.parametrize("format_", [3, 4, 5])
def test_logs_that_know_of_no_drafts_are_read_as_before(request_log, format_):
    whole = replay(read_request_log(request_log), 64)
    lines = [json.loads(line) for line in request_log.read_text().splitlines()]
    lines[0] = {"ferrum_jax_request_log": format_} | {
        name: value
        for name, value in lines[0].items()
        if name not in ("ferrum_jax_request_log", "speculative_config", "num_places")
    }
    for line in lines[1:]:
        del line["takes_drafts"]
    request_log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(read_request_log(request_log), 64) == whole


def test_the_table_counts_images_only_where_prompts_have_some(request_log):
    def columns(segments):
        outcomes = [replay(segments, 64)]
        return {column.header: list(column.cells) for column in outcome_table(outcomes, segments).columns}

    assert "encoded" not in columns(read_request_log(request_log))
    logged = [pictured(name, 20 * index) for index, name in enumerate(["cat", "cat", "dog"])]
    found = columns([Segment(sizes=imaged(), requests=logged)])
    assert (found["encoded"], found["images found"]) == (["2"], ["1"]) and "too large" not in found


def test_a_line_that_was_cut_short_is_left_out(request_log):
    text = request_log.read_text()
    request_log.write_text(text[:-20])
    assert len(read_request_log(request_log)[0].requests) == 15


def test_an_engine_goes_on_after_a_line_that_another_did_not_finish(request_log):
    """One that was killed while it wrote; the same command begins a segment in the same file."""
    request_log.write_text(request_log.read_text()[:-20])
    RequestLogWriter(str(request_log), SIZES).write(request([1] * 20))
    assert [len(segment.requests) for segment in read_request_log(request_log)] == [15, 1]


@pytest.mark.parametrize("text", ["my notes", "my notes\n", '{"custom_id": "a"}\n', "\n"])
def test_nothing_is_appended_to_a_file_that_is_no_request_log(tmp_path, text):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"in\.jsonl exists and is not a request log; name another file"):
        RequestLogWriter(str(path), SIZES)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"), rows_beside(__file__)["what is no request log is refused by file and line"]
)
def test_what_is_no_request_log_is_refused_by_file_and_line(tmp_path, capsys, text, message):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    assert main(["cache", "simulate", "--request-log", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error


def test_a_request_log_without_its_header_is_refused(request_log):
    lines = request_log.read_text().splitlines(keepends=True)
    request_log.write_text("".join(lines[1:]))
    with pytest.raises(
        ValueError, match="does not begin with the header of a request log; write one with --request-log"
    ):
        read_request_log(request_log)


def test_the_command_prints_a_line_for_each_pool_and_draws_a_picture(request_log, tmp_path, capsys):
    picture = tmp_path / "rates.png"
    assert (
        main(["cache", "simulate", "--request-log", str(request_log), "--blocks", "16,64", "--plot", str(picture)]) == 0
    )
    out = capsys.readouterr().out
    assert "16 requests, blocks of 4 tokens" in out and "*16" in out and "first use" in out
    rates = [f"{replay(read_request_log(request_log), size).hit_rate:.1%}" for size in (16, 64)]
    assert all(rate in out for rate in rates)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


def test_without_matplotlib_the_error_names_the_extra(request_log, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["cache", "simulate", "--request-log", str(request_log), "--plot", str(tmp_path / "a.png")]) == 2
    assert install_command("plot") in capsys.readouterr().err
    assert main(["cache", "simulate", "--request-log", str(request_log)]) == 0, "the table needs none"


@pytest.mark.parametrize("blocks", ["0", "a", "16,", "-4", "1.5"])
def test_pool_sizes_that_are_none_are_refused(request_log, blocks, capsys):
    with pytest.raises(SystemExit):
        main(["cache", "simulate", "--request-log", str(request_log), f"--blocks={blocks}"])
    assert "is not a list of pool sizes" in capsys.readouterr().err


def test_segments_are_summed(request_log):
    (segment,) = read_request_log(request_log)
    once, twice = replay([segment], 16), replay([segment, segment], 16)
    assert dataclasses.asdict(twice) == {
        name: value if name == "num_blocks" else 2 * value for name, value in dataclasses.asdict(once).items()
    }
