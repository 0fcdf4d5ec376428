"""Clusters run the same command with the same paths and know its exit codes; Slurm's script runs with a stand-in."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ferrum_jax import __main__ as cli
from ferrum_jax.batch.job import EXIT_PREEMPTED, EXIT_ROWS_FAILED, EXIT_TOO_MANY_ERRORS
from tests.fleets.crds import faults, schemas
from tests.fleets.manifests import FOLDER, SAME, commands, container, job_specs, objects, text
from tests.support import COMPILED, GOLDENS, ROOT, written_by

CLIENTS = os.environ.get("CLIENTS_PYTHON", str(ROOT / ".venv-clients" / "bin" / "python"))
KUBERNETES = "1.37"  # of the schemas; successPolicy is stable since 1.33


def test_every_file_has_its_page_and_every_page_its_file():
    """A file names the page that explains it, and the page links to the file."""
    for path in FOLDER.iterdir():
        if path.name == "Dockerfile":
            continue
        (page,) = re.findall(r"docs/guides/[\w-]+\.md", path.read_text().split("\n\n")[0][:200])
        assert f"](../examples/fleets/{path.name})" in (ROOT / page).read_text()
    assert "](../examples/fleets/Dockerfile)" in (ROOT / "docs/guides/kubernetes.md").read_text()


@pytest.mark.parametrize(("name", "words"), commands().items(), ids=commands())
def test_each_file_runs_the_same_command_with_the_same_paths(name, words):
    start = words.index(SAME[0])
    assert words[start : start + len(SAME)] == SAME
    given = cli._parser().parse_args(words[start + 1 :])
    assert given.output == "gs://B/out.jsonl" and not given.new_run


@pytest.mark.parametrize(("name", "spec"), job_specs().items(), ids=job_specs())
def test_kubernetes_ends_a_job_where_another_pod_would_end_in_the_same_way(name, spec):
    policy = spec["podFailurePolicy"]["rules"]
    codes = {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in policy if "onExitCodes" in rule}
    assert codes == {"Ignore": {EXIT_PREEMPTED}, "FailJob": {EXIT_ROWS_FAILED, EXIT_TOO_MANY_ERRORS}}
    assert {rule["onExitCodes"]["containerName"] for rule in policy if "onExitCodes" in rule} == {"worker"}
    assert container(spec)["name"] == "worker" and spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(("name", "spec"), job_specs().items(), ids=job_specs())
def test_kubernetes_own_schema_takes_the_jobs_and_finds_a_wrong_name(name, spec):
    from kubernetes_validate import ValidationError, validate

    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "ferrum"}, "spec": spec}
    validate(job, KUBERNETES, strict=True)
    wrong = copy.deepcopy(job)
    container(wrong["spec"])["limits"] = {}
    with pytest.raises(ValidationError, match="limits"):
        validate(wrong, KUBERNETES, strict=True)


def test_a_slice_has_a_pod_for_each_host_and_the_queue_room_for_all_slices():
    (jobset,) = objects("jobset.yaml")
    flavor, queue, local = objects("kueue.yaml")
    (slices,) = jobset["spec"]["replicatedJobs"]
    spec = slices["template"]["spec"]
    place, chips = spec["template"]["spec"]["nodeSelector"], container(spec)["resources"]["limits"]["google.com/tpu"]
    wide, high = map(int, place["cloud.google.com/gke-tpu-topology"].split("x"))
    assert spec["completions"] == spec["parallelism"] == wide * high // chips
    assert flavor["spec"]["nodeLabels"] == place
    (group,) = queue["spec"]["resourceGroups"]
    (offered,) = group["flavors"]
    assert offered["name"] == flavor["metadata"]["name"] and local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    assert offered["resources"] == [{"name": "google.com/tpu", "nominalQuota": slices["replicas"] * wide * high}]
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]


def test_a_jobset_ends_with_the_first_slice_that_is_done_or_fails_for_good():
    (jobset,) = objects("jobset.yaml")
    assert jobset["spec"]["successPolicy"] == {"operator": "Any"}
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]), "JobSet's webhook takes no other"


def test_a_definition_finds_wrong_names_and_values():
    """The program that holds manifests against published definitions, which no package brings."""
    quota = {"type": "object", "properties": {"nominalQuota": {"x-kubernetes-int-or-string": True}}}
    schema = {"type": "object", "properties": {"apiVersion": {}, "kind": {}, "spec": quota}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
    known = schemas([{"spec": {"group": "queues", "names": {"kind": "Queue"}, "versions": [version]}}])
    queue = {"apiVersion": "queues/v1", "kind": "Queue", "metadata": {"name": "q"}, "spec": {"nominalQuota": "32"}}
    assert faults(queue, known) == []
    assert faults(queue | {"spec": {"quota": 32}}, known)[0].startswith("spec: Additional properties")
    assert "is not of type 'integer', 'string'" in faults(queue | {"spec": {"nominalQuota": []}}, known)[0]
    assert faults(queue | {"kind": "Cue"}, known) == ["no definition of Cue in queues/v1 was given"]


def test_a_slice_of_a_jobset_does_not_see_the_others():
    """What GKE puts into the pods of a JobSet is gone from the environment that the command runs in."""
    words = commands()["jobset.yaml"]
    told = {"MEGASCALE_COORDINATOR_ADDRESS": "ferrum-slice-0-0", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    own = {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}
    left = json.loads(written_by(words[: words.index(SAME[0])] + show, env=os.environ | told | own))
    assert own.items() <= left.items() and not any(name.startswith("MEGASCALE") for name in left)
    assert words[-2:] == ["--coordinator", "auto"]
    (secret,) = container(job_specs()["jobset.yaml"])["env"]
    assert secret["name"] == "FERRUM_JAX_COORDINATOR_SECRET"


def test_skypilot_starts_a_job_again_after_a_notice():
    (task,) = objects("skypilot.yaml")
    assert task["resources"]["use_spot"] and task["resources"]["job_recovery"] == {
        "max_restarts_on_errors": 3,
        "recover_on_exit_codes": [EXIT_PREEMPTED],
    }
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.clients
def test_skypilot_itself_reads_the_task():
    program = (
        "import sky; (found,) = sky.Task.from_yaml('docs/examples/fleets/skypilot.yaml').resources; "
        "print(found.use_spot, found.accelerators, found.job_recovery['recover_on_exit_codes'])"
    )
    assert written_by([CLIENTS, "-c", program], timeout=120).splitlines()[-1] == "True {'tpu-v6e-8': 1} [75]"


def test_the_slurm_script_is_clean_and_its_options_stand_at_the_top():
    script = FOLDER / "slurm.sbatch"
    check = [str(Path(sys.executable).parent / "shellcheck"), str(script)]
    written_by(check)
    lines = text("slurm.sbatch").splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert options and all(line in lines[:first] for line in options)
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)


NUM_ROWS, NUM_TASKS, MOST_S = 96, 3, 300.0
FLAGS = "--max-num-seqs 4 --max-num-batched-tokens 64 --max-model-len 256 --num-blocks 80 --block-size 16"
PROGRAMS = {
    "srun": 'exec "$@"',
    "scontrol": 'echo "$*" >>requeued',
    "ferrum-jax": f'exec {sys.executable} -m ferrum_jax "$@" {FLAGS} --compilation-cache-dir {COMPILED}',
}


def lay_out(folder: Path) -> None:
    """A checkout's folder as the script knows it, with a folder in place of the bucket."""
    (folder / ".venv/bin").mkdir(parents=True)
    for name, line in PROGRAMS.items():
        (folder / ".venv/bin" / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (folder / ".venv/bin" / name).chmod(0o755)
    (folder / "model").symlink_to(GOLDENS / "qwen3")
    rows = [
        {"custom_id": f"row-{i}", "prompt_token_ids": [7, 8, 9 + i], "max_tokens": 180, "ignore_eos": True}
        for i in range(NUM_ROWS)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "slurm.sbatch").write_text((FOLDER / "slurm.sbatch").read_text().replace("gs://B", str(folder)))


def start(folder: Path, task: int) -> subprocess.Popen:
    own = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": str(100 + task), "PYTHONPATH": str(ROOT)}
    with open(folder / f"{task}.log", "a") as log:
        command = ["bash", "slurm.sbatch"]
        return subprocess.Popen(command, cwd=folder, env=os.environ | own, stderr=log, start_new_session=True)


def workers(folder: Path) -> set[str]:
    """Workers that have journaled rows."""
    return {path.name.partition(".")[0] for path in (folder / "out.jsonl.journal/segments").glob("[!.]*")}


@pytest.mark.parametrize(
    ("codes", "ends_with", "is_queued_again"),
    [((0,), 0, False), ((1,), 1, False), ((75,), 75, True), ((70, 2, 0), 0, False), ((2, 70, 70, 0), 70, False)],
    ids=str,
)
def test_the_script_starts_a_worker_again_where_that_may_help(tmp_path, codes, ends_with, is_queued_again):
    lay_out(tmp_path)
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    for name, line in (("sleep", "exit"), ("srun", "read -r code <codes; sed -i 1d codes; exit $code")):
        (tmp_path / ".venv/bin" / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    assert start(tmp_path, 2).wait(30) == ends_with
    assert (tmp_path / "requeued").exists() == is_queued_again
    assert len((tmp_path / "codes").read_text().split()) == max(0, len(codes) - 3)


@pytest.mark.slow
def test_three_tasks_share_a_job_and_one_is_queued_again_at_the_end_of_its_time(tmp_path):
    lay_out(tmp_path)
    tasks = [start(tmp_path, task) for task in range(NUM_TASKS)]
    try:
        until = time.monotonic() + MOST_S
        while len(workers(tmp_path)) < NUM_TASKS:
            assert time.monotonic() < until and tasks[0].poll() is None, (tmp_path / "0.log").read_text()
            time.sleep(0.05)
        os.killpg(tasks[0].pid, signal.SIGTERM)  # as Slurm signals: the worker, and the shell in some cases
        assert tasks[0].wait(30) == 75
        assert (tmp_path / "requeued").read_text() == "requeue 100\n" and not (tmp_path / "out.jsonl").exists()
        tasks[0] = start(tmp_path, 0)
        assert [task.wait(MOST_S) for task in tasks] == [0] * NUM_TASKS
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
                task.wait()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"row-{i}" for i in range(NUM_ROWS)]
    assert all(line["error"] is None for line in lines)
    late = start(tmp_path, 3)
    assert late.wait(60) == 0 and "no model is loaded" in (tmp_path / "3.log").read_text()
