"""The scripts around gcloud: clean bash, what they would run, and a watch that outlives a preemption."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, written_by

PLACE = ["--name", "job", "--zone", "us-east5-b", "--project", "mine"]
JOB = ["--", "--model", "gs://b/model", "--input", "gs://b/in.jsonl", "--output", "gs://b/out one.jsonl"]
# what gcloud says to watch, in turn; what it prints and its exit code
ANSWERS = ["WAITING_FOR_RESOURCES", "ACTIVE", "bare", "ACTIVE", "idle", "SUSPENDED", "", "ACTIVE", "FAIL"]
ANSWERS += ["ACTIVE", "75", "ACTIVE", "1"]
FAKE = """#!/usr/bin/env bash
echo "$*" | tr '\\n' ' ' >>"$TALK"; echo >>"$TALK"
case "$*" in *--worker=0*tail* | *--worker=0*flock* | *list*) ;; *) exit ;; esac
case "$*" in *"--command=tail"*) exit ;; esac
read -r answer <"$ANSWERS"; sed -i 1d "$ANSWERS"
[ "$answer" != FAIL ] || exit 1
echo "$answer"
"""


def call(command: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / "scripts/tpu_vm" / command), *arguments],
        env=os.environ | {"XDG_STATE_HOME": "/nowhere"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def printed(command: str, *arguments: str) -> list[list[str]]:
    """The commands that a dry run prints."""
    done = call(command, *PLACE, "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line.replace("$'", "'")) for line in done.stdout.splitlines()]


def test_every_bash_script_is_clean():
    files = [path for folder in ("scripts", ".ci") for path in (ROOT / folder).rglob("*") if path.is_file()]
    scripts = [p for p in files if p.suffix == ".sh" or p.read_bytes().startswith(b"#!/usr/bin/env bash")]
    assert len(scripts) > 10
    check = [str(Path(sys.executable).parent / "shellcheck"), "--external-sources", *map(str, scripts)]
    written_by(check)


def test_dry_runs_print_the_commands_of_google_s_tool():
    tpus, place = ["gcloud", "compute", "tpus"], ["--zone", "us-east5-b", "--project", "mine"]
    node = ["--node-id", "job", "--accelerator-type", "v6e-8", "--runtime-version", "v2-alpha-tpuv6e"]
    (create,) = printed("create")
    assert create == [*tpus, "queued-resources", "create", "job", *place, *node, "--spot"]
    (create,) = printed("create", "--accelerator-type", "v5litepod-16", "--on-demand")
    assert create[-4:] == ["--accelerator-type", "v5litepod-16", "--runtime-version", "v2-alpha-tpuv5-lite"]
    (delete,) = printed("delete")
    assert delete == [*tpus, "queued-resources", "delete", "job", *place, "--force", "--quiet"]
    archive, copy, install, _ = printed("bootstrap")
    assert archive[3] == "archive" and copy[:5] == [*tpus, "tpu-vm", "scp"] and copy[-1] == "--worker=all"
    assert "EXTRAS=tpu,store" in install[-1] and "python3.11" in install[-1]
    copy, run = printed("run", *JOB)
    assert copy[:5] == [*tpus, "tpu-vm", "scp"] and copy[6:] == ["job:coordinator.secret", *place, "--worker=all"]
    assert "--coordinator-secret-file ../coordinator.secret" in run[-1].replace("\\", "")
    assert run[:6] == [*tpus, "tpu-vm", "ssh", "job"] and "--worker=all" in run and "flock -n job.lock" in run[-1]


def test_a_dry_run_of_watch_and_of_resume_shows_what_follows_a_preemption():
    shown = {command: printed(command, *JOB) for command in ("watch", "resume")}
    for lines in shown.values():
        verbs = [next(word for word in line if word in VERBS) for line in lines]
        assert [verb for verb in verbs if verb != "list"][:8] == [
            *("delete", "create", "ssh", "archive", "scp", "ssh", "rm", "ssh"),
        ]
    assert shown["watch"][-1][-1] == "--command=tail -n 20 ferrum_jax/job.log"  # once the job has ended
    assert shown["resume"] == shown["watch"][:-1]  # which returns once the job runs


CHECK = """#!/usr/bin/env bash
echo "$*" | tr '\\n' ' ' >>"$TALK"; echo >>"$TALK"
case "$*" in
    *list*) read -r answer <"$ANSWERS"; sed -i 1d "$ANSWERS"; echo "$answer" ;;
    *"tpu-vm ssh"*check_and_bench*) exit 1 ;;
esac
"""


def checked(folder: Path, answers: list[str]) -> tuple[subprocess.CompletedProcess, list[str]]:
    """A check with a gcloud whose TPU says that something is wrong; what gcloud was asked."""
    (folder / "gcloud").write_text(CHECK)
    (folder / "gcloud").chmod(0o755)
    (folder / "answers").write_text("\n".join(answers) + "\n")
    (folder / "talk").touch()
    files = {"ANSWERS": str(folder / "answers"), "TALK": str(folder / "talk")}
    path = f"{folder}:{os.environ['PATH']}"
    done = call("check", *PLACE, "--interval", "0", "--", "--output", str(folder / "out"), PATH=path, **files)
    return done, (folder / "talk").read_text().splitlines()


def test_a_check_creates_checks_fetches_and_deletes_also_where_something_is_wrong(tmp_path):
    done, said = checked(tmp_path, ["", "WAITING_FOR_RESOURCES", "ACTIVE"])
    assert done.returncode == 1, done.stderr
    verbs = [next(word for word in line.split() if word in VERBS) for line in said]
    assert [verb for verb in verbs if verb != "list"] == ["create", "scp", "ssh", "ssh", "scp", "scp", "scp", "delete"]
    assert sum("check.html" in line for line in said) == 1


def test_a_check_deletes_what_it_asked_for_where_it_was_not_given(tmp_path):
    done, said = checked(tmp_path, ["", "FAILED"])
    assert done.returncode == 75 and "delete job" in said[-1]


def test_a_check_of_several_hosts_is_refused_before_it_costs_money():
    done = call("check", *PLACE, "--accelerator-type", "v6e-16", "--dry-run")
    assert done.returncode == 2 and "v6e-16 is not of one host" in done.stderr and not done.stdout


def test_a_check_leaves_a_tpu_alone_that_was_there_before(tmp_path):
    done, said = checked(tmp_path, ["ACTIVE"])
    assert done.returncode == 2 and "job is there already (ACTIVE)" in done.stderr
    assert len(said) == 1 and "delete" not in said[0]


@pytest.mark.parametrize("page", ["README.md", "docs/guides/spot-tpu.md"])
def test_the_commands_of_a_page_are_understood(page):
    lines = re.findall(r"(?m)^ {4}((?:where=|job=|scripts/tpu_vm/(?!check)).*)$", (ROOT / page).read_text())
    assert [line.split("=")[0] for line in lines[:2]] == ["where", "job"] and len(lines) == 5
    script = "\n".join(["set -e", *(line.replace(" $where", " $where --dry-run") for line in lines)])
    shown = written_by(["bash", "-c", script], timeout=60)
    assert "gs://B/out.jsonl" in shown and shown.count("queued-resources create job") == 2


VERBS = ("list", "delete", "create", "ssh", "archive", "scp", "rm")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PLACE, "--colour"], "--colour is no option"),
        (["--name", "job"], "--zone is missing"),
        ([*PLACE, "--", "--output", "here"], "--output is 'here'; it must be a gs:// URL"),
        ([*PLACE, "--", "--output=here", "--report", "gs://b/r"], "--output is 'here'; it must be a gs:// URL"),
        ([*PLACE, "--", "--input", "gs://b/in"], "--output is ''; it must be a gs:// URL"),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments, says):
    done = call("run", *arguments)
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.parametrize("command", ["watch", "resume"])
def test_a_new_run_is_begun_once_and_not_after_each_preemption(command):
    done = call(command, *PLACE, *JOB, "--new-run")
    assert done.returncode == 2 and "--new-run would begin anew after each preemption" in done.stderr


def test_the_output_may_be_named_in_either_of_the_ways_that_the_command_takes():
    for output in (["--output=gs://b/out one.jsonl"], ["--output", "gs://b/out one.jsonl"]):
        *_, run = printed("run", "--", "--model", "gs://b/model", *output)
        assert "gs://b/out" in run[-1]


def watch(folder: Path, given: list[str]) -> tuple[subprocess.CompletedProcess, str]:
    """A watch of a gcloud that gives these answers and no more; and what was said to that."""
    fake, answers, talk = folder / "gcloud", folder / "answers", folder / "talk"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    answers.write_text("\n".join(given) + "\n")
    path = f"{folder}:{os.environ['PATH']}"
    files = {"ANSWERS": str(answers), "TALK": str(talk), "XDG_STATE_HOME": str(folder / "state")}
    done = call("watch", *PLACE, "--interval", "0", *JOB, PATH=path, **files)
    assert answers.read_text() == "", done.stderr
    return done, talk.read_text()


@pytest.mark.parametrize(
    ("ends", "code", "num_starts"),
    [
        (["70", "70", "70", "70"], 70, 3),
        (["70 0/9 rows", "70 4/9 rows", "70 4/9 rows", "70 4/9 rows", "70 4/9 rows"], 70, 4),  # progress once
        (["70 4/9 rows", "70", "75 4/9 rows", "139", "70 4/9 rows"], 70, 4),  # a preemption is no progress
        (["134", "70", "0 9/9 rows"], 0, 2),
        (["75", "75", "75", "130", "75", "2"], 2, 5),
    ],
)
def test_watch_starts_a_job_that_crashes_three_times_more_unless_a_row_was_finished(tmp_path, ends, code, num_starts):
    done, said = watch(tmp_path, [answer for end in ends for answer in ("ACTIVE", end)])
    assert done.returncode == code, done.stderr
    assert said.count("setsid") == num_starts
    assert ("without progress" in done.stderr) == any(end.split()[0] in ("70", "134", "139") for end in ends)


def test_a_host_says_the_exit_code_of_a_job_and_how_many_rows_it_had_done(tmp_path):
    """What watch has the first host run, in a folder like its own."""
    (status,) = re.findall(r"(?s)status='(.*?)'", (ROOT / "scripts/tpu_vm/watch").read_text())
    host = tmp_path / "ferrum_jax"
    host.mkdir()
    (host / "ready").touch()
    (host / "job.exit").write_text("70\n")
    (host / "job.log").write_text("3/9 rows, 5 tok/s in\nm ready\n7/9 rows, 5 tok/s in\nTraceback: 8/9 rows\n")
    asked = subprocess.run(["bash", "-c", status], cwd=tmp_path, capture_output=True, text=True)
    assert asked.stdout == "70 7/9 rows\n", asked.stderr


def test_watch_brings_a_job_to_its_end_through_a_preemption(tmp_path):
    """The TPU is taken once; then the job itself ends for a notice, and is started again."""
    done, said = watch(tmp_path, ANSWERS)
    assert done.returncode == 1, done.stderr  # the job's own exit code
    assert said.count("queued-resources delete") == 1 and said.count("queued-resources create") == 1
    assert said.count(":ferrum_jax.tar.gz ") == 1 and said.count("setsid") == 2
    assert r"gs://b/out\ one.jsonl" in said.replace("\\\\", "\\").replace("\\\\", "\\")
    assert said.count(" job:coordinator.secret ") == 2
    secret = tmp_path / "state" / "ferrum_jax" / "job.secret"
    assert re.fullmatch("[0-9a-f]{64}", secret.read_text()) and secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text() not in said + done.stdout + done.stderr
