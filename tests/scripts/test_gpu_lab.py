"""The laboratory: its table and clock with parts that are made up, and a part that runs here with a small model."""

import json
from types import SimpleNamespace

import pytest

from scripts import gpu_lab, lab_steps

PART = {"part": "qwen3-0.6b, graphs none", "model": "qwen3-0.6b", "graphs": "none"}
CASE = {**PART, "rows": 64, "step": "launch", "tokens": 4, "loop": "engine", "addresses": "two"}
DEVICES = {"platform": "gpu", "kind": "H200", "count": 1, "memory_bytes": 2**37}
LINES = [
    {"machine": {"devices": DEVICES, "driver": "580.1", "packages": {"jax": "0.12"}}},
    *(CASE | {"token_s": seconds} for seconds in (0.011, 0.009, 0.010)),
    {**CASE, "busy_s": 0.008, "kernels": 1234},
    {**CASE, "rows": 1, "token_s": 0.002},
    {**PART, "rows": 256, "step": "halves", "problem": "XlaRuntimeError: RESOURCE_EXHAUSTED"},
]


def test_a_page_and_a_file_each_say_what_was_measured_and_what_failed(tmp_path):
    about = {"command": "scripts/gpu/lab", "date": "today", "flags": "", "git": "abc", "dirty": False, "seconds": 9}
    (tmp_path / "lab.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    many, one = gpu_lab.write(tmp_path, about)["cases"]
    assert (many["token_s"], many["turns"], many["idle"]) == (0.010, 3, pytest.approx(0.2)) and "idle" not in one
    kept, page = json.loads((tmp_path / "lab.json").read_text()), (tmp_path / "lab.md").read_text()
    assert kept["cases"] == [many, one] and len(kept["turns"]) == 4 and kept["machine"]["driver"] == "580.1"
    assert "| launch | none | 4 | engine | two | 10.000 | 6,400 | 8.000 | 20.0% | 1,234 |" in page
    assert "1 x H200, 128 GiB for jax, driver 580.1" in page and "| 2.000 of fewer turns | 500 |" in page
    assert "qwen3-0.6b, graphs none, rows 256, step halves: XlaRuntimeError: RESOURCE_EXHAUSTED" in page


def test_parts_that_do_not_fit_in_the_time_that_is_left_are_named(monkeypatch, tmp_path):
    now, ran = [1000.0], {}

    def run_part(part, lines, limit_s):  # half a minute of each, which is then cut
        ran[part.name], now[0] = (limit_s, part.command), now[0] + min(30.0, limit_s)
        with lines.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in LINES[: 1 if part.name == "machine" else None])
            file.write('{"half of a line')
        gpu_lab.add_line(lines, part.about | {"problem": "cut after 30 s"})

    monkeypatch.setattr(gpu_lab, "run_part", run_part)
    monkeypatch.setattr(gpu_lab, "time", SimpleNamespace(time=lambda: now[0]))
    arguments = SimpleNamespace(output=tmp_path, minutes=5.75, only="", command="scripts/gpu/lab")
    assert gpu_lab.run_all(arguments, 1000.0) == 0
    kept, page = json.loads((tmp_path / "lab.json").read_text()), (tmp_path / "lab.md").read_text()
    assert list(ran)[:2] == ["machine", "qwen3-0.6b, graphs as XLA makes them"]
    (limit_s, command), hung_s = ran["check"], ran["qwen3-0.6b, graphs none"][0]
    assert (limit_s, command[command.index("--seconds") + 1], hung_s) == (75.0, "50", 120.0)
    assert [line["part"] for line in kept["left_out"]] == ["qwen3-30b-a3b int4, graphs as XLA makes them"]
    assert (
        "graphs as XLA makes them: needs some 90 s of 75 s that were left" in page and "; check: cut after 30 s" in page
    )


def test_each_kind_of_graphs_has_its_flags_beside_those_that_are_set(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    parts = [part for part, _ in gpu_lab.parts(tmp_path, lambda: 9.0, is_gpu=True) if part.environment]
    flags = {part.about["graphs"]: part.environment["XLA_FLAGS"] for part in parts}
    assert flags == {graphs: f"--mine {flag}".strip() for graphs, flag in gpu_lab.GRAPHS.items()}


def test_the_device_is_busy_while_a_kernel_runs_on_any_of_its_streams():
    def line(name, *spans):
        return SimpleNamespace(name=name, events=[SimpleNamespace(start_ns=a, duration_ns=b - a) for a, b in spans])

    gpu = [line("Stream #7", (10, 20), (40, 50)), line("Stream #9", (15, 30)), line("XLA Ops", (0, 99))]
    places = {"/device:GPU:0": gpu, "/host:CPU": [line("python", (0, 99))]}
    planes = [SimpleNamespace(name=name, lines=lines) for name, lines in places.items()]
    assert lab_steps.busy(planes) == {"busy_s": pytest.approx(30e-9), "kernels": 3}


@pytest.mark.slow
def test_a_part_runs_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="3"):
        gpu_lab.main(["--output", str(tmp_path), "--only", "qwen3-0.6b, graphs as"])
    found = json.loads((tmp_path / "lab.json").read_text())
    lacking = {line["left_out"] for line in found["left_out"] if "no launch" in line["left_out"]}
    assert len(found["cases"]) == 2 * (len(gpu_lab.WHOLE) - 2 * len(lacking)) + 1 and not found["failed"]
    assert all(case["busy_s"] > 0 and case["token_s"] > 0 and case["turns"] == 3 for case in found["cases"])
    assert "No GPU: small models on the CPU." in (tmp_path / "lab.md").read_text()
