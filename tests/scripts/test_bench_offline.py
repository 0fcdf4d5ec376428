"""The benchmark of a whole engine, on a shape so small that it runs here."""

from __future__ import annotations

import json
import sys

import pytest

from ferrum_jax.bench import workloads
from scripts import bench_offline, shapes
from tests.scripts.test_shapes import SMALL

REFERENCE = """
import json, sys
folder, requests, threads, how = sys.argv[1:]
assert json.load(open(folder + "/config.json"))["hidden_size"] == 24 and how == "--continuous-batching"
print(json.dumps({"output_tok_s": 2.0, "requests": len(json.load(open(requests)))}))
"""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "qwen3-0.6b", shapes.SHAPES["qwen3-0.6b"] | SMALL)
    monkeypatch.setattr(workloads, "make_workload", lambda name, vocab_size, seed: [([seed] * 9, 6)] * 3)
    monkeypatch.setattr(bench_offline, "make_workload", workloads.make_workload)


@pytest.mark.slow
def test_a_shapes_weights_are_made_on_the_device_and_its_line_is_whole(small, monkeypatch, tmp_path, capsys):
    program = tmp_path / "reference.py"
    program.write_text(REFERENCE)
    monkeypatch.setattr(bench_offline, "_REFERENCE", program)
    flags = ["--shape", "qwen3-0.6b", "--on-device", "--workload", "streams", "--continuous-batching"]
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "64"]

    bench_offline.main([*flags, *sizes, "--reference-python", sys.executable])

    line = json.loads(capsys.readouterr().out)
    assert line["output_tok_s"] > 0 and line["reference"] == {"output_tok_s": 2.0, "requests": 3}
    assert line["speedup"] == round(line["output_tok_s"] / 2.0, 3)
    assert 0 < line["of_bandwidth_roofline"] < 1 and line["decode_step_s"] > 0
    assert line["compiles_after_ready"] == 0


@pytest.mark.slow
def test_several_workloads_share_an_engine(small, capsys):
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "64"]
    workloads = ["decode", "ragged", "shared_prefix"]
    bench_offline.main(["--shape", "qwen3-0.6b", "--on-device", "--workload", *workloads, *sizes])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["workload"] for line in lines] == workloads and len({line["startup_s"] for line in lines}) == 1
    assert all(line["shape"] == "qwen3-0.6b" and line["output_tok_s"] > 0 for line in lines)


@pytest.mark.parametrize("flag", ["--reference-python", "--profile"])
def test_a_reference_and_a_profile_are_of_one_workload(flag, capsys):
    with pytest.raises(SystemExit):
        bench_offline.parse_arguments(["--model", "here", "--workload", "decode", "single", flag, "x"])
    assert "are for one workload" in capsys.readouterr().err


def test_weights_on_the_device_want_a_shape(capsys):
    with pytest.raises(SystemExit):
        bench_offline.parse_arguments(["--model", "here", "--on-device", "--workload", "decode"])
    assert "give --shape" in capsys.readouterr().err


def test_every_shape_is_that_of_a_model_that_is_published():
    sizes = {"qwen3-0.6b": 0.6e9, "llama-3-8b": 8.03e9, "qwen3-30b-a3b": 30.5e9}
    for name, size in sizes.items():
        targets = shapes.registry.weights_of(shapes.SHAPES[name], "bfloat16").targets
        assert sum(x.size for x in targets.values()) == pytest.approx(size, rel=0.01), name
    assert shapes.SHAPES.keys() == sizes.keys()
