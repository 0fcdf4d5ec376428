"""The files of docs/examples/fleets, and the command that each of them runs."""

import re
import shlex
from typing import Any

import yaml

from tests.support import ROOT

FOLDER = ROOT / "docs/examples/fleets"
SAME = shlex.split("ferrum-jax batch --model gs://B/model --input gs://B/in.jsonl --output gs://B/out.jsonl")


def text(name: str) -> str:
    return (FOLDER / name).read_text()


def objects(name: str) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all(text(name)))


def job_specs() -> dict[str, dict[str, Any]]:
    """What Kubernetes would run as Jobs, by the file."""
    (job,), (jobset,) = objects("job.yaml"), objects("jobset.yaml")
    (slices,) = jobset["spec"]["replicatedJobs"]
    return {"job.yaml": job["spec"], "jobset.yaml": slices["template"]["spec"]}


def container(spec: dict[str, Any]) -> dict[str, Any]:
    (found,) = spec["template"]["spec"]["containers"]
    return found


def commands() -> dict[str, list[str]]:
    """The words of the command in each file, and what stands before it."""
    found = {name: container(spec)["command"] for name, spec in job_specs().items()}
    for name, script in (("skypilot.yaml", objects("skypilot.yaml")[0]["run"]), ("slurm.sbatch", text("slurm.sbatch"))):
        (line,) = re.findall(r"(?m)^.*ferrum-jax batch.*$", script)
        found[name] = shlex.split(line.partition(" || ")[0])
    return found
