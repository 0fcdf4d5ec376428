"""A batch job of two processes with four CPU devices each: the answers of one process, also after one is killed."""

import json
import subprocess
from pathlib import Path

import pytest

from ferrum_jax.batch.notice import EXIT_PREEMPTED
from tests.batch.test_image_rows import write_rows as write_image_rows
from tests.checkpoints.hub_server import Hub, serving
from tests.distributed import together
from tests.distributed.folder import NUM_ROWS, write_model, write_rows, write_tokenizer
from tests.distributed.together import started
from tests.engine.image_folder import write_folder
from tests.support import COMPILED, GOLDENS

pytestmark = pytest.mark.slow
KILLED_AT = 40  # of about 100 steps
NOTICED_S = 60  # within which a process must have noticed that another is lost
FLAGS = [
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128", "--num-blocks", "30"),
    *("--block-size", "16", "--no-invariant", "--compilation-cache-dir", str(COMPILED)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and rows for it."""
    folder = tmp_path_factory.mktemp("job")
    write_model(folder / "model")
    write_rows(folder / "in.jsonl", max_tokens=24)
    return folder


ORDINARY = ("ferrum_jax",)
LATE, LATER = (("tests.distributed.faults", "late", seconds) for seconds in ("2", "8"))
CRASHING = ("tests.distributed.faults", "crashing", "105")  # row 5


def with_signal(name):
    """The program that gets a signal in the middle of the job."""
    return ("tests.distributed.faults", "killed", str(KILLED_AT), name)


def start(folder, output, mesh, num_devices, *more, program=ORDINARY):
    """`ferrum-jax batch` in a process of its own."""
    files = ["--model", str(folder / "model"), "--input", str(folder / "in.jsonl"), "--output", str(folder / output)]
    return started("batch", *files, "--mesh", mesh, *FLAGS, *more, program=program, num_devices=num_devices)


def two(folder, output, mesh, programs=(ORDINARY, ORDINARY), flags=()):
    """Two processes that run a job together."""
    return together.two(lambda n, *met: start(folder, output, mesh, 4, *flags, *met, program=programs[n]))


def run_two(folder, output, mesh, programs=(ORDINARY, ORDINARY), flags=()):
    """(exit code, stderr) of two processes that run a job together."""
    with two(folder, output, mesh, programs, flags) as (first, second):
        second_said = second.communicate(timeout=300)[1]
        first_said = first.communicate(timeout=NOTICED_S)[1]
    return (first.returncode, first_said), (second.returncode, second_said)


def answers(folder, output):
    """Token ids and their log-probabilities, of each row in turn."""
    lines = [json.loads(line) for line in (folder / output).read_text().splitlines()]
    found = [line["response"]["body"]["choices"][0]["logprobs"] for line in lines]
    return [f["tokens"] for f in found], [p for f in found for p in f["token_logprobs"]]


@pytest.fixture(scope="module")
def alone(folder):
    """What one process with eight devices answers."""
    process = start(folder, "alone.jsonl", "tp=8", 8)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return answers(folder, "alone.jsonl")


def test_killed_and_started_again_two_processes_answer_as_one(folder, alone):
    """Process 0 notices, keeps what is done and says so; process 1 writes nothing."""
    (code, said), _ = run_two(folder, "killed.jsonl", "tp=8", (ORDINARY, with_signal("SIGKILL")))
    assert code == EXIT_PREEMPTED, said
    assert "process 1 has ended" in said or "a step failed" in said, said
    assert "the same command" in said
    assert not (folder / "killed.jsonl").exists()
    (code, said), (other_code, other_said) = run_two(folder, "killed.jsonl", "tp=8")
    assert (code, other_code) == (0, 0), said + other_said
    assert other_said == ""
    last = json.loads((folder / "killed.jsonl.report.json").read_text())["runs"][-1]
    assert 0 < last["rows"] < NUM_ROWS  # the first run's were kept
    tokens, logprobs = answers(folder, "killed.jsonl")
    assert tokens == alone[0]
    assert logprobs == pytest.approx(alone[1], abs=1e-5)


def test_all_processes_load_the_commit_that_process_0_found_though_the_branch_moves(folder, alone, monkeypatch):
    with serving(Hub("tiny/model")) as hub:
        began, hub.moves_to = hub.push(folder / "model"), GOLDENS / "qwen3"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(folder / "home"))
        outcomes = run_two(folder, "hub.jsonl", "tp=8", flags=["--model", "tiny/model"])
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert hub.branches["main"] != began
    assert [path for _, path, _ in hub.asked if "/revision/" in path] == ["/api/models/tiny/model/revision/main"]
    assert answers(folder, "hub.jsonl")[0] == alone[0]


@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1], ids=["the leader", "a follower"])
def test_a_stopped_process_ends_the_other_with_a_clear_message(folder, stopped):
    """As a host whose power fails: 20 s of silence, and 5 s more in which process 0 ends in order."""
    programs = [with_signal("SIGSTOP") if number == stopped else ORDINARY for number in range(2)]
    with two(folder, f"stopped-{stopped}.jsonl", "tp=8", programs) as both:
        assert "SIGSTOP\n" in both[stopped].stdout  # behind what gloo says
        said = both[1 - stopped].communicate(timeout=NOTICED_S)[1]
        assert both[1 - stopped].returncode == EXIT_PREEMPTED, said
        assert f"process {stopped} has said nothing for 20 s" in said
        assert "the same command" in said
        assert both[stopped].poll() is None


@pytest.mark.long
def test_a_row_that_breaks_the_engine_of_all_processes_fails_alone(folder, alone):
    (_, said), (_, other_said) = run_two(folder, "broken.jsonl", "tp=8", (CRASHING, CRASHING))
    lines = [json.loads(line) for line in (folder / "broken.jsonl").read_text().splitlines()]
    failed = [line["error"]["code"] if line["error"] else None for line in lines]
    assert failed == [None] * 5 + ["engine_crash"] + [None] * 2, said + other_said
    del lines[5]
    tokens = [line["response"]["body"]["choices"][0]["logprobs"]["tokens"] for line in lines]
    assert tokens == alone[0][:5] + alone[0][6:]


@pytest.mark.long
def test_with_data_shards_too_two_processes_answer_as_one(folder, alone):
    (code, said), (other_code, other_said) = run_two(folder, "shards.jsonl", "dp=2,tp=4")
    assert (code, other_code) == (0, 0), said + other_said
    tokens, logprobs = answers(folder, "shards.jsonl")
    assert tokens == alone[0]
    assert logprobs == pytest.approx(alone[1], abs=1e-5)


def test_two_processes_make_the_masks_of_their_rows_alike_also_after_one_is_killed(folder, tmp_path):
    """Data shards of two processes; some rows have grammars, which are compiled while others run."""
    write_tokenizer(write_model(tmp_path / "model"))
    wishes = ({"regex": "[a-g]{9,30}!"}, None, {"json": {"enum": ["a", 7, None]}}, {"regex": "("})
    rows = [
        {"custom_id": f"row-{i}", "prompt": "abc" * 9, "max_tokens": 40, "temperature": 1.2, "logprobs": 2}
        | ({"structured_outputs": wishes[i % 4]} if wishes[i % 4] else {"ignore_eos": True})
        for i in range(NUM_ROWS)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = start(tmp_path, "alone.jsonl", "tp=8", 8)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said  # rows with a grammar that does not compile
    killed = (ORDINARY, ("tests.distributed.faults", "killed", "12", "SIGKILL"))
    (code, said), _ = run_two(tmp_path, "two.jsonl", "dp=2,tp=4", killed)
    assert code == EXIT_PREEMPTED, said
    (code, said), (_, other_said) = run_two(tmp_path, "two.jsonl", "dp=2,tp=4")
    assert code == 1, said + other_said
    alone, two_lines = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("alone.jsonl", "two.jsonl")
    )
    texts = [[line["response"] and _text(line) for line in lines] for lines in (alone, two_lines)]
    assert texts[0] == texts[1]
    for row, line in zip(rows, two_lines, strict=True):
        asked = row.get("structured_outputs")
        assert (line["error"] is not None) == (asked == wishes[3])
        if asked == wishes[2]:
            assert json.loads(_text(line)) in ("a", 7, None)


def _text(line):
    return line["response"]["body"]["choices"][0]["text"]


@pytest.mark.long
def test_blocks_come_back_from_the_host_memory_of_both_processes(folder):
    """The pool holds one row and a part of another, whose blocks go to the hosts when it gives way."""
    own = ("--input", str(write_rows(folder / "own.jsonl", max_tokens=48, shared=False)))
    process = start(folder, "roomy.jsonl", "tp=8", 8, *own)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    flags = (*own, "--num-blocks", "7", "--host-cache-bytes", str(1 << 20))
    (code, said), (other_code, other_said) = run_two(folder, "tier.jsonl", "tp=8", flags=flags)
    assert (code, other_code) == (0, 0), said + other_said
    reuse = json.loads((folder / "tier.jsonl.report.json").read_text())["runs"][-1]["engine"]
    assert reuse["preemptions"] > 0 and reuse["spilled_blocks"] > 0 and reuse["loaded_blocks"] > 0, reuse
    (roomy, roomy_logprobs), (tokens, logprobs) = (answers(folder, name) for name in ("roomy.jsonl", "tier.jsonl"))
    assert tokens == roomy
    assert logprobs == pytest.approx(roomy_logprobs, abs=1e-5)


@pytest.mark.parametrize("other", [ORDINARY, LATE, LATER], ids=["together", "late", "later"])
def test_a_model_that_one_process_cannot_open_ends_both_with_its_words(folder, other):
    (code, said), (other_code, other_said) = run_two(folder, "none.jsonl", "tp=4", (ORDINARY, other))
    assert (code, other_code) == (2, 2), said + other_said
    assert "a mesh of 4 devices leaves out 1 of the 2 processes; give a mesh of all 8 devices" in said


def test_a_plan_of_several_processes_is_refused_by_all_at_once(folder):
    both = run_two(folder, "planned.jsonl", "tp=8", flags=("--plan",))
    assert [code for code, _ in both] == [2, 2]
    assert "--plan plans for the devices of one process; leave --coordinator out" in both[0][1]


IMAGE_FLAGS = [
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "128", "--num-blocks", "40"),
    *("--max-image-tokens", "64", "--max-image-patches", "256", "--block-size", "16", "--no-invariant"),
    *("--temperature", "0", "--compilation-cache-dir", str(COMPILED)),
]


def start_images(folder: Path, output: str, *more: str) -> subprocess.Popen:
    """`ferrum-jax batch` in a process of its own, on one device."""
    files = ["--model", "model", "--input", "in.jsonl", "--output", output, "--image-root", "."]
    return together.started("batch", *files, *IMAGE_FLAGS, *more, cwd=folder)


def messages_of(folder: Path, output: str) -> list:
    lines = [json.loads(line) for line in (folder / output).read_bytes().splitlines()]
    return [[choice["message"] for choice in line["response"]["body"]["choices"]] for line in lines]


def test_a_job_with_images_on_two_processes_answers_as_on_one(tmp_path):
    write_folder(tmp_path / "model")
    write_image_rows(tmp_path)
    with start_images(tmp_path, "one.jsonl") as alone:
        _, said = alone.communicate(timeout=300)
    assert alone.returncode == 0, said
    with together.two(lambda n, *met: start_images(tmp_path, "two.jsonl", "--mesh", "tp=2", *met)) as both:
        for process in both:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said
    assert messages_of(tmp_path, "two.jsonl") == messages_of(tmp_path, "one.jsonl")
