"""The benchmark of a whole engine on a shape so small that it runs here, and the harness that times kernels."""

import json
import sys

import jax
import numpy as np
import pytest

from ferrum_jax.cli.benchmarks import workloads
from pallas_kernels.paged_attention.cases import Case, Work
from pallas_kernels.target import Target
from scripts import bench_kernels, bench_offline, kernel_rivals, shapes

REFERENCE = """
import json, sys
folder, requests, threads, how = sys.argv[1:]
assert json.load(open(folder + "/config.json"))["hidden_size"] == 32 and how == "--continuous-batching"
print(json.dumps({"output_tok_s": 2.0, "requests": len(json.load(open(requests)))}))
"""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "qwen3-0.6b", shapes.small(shapes.SHAPES["qwen3-0.6b"]))
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


@pytest.mark.slow
def test_a_case_gives_a_line_with_times_bytes_and_the_state_of_the_checkout(capsys) -> None:
    bench_kernels.run(["decode_gqa"], on_gpu=False)
    about, line = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert about["copy_gb_per_s"] > 0 and about["device"] == "cpu"
    assert (line["case"], line["implementation"]) == ("decode_gqa", "xla")
    assert line["bytes"] == sum((6, 131, 64, 65)) * 2 * 2 * 128 * 2
    assert 0 < line["median_s"] <= line["p90_s"]
    assert {"git", "dirty", "jax", "compile_and_first_s", "flops", "of_copy"} <= line.keys()
    with pytest.raises(SystemExit, match=r"no case is called \['nothing'\]; there are \['decode_gqa'"):
        bench_kernels.run(["nothing"], on_gpu=False)


@pytest.mark.slow
def test_contiguous_keys_and_values_give_what_attention_through_the_blocks_gives() -> None:
    case = Case(name="even", rows=((37, 1),) * 3, num_tokens=3, num_rows=3, decode_only=True)
    ((name, ours, _),) = kernel_rivals.implementations(case, Target.named("cpu"))
    q, k, v = kernel_rivals.contiguous(case)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes dtypes
        theirs = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, scale=case.softmax_scale)
    assert name == "xla" and ours is not None
    np.testing.assert_allclose(np.asarray(ours()()), np.asarray(theirs[:, 0]).astype(np.float32), rtol=2e-2, atol=2e-2)


def test_operations_are_counted_for_what_queries_see() -> None:
    case = Case(name="", rows=((10, 2), (0, 3)), num_tokens=5, num_rows=2, num_heads=1, num_kv_heads=1, head_dim=1)
    assert Work.of(case, "mosaic_gpu").flops == 4 * (11 + 12 + 1 + 2 + 3)
    windowed = Work.of(Case(**{**vars(case), "window": 4}), "mosaic_gpu")
    assert (windowed.kv_bytes, windowed.flops) == (2 * (5 + 3) * 2, 4 * (4 + 4 + 1 + 2 + 3))
