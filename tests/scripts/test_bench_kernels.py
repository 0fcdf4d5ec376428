"""The harness that times kernels, on the CPU."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import Case
from scripts import bench_kernels, kernel_rivals


@pytest.mark.slow
def test_a_case_gives_a_line_with_times_bytes_and_the_state_of_the_checkout(capsys) -> None:
    bench_kernels.run(["decode_gqa"], on_gpu=False)
    about, line = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert about["copy_gb_per_s"] > 0 and about["device"] == "cpu"
    assert (line["case"], line["implementation"]) == ("decode_gqa", "xla")
    assert line["bytes"] == sum((6, 131, 64, 65)) * 2 * 2 * 128 * 2
    assert 0 < line["p10_s"] <= line["median_s"] <= line["p90_s"]
    assert {"git", "dirty", "jax", "compile_and_first_s", "flops", "of_copy"} <= line.keys()
    with pytest.raises(SystemExit, match=r"no case is called \['nothing'\]; there are \['decode_gqa'"):
        bench_kernels.run(["nothing"], on_gpu=False)


@pytest.mark.slow
def test_contiguous_keys_and_values_give_what_attention_through_the_blocks_gives() -> None:
    case = Case(name="even", rows=((37, 1),) * 3, num_tokens=3, num_rows=3, decode_only=True)
    problem = kernel_rivals.make_problem(case, on_gpu=False)
    ((name, ours, _),) = kernel_rivals.implementations(problem, on_gpu=False)
    q, k, v = kernel_rivals.contiguous(problem)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes dtypes
        theirs = jax.nn.dot_product_attention(q.astype(k.dtype), k, v, scale=case.softmax_scale)
    assert name == "xla" and ours is not None
    np.testing.assert_allclose(np.asarray(ours()()), np.asarray(theirs[:, 0]).astype(np.float32), rtol=2e-2, atol=2e-2)


def test_operations_are_counted_for_what_queries_see() -> None:
    case = Case(name="", rows=((10, 2), (0, 3)), num_tokens=5, num_rows=2, num_heads=1, num_kv_heads=1, head_dim=1)
    assert kernel_rivals.work_of(case)[1] == 4 * (11 + 12 + 1 + 2 + 3)
    windowed = Case(**{**vars(case), "window": 4})
    assert kernel_rivals.work_of(windowed) == (2 * (5 + 3) * 2, 4 * (4 + 4 + 1 + 2 + 3))
