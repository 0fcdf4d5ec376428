"""`scripts/gpu/check`: what it would run, that each part has an end, and a page of it all."""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest

from scripts import gpu_check
from scripts.gpu_check import Part
from tests.rows import rows_beside
from tests.support import ROOT, is_running, written_by

VLLM = """
from types import SimpleNamespace as S
__version__ = "1.2"
SamplingParams = S
class LLM:
    def __init__(self, model, **how):
        assert how["load_format"] == "dummy" and how["skip_tokenizer_init"]
    def generate(self, prompts, params, use_tqdm):
        assert all(each["prompt_token_ids"] for each in prompts)
        return [S(outputs=[S(token_ids=[0] * each.max_tokens)]) for each in params]
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch) -> None:
    """An interpreter's vllm, which draws zeros."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))


def printed(*arguments: str) -> list[list[str]]:
    """The commands of a dry run."""
    script = [str(ROOT / "scripts/gpu/check"), "--dry-run", *arguments]
    shown = written_by(script, env=os.environ | {"PYTHON": sys.executable})
    return [shlex.split(line) for line in shown.splitlines()]


def test_a_dry_run_names_the_check_and_each_bench():
    check, *benches = printed("--output", "out", "--model", "/m/mine")
    assert check[:6] == ["python", "-m", "ferrum_jax", "check", "--output", "out"] and "--seconds" in check
    whose = [command[3 : command.index("--workload")] for command in benches]
    shapes = [["--shape", shape, "--on-device"] for shape in ("qwen3-0.6b", "llama-3-8b")]
    assert whose == [["--model", "checkpoints/demo"], *shapes, ["--model", "/m/mine"]]
    assert all({"decode", "ragged", "shared_prefix"} < set(command) for command in benches)
    assert printed("--full")[0][-1] == "--full"


def test_a_flag_that_is_none_is_refused_before_anything_is_installed(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit 1\nexec {sys.executable} "$@"\n')  # imports none of them
    bare.chmod(0o755)
    environment = os.environ | {"PYTHON": str(bare), "VENV": str(tmp_path / "venv")}
    script = [str(ROOT / "scripts/gpu/check"), "--fast"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "unrecognized arguments: --fast" in done.stderr
    assert "setting up" not in done.stderr + done.stdout and not (tmp_path / "venv").exists()


@pytest.mark.parametrize("name", ["llama-3-8b", "check", "demo"])
def test_a_folder_may_be_called_as_a_part_is(name, tmp_path):
    found = gpu_check.parts(gpu_check.parse_arguments(["--model", str(tmp_path / name)]))
    assert len({part.name for part in found}) == len(found)
    assert gpu_check.why_not(found[-1], {"platform": "gpu", "memory_bytes": 18e9}) is None


def test_a_dry_run_with_vllm_ends_with_both_shapes():
    *_, small, large = printed("--with-vllm", "--vllm-python", "/v/python")
    assert small[:2] == large[:2] == ["/v/python", "scripts/bench_vllm.py"]
    assert ["qwen3-0.6b" in small[2], "llama-3-8b" in large[2]] == [True, True]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "failed: it ended with exit code 1: ZeroDivisionError: division by zero"),
        ("import os; os._exit(5)", "failed: it ended with exit code 5: it named no error"),
        ("", None),
    ],
)
def test_a_bench_that_fails_keeps_its_lines_and_says_so(code, says, tmp_path, capfd):
    command = ("python", "-c", f"print('{{}}', flush=True); {code}")
    gpu_check.run_part(Part(name="demo", command=command, about={"shape": "demo"}), tmp_path / "b", None)
    lines = [json.loads(line) for line in (tmp_path / "b").read_text().splitlines()]
    assert lines == [{}, {"shape": "demo", "problem": says}][: 1 if says is None else 2]


def test_a_part_that_is_cut_ends_with_all_that_it_started(tmp_path):
    started = time.monotonic()
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    bench = tmp_path / "bench.jsonl"
    assert gpu_check.run_part(Part(name="x", command=("python", "-c", code), about={"shape": "x"}), bench, 2.0) == 124
    pid, line = bench.read_text().splitlines()
    assert json.loads(line) == {"shape": "x", "problem": "cut after 2 s"}
    assert time.monotonic() - started < 30
    while is_running(int(pid)):
        assert time.monotonic() - started < 30
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("shape", "devices", "says"), rows_beside(__file__)["a shape runs where the check found room for it"]
)
def test_a_shape_runs_where_the_check_found_room_for_it(shape, devices, says):
    found = gpu_check.why_not(Part(name=shape, command=(), about={"shape": shape}), devices)
    assert found is None if says is None else says in found


def test_a_check_that_left_no_report_leaves_a_page_that_says_so(tmp_path):
    gpu_check.add_line(tmp_path / "bench.jsonl", {"shape": "demo", "problem": "cut after 3 s"})
    assert gpu_check.write_page(tmp_path, 124) is None
    shown = (tmp_path / "check.html").read_text()
    assert "the check was cut and left no report" in shown and "cut after 3 s" in shown


def test_the_page_of_a_check_has_the_benches_that_ran_since(tmp_path):
    machine = {"chips": [], "packages": {}, "driver": None, "python": "3", "devices": None}
    report = {"machine": machine, "rates": [], "kernels": [], "engine": [], "problems": [], "notes": [], "seconds": 1.0}
    (tmp_path / "check.json").write_text(json.dumps({"format": 1, "is_right": True, **report}))
    for speed in (1234.0, 2345.0):
        gpu_check.add_line(tmp_path / "bench.jsonl", {"shape": "demo", "output_tok_s": speed, "total_tok_s": speed})
        assert gpu_check.write_page(tmp_path, 0) is None
    kept = json.loads((tmp_path / "check.json").read_text())
    assert [line["output_tok_s"] for line in kept["benches"]] == [1234.0, 2345.0]
    assert "2,345" in (tmp_path / "check.html").read_text()


def test_vllm_that_is_not_there_is_named_with_what_to_install(tmp_path):
    with pytest.raises(SystemExit, match=r"vllm is not installed in .*pip install vllm"):
        gpu_check.main(["--with-vllm", "--vllm-python", sys.executable, "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="does not run"):
        gpu_check.main(["--with-vllm", "--vllm-python", "/nowhere/python"])
    assert not list(tmp_path.iterdir())


def test_vllm_runs_the_same_prompts_and_has_a_line_for_each_workload(vllm, tmp_path):
    gpu_check.write_requests("qwen3-0.6b", tmp_path)
    part = gpu_check.vllm_part("qwen3-0.6b", sys.executable, tmp_path)
    gpu_check.require_vllm(sys.executable)
    assert gpu_check.run_part(part, tmp_path / "bench.jsonl", 60.0) == 0
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert [line["workload"] for line in lines] == list(gpu_check.WORKLOADS)
    assert all(line["shape"] == "qwen3-0.6b" and line["vllm"] == "1.2" and line["output_tok_s"] > 0 for line in lines)
    assert lines[0]["total_tok_s"] == pytest.approx(2 * lines[0]["output_tok_s"])  # 128 read, 128 generated


def test_a_machine_without_a_gpu_is_no_success(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check, "run_part", lambda *given: 0)
    monkeypatch.setattr(gpu_check, "write_page", lambda *given: {"platform": "cpu", "memory_bytes": 1})
    assert gpu_check.run_all(gpu_check.parse_arguments(["--output", str(tmp_path)])) == 3
    assert "found no GPU" in capsys.readouterr().err
