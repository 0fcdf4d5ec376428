"""A job goes on as what it was begun as, wherever it wakes up, or is refused by name; a new run loses nothing."""

import dataclasses
import functools
import itertools
import json
import os
import queue
import threading
from pathlib import Path

import pytest
from rich.console import Console

from ferrum_jax.batch.batch_llm import run_rows
from ferrum_jax.batch.job import EXIT_OK, EXIT_PREEMPTED, JobOptions, JobSettings, JobStart, run_batch
from ferrum_jax.batch.journal.job_identity import JobIdentity, JobRefused
from ferrum_jax.batch.journal.journal_file import object_in
from ferrum_jax.batch.journal.leases import Leases
from ferrum_jax.batch.ray import RayLLM
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.io.files.store import LocalStore, open_store
from ferrum_jax.text.chat import ChatTemplate
from tests.batch.fake_llm import IDENTITY, FakeLLM, json_lines
from tests.batch.job import GOOD_INPUT, Job
from tests.support import raising


def other(**changes: object) -> ModelIdentity:
    return dataclasses.replace(IDENTITY, **changes)


ELSEWHERE = other(environment={"mesh": "tp=2", "jaxlib": "1", "instruction_set": "flags : avx2 fma " * 9})


def files(folder: Path) -> dict[str, bytes]:
    """What the job's workers leave beside their heartbeats."""
    kept = (path for path in folder.rglob("*") if path.is_file() and path.parent.name not in ("workers", "leases"))
    return {str(path): path.read_bytes() for path in kept if "leases" not in str(path)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weights": "ff"}, 'weights "00", now "ff"'),
        ({"tokenizer": "aa"}, 'tokenizer null, now "aa"'),
        ({"chat_template": "bb"}, 'chat template null, now "bb"'),
        ({"dtype": "bfloat16", "kv_dtype": "int8"}, 'dtype "float32", now "bfloat16"; kv dtype "float32", now "int8"'),
        ({"invariant": False}, "invariant true, now false"),
        ({"end_tokens": (7,)}, r"end tokens \[\], now \[7\]"),
        ({"max_model_len": 50}, "max model len 100, now 50"),
        ({"adapter": "poet"}, 'adapter "", now "poet"'),
    ],
)
def test_a_job_does_not_go_on_with_another_model_and_says_what_is_another(job, tmp_path, changes, named):
    assert job.run_to_step(2) == EXIT_PREEMPTED
    before = files(tmp_path)
    with pytest.raises(ValueError, match=f"was begun with other settings: {named}.*--new-run"):
        job.run(identity=other(**changes))
    assert files(tmp_path) == before and job.llms[-1].num_pulled == 0
    assert job.run() == EXIT_OK


def test_a_job_whose_fingerprint_an_earlier_version_gave_goes_on_under_it(job):
    assert job.run_to_step(2, identity=other(weights="aa")) == EXIT_PREEMPTED
    with pytest.raises(ValueError, match='weights "aa", now "00"'):
        job.run(identity=other(weights_once="bb"))
    assert job.run(identity=other(weights_once="aa")) == EXIT_OK
    assert job.report()["identity"]["weights"] == "aa"
    lines = [line["response"]["body"] for line in job.lines() if line["response"]["status_code"] == 200]
    assert len({line["system_fingerprint"] for line in lines}) == 1


def test_what_is_known_before_the_weights_is_refused_before_they_are_read(job):
    job.run_to_step(2)

    def loading(start: JobStart) -> FakeLLM:
        start.identity.check(other(weights=None))
        with pytest.raises(JobRefused, match="dtype"):
            start.identity.check(other(weights=None, dtype="bfloat16"))
        return FakeLLM()

    assert run_batch(loading, job.input, job.output, model="tiny", console=Console(quiet=True)) == EXIT_OK


def test_a_start_that_loads_no_model_leaves_the_report_as_to_how_it_was_loaded(job):
    for model in ("right", "typo"):
        options, console = JobOptions(loading={"model": model}), Console(quiet=True)
        run_batch(lambda start: FakeLLM(), job.input, job.output, model="tiny", options=options, console=console)
    assert job.report()["record"]["loading"] == {"model": "right"}


def test_of_two_workers_that_begin_a_job_with_different_models_one_is_refused(tmp_path):
    store, refused, barrier = LocalStore(tmp_path), [], threading.Barrier(2)

    def begin(weights: str) -> None:
        record = {"created": 1, "settings": {"model": "m"}}
        identity = JobIdentity(store, "out", record, JobOptions(), lambda text: None)
        barrier.wait()
        try:
            identity.begin(other(weights=weights))
        except JobRefused:
            refused.append(weights)

    threads = [threading.Thread(target=begin, args=(weights,)) for weights in ("aa", "bb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert object_in((tmp_path / "model.json").read_bytes())["weights"] not in refused


def test_another_environment_is_no_other_job_but_bits_may_differ_and_both_is_said(job, expected):
    job.run_to_step(2)
    assert "different environments" not in job.shown.getvalue()
    assert job.run(identity=ELSEWHERE) == EXIT_OK
    assert job.output.read_bytes() == expected
    assert "mesh 'tp=" in job.shown.getvalue().replace("\n", " ") and "bits may" in job.shown.getvalue()
    report = job.report()
    assert len(report["environments"]) == 2 and any("mesh" in text for text in report["differing_bits"])
    assert report["identity"]["weights"] == "00" and report["identity"]["model"] == "tiny"


def test_without_invariant_mode_no_bits_were_promised(job):
    job.run_to_step(2, identity=other(invariant=False))
    assert job.run(identity=dataclasses.replace(ELSEWHERE, invariant=False)) == EXIT_OK
    assert "different environments" not in job.shown.getvalue()
    assert job.report()["differing_bits"] == []


def test_strict_bits_refuses_another_environment_and_what_has_no_promise(job):
    assert job.run_to_step(2, strict_bits=True) == EXIT_PREEMPTED
    with pytest.raises(JobRefused, match=r"answered in another environment: mesh 'tp=1' and 'tp=2'; .*--new-run"):
        job.run(identity=ELSEWHERE, strict_bits=True)
    assert job.run(strict_bits=True) == EXIT_OK
    job.forget()
    with pytest.raises(JobRefused, match="--strict-bits needs invariant mode"):
        job.run(identity=other(invariant=False), strict_bits=True)


def test_a_job_of_another_version_is_refused_by_name(job):
    Path(f"{job.output}.journal").mkdir()
    Path(f"{job.output}.journal/job.json").write_text('{"created": 1, "fingerprint": "fp_0", "settings": {}}')
    with pytest.raises(ValueError, match=r"another version \(format None, this version reads 1\).*--new-run"):
        job.run()
    assert job.run(new_run=True) == EXIT_OK


@pytest.mark.parametrize("name", ["job.json", "model.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"format": 1', b"[" * 100_000])
def test_a_damaged_file_of_the_journal_is_refused_by_name(job, name, content):
    job.run_to_step(2)
    Path(f"{job.output}.journal/{name}").write_bytes(content)
    with pytest.raises(JobRefused, match=rf"{name} is damaged.*--new-run"):
        job.run()


@pytest.mark.parametrize("name", ["job.json", "model.json"])
def test_no_letter_of_a_record_may_be_another(job, name):
    job.run_to_step(2)
    path = Path(f"{job.output}.journal/{name}")
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in (1, 16):  # a digit for a digit, a letter for a letter or a quote
            damaged = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
            assert object_in(damaged) is None
    path.write_bytes(damaged)
    with pytest.raises(JobRefused, match=rf"{name} is damaged.*--new-run"):
        job.run()


def test_a_journal_without_checksums_goes_on(job, expected):
    job.run_to_step(2)
    for path in Path(f"{job.output}.journal").rglob("*.json"):
        path.write_bytes(path.read_bytes().partition(b"\n")[0])  # as older versions wrote it
    assert job.run() == EXIT_OK and job.output.read_bytes() == expected
    assert len(job.report()["runs"]) == 2


@pytest.mark.parametrize(
    ("edit", "count"),
    [
        (lambda said: b"x", 1),
        (lambda said: b"{}", 1),
        *((lambda said, name=name: said.replace(b'"%s"' % name, b'"odd"'), 1) for name in (b"at", b"rows", b"engine")),
        (lambda said: said.replace(b'"padded_tokens": ', b'"padded_tokens": "x"+'), 1),
        (lambda said: json.dumps(json.loads(said) | {"wall_s": "1"}).encode(), 1),
        (lambda said: json.dumps(json.loads(said) | {"samples": {"fields": ["wall_s"], "values": [[]]}}).encode(), 1),
        (lambda said: json.dumps(json.loads(said) | {"more": 1}).encode(), 2),
    ],
)
def test_a_run_whose_record_is_damaged_is_missing_in_the_report_and_ends_nothing(job, tmp_path, edit, count):
    job.run_to_step(2)
    (run,) = Path(f"{job.output}.journal/runs").iterdir()
    run.write_bytes(edit(run.read_bytes().partition(b"\n")[0]))
    assert job.run(page_path=str(tmp_path / "page.html")) == EXIT_OK
    assert len(job.report()["runs"]) == count


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("workers/other.beat", content) for content in (b"", b"x", b"[]", b"{}", b'{"place": 1, "layout": []}')),
        *(("layouts/1", content) for content in (b"", b"\xff", b"another")),
        *((name, b"x") for name in ("layouts/notes.txt", "leases/{layout}/notes", "leases/{layout}/0.1.old")),
        *((name, b"x") for name in ("segments/notes.txt", "paces/notes", "runs/notes.txt", "workers/notes")),
        ("merged.json", b"[]"),
    ],
)
def test_a_damaged_or_foreign_file_that_says_nothing_of_answers_ends_no_job(job, expected, name, content):
    job.run_to_step(2)
    journal = Path(f"{job.output}.journal")
    (journal / name.format(layout=(journal / "layouts/1").read_text())).write_bytes(content)
    assert job.run(expiry_s=0.05) == EXIT_OK and job.output.read_bytes() == expected
    assert job.run() == EXIT_OK and job.output.read_bytes() == expected


failing = raising(ValueError("there is no such model"))


def test_a_job_of_which_no_row_was_begun_takes_other_settings(job, expected):
    """A typo in --model or --adapter, which the loader finds, blocks no output."""
    for wrong in ({"model": "tyni"}, {"adapters": ["peot"]}, {"seed": 3}):
        with pytest.raises(ValueError, match="no such model"):
            job.run(llm=failing, **wrong)
    job.clock = itertools.count(1_000)
    assert job.run() == EXIT_OK and job.output.read_bytes() == expected
    assert "tyni" not in json.dumps(job.report()["record"])


def test_a_job_of_which_no_row_was_begun_takes_another_model(job):
    job.run(on_step=raising(KeyboardInterrupt), identity=other(weights="ff"))
    assert not os.path.exists(f"{job.output}.journal/segments")
    assert job.run() == EXIT_OK and job.report()["identity"]["weights"] == "00"


def test_settings_are_not_taken_from_under_a_worker_that_loads_its_model(tmp_path):
    job, barrier = Job(tmp_path), []

    def meanwhile(*_, **__) -> FakeLLM:
        with pytest.raises(ValueError, match=r"worker .* is at work on this job"):
            job.run(seed=7, llm=failing)
        barrier.append(1)
        return FakeLLM()

    assert job.run(llm=meanwhile, expiry_s=0.1) == EXIT_OK and barrier


def test_what_a_setting_was_not_is_none(job):
    job.run_to_step(2)
    with pytest.raises(JobRefused, match=r'other settings: defaults none, now \{"max_tokens": 3\}'):
        job.run(defaults={"max_tokens": 3})


def test_a_finished_job_started_again_says_that_the_model_was_not_looked_at(job):
    job.run()
    assert "answered before" not in job.shown.getvalue()
    job.run(identity=other(weights="ff"))
    assert "answered before" in job.shown.getvalue() and "--new-run" in job.shown.getvalue()


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_new_run_moves_the_old_one_aside_where_it_may_be_gone_on_with(tmp_path, scheme):
    (tmp_path / "in.jsonl").write_bytes(GOOD_INPUT)
    folder = f"{scheme}{tmp_path}"
    store = open_store(folder)

    def run(name: str, weights: str, **options: bool) -> int:
        def make(start: JobStart) -> FakeLLM:
            return FakeLLM(identity=other(weights=weights))

        job = {"model": "tiny", "console": Console(quiet=True)}
        job["settings"] = JobSettings(now=lambda: 1000.0)
        limits = JobOptions(poll_s=0.01, expiry_s=0.1, **options)
        return run_batch(make, tmp_path / "in.jsonl", f"{folder}/{name}", options=limits, **job)

    assert run("out.jsonl", "00") == EXIT_OK
    first = store.read("out.jsonl")
    assert run("out.jsonl", "01", new_run=True) == EXIT_OK
    second = store.read("out.jsonl")
    assert second != first and store.read("old-1.out.jsonl") == first
    assert run("out.jsonl", "02", new_run=True) == EXIT_OK
    assert store.read("old-1.out.jsonl") == first and store.read("old-2.out.jsonl") == second
    assert json.loads(store.read("old-2.out.jsonl.report.json"))["identity"]["weights"] == "01"
    assert run("old-1.out.jsonl", "00") == EXIT_OK and store.read("old-1.out.jsonl") == first


def test_a_new_run_that_is_stopped_says_that_it_goes_on_without_the_flag(job):
    assert job.run_to_step(2, new_run=True) == EXIT_PREEMPTED
    assert "the same command without --new-run goes on" in job.shown.getvalue().replace("\n", " ")


def test_a_new_run_moves_an_output_without_a_journal_aside(job, tmp_path):
    job.output.write_bytes(b"my thesis")
    assert job.run(new_run=True) == EXIT_OK
    assert (tmp_path / "old-1.out.jsonl").read_bytes() == b"my thesis"
    job.forget()
    assert job.run(new_run=True) == EXIT_OK and not (tmp_path / "old-2.out.jsonl").exists()


def test_no_new_run_is_begun_while_a_worker_lives(job, tmp_path):
    job.run_to_step(2)
    ended = threading.Event()

    def beat() -> None:
        leases = Leases(LocalStore(Path(f"{job.output}.journal")), "other", "layout", expiry_s=5.0)
        while not ended.wait(0.005):
            leases.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        while not Path(f"{job.output}.journal/workers/other.beat").exists():
            pass
        with pytest.raises(ValueError, match="worker other is at work on this job"):
            job.run(new_run=True)
    finally:
        ended.set()
        thread.join()
    assert not (tmp_path / "old-1.out.jsonl.journal").exists()


def test_a_worker_that_only_slept_while_a_new_run_began_finds_its_tombstone(job):
    job.run_to_step(2)
    beat = Path(f"{job.output}.journal/workers/asleep.beat")
    beat.write_text(json.dumps({"place": "elsewhere", "pid": 1, "started": "1", "beats": 1}))
    assert job.run(new_run=True, expiry_s=0.05) == EXIT_OK
    assert Path(f"{job.output}.journal/workers/asleep.dead").exists()


class Chatting(FakeLLM):
    """Its answers depend on what the chat template makes of messages."""

    TEMPLATE = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }} {{ messages[0].content }}")

    def row_tasks(self, now):
        make = super().row_tasks(now)
        return lambda request: make(request._replace(content=self.TEMPLATE.render(request.content, now)))


def test_a_job_that_goes_on_the_next_day_has_the_same_prompts(tmp_path, monkeypatch):
    rows = [{"custom_id": str(i), "messages": [{"role": "user", "content": f"what day, {i}?"}]} for i in range(6)]
    job = Job(tmp_path, json_lines(rows))
    day_s = 86_400
    expected = job.whole(llm=Chatting)
    assert job.run_to_step(2, llm=Chatting) == EXIT_PREEMPTED
    job.clock = iter([1_000 + day_s, 1_000 + 2 * day_s])
    monkeypatch.setenv("TZ", "Pacific/Auckland")  # another machine
    assert job.run(llm=Chatting) == EXIT_OK
    assert job.output.read_bytes() == expected
    assert job.llms[-1].now.strftime("%d %b %Y %H:%M %Z") == "01 Jan 1970 00:16 UTC"


def test_an_actor_with_another_model_ends_a_job_on_ray_before_its_answers_count(job):
    class Actors(RayLLM):
        """Its rows are answered here."""

        weights = iter(["00", "ff"])

        def _run(self, window, answers: queue.SimpleQueue, ended):
            fake = FakeLLM()
            for request, now in window:
                answers.put((None, other(weights=next(self.weights, "ff"))))
                [(key, output)] = run_rows(fake, [request], now=now)
                answers.put((key, output))

    llm = Actors(FakeLLM, num_actors=1, rows_at_once=1, window_rows=9, actor_options={})
    run = functools.partial(run_batch, input_path=job.input, output_path=job.output, model="tiny")
    with pytest.raises(JobRefused, match='weights "00", now "ff"'):
        run(llm.started, console=Console(quiet=True))
    assert len(os.listdir(f"{job.output}.journal/segments")) == 1
    assert run(lambda start: FakeLLM(), console=Console(quiet=True)) == EXIT_OK


def test_a_job_knows_the_attention_that_it_has_had_on_each_kind_of_device(tmp_path):
    """It goes on with that, whatever a check has found since; where it has had two, with neither."""
    job = JobIdentity(LocalStore(tmp_path), "out", {"created": 1, "settings": {}}, JobOptions(), lambda text: None)

    def begin(kind: str, name: str, **changes: str) -> dict[str, str]:
        job.begin(other(environment={"device_kind": kind, "implementation": name, **changes}))
        return job.implementations()

    assert job.implementations() == {}
    assert begin("TPU v6 lite", "xla") == begin("TPU v6 lite", "xla", jaxlib="2") == {"TPU v6 lite": "xla"}
    assert begin("TPU v5e", "mosaic_tpu") == {"TPU v6 lite": "xla", "TPU v5e": "mosaic_tpu"}
    assert begin("TPU v6 lite", "mosaic_tpu") == {"TPU v5e": "mosaic_tpu"}
