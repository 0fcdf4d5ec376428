"""The scripts around gcloud: clean bash, what they would run, and a watch that outlives a preemption."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

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
        env=os.environ | environment,
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
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


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
    (run,) = printed("run", *JOB)
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


def test_the_commands_of_the_readme_are_understood():
    lines = re.findall(r"(?m)^ {4}((?:where=|job=|scripts/tpu_vm/).*)$", (ROOT / "README.md").read_text())
    assert [line.split("=")[0] for line in lines[:2]] == ["where", "job"] and len(lines) == 5
    script = "\n".join(["set -e", *(line.replace(" $where", " $where --dry-run") for line in lines)])
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "gs://B/out.jsonl" in done.stdout and done.stdout.count("queued-resources create job") == 2


VERBS = ("list", "delete", "create", "ssh", "archive", "scp", "rm")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PLACE, "--colour"], "--colour is no option"),
        (["--name", "job"], "--zone is missing"),
        ([*PLACE, "--", "--output", "here"], "--output must be a gs:// URL"),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments, says):
    done = call("run", *arguments)
    assert done.returncode == 2 and says in done.stderr


def test_watch_brings_a_job_to_its_end_through_a_preemption(tmp_path):
    """The TPU is taken once; then the job itself ends for a notice, and is started again."""
    fake, answers, talk = tmp_path / "gcloud", tmp_path / "answers", tmp_path / "talk"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    answers.write_text("\n".join(ANSWERS) + "\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = call("watch", *PLACE, "--interval", "0", *JOB, PATH=path, ANSWERS=str(answers), TALK=str(talk))
    assert done.returncode == 1, done.stderr  # the job's own exit code
    assert answers.read_text() == ""
    said = talk.read_text()
    assert said.count("queued-resources delete") == 1 and said.count("queued-resources create") == 1
    assert said.count(" scp ") == 1 and said.count("setsid") == 2
    assert r"gs://b/out\ one.jsonl" in said.replace("\\\\", "\\").replace("\\\\", "\\")
