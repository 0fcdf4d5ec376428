"""A kernel that a compiler refuses is one sentence, and what the compiler says is in a file."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh

from ferrum_jax.engine.startup.faults import _MOSAIC
from ferrum_jax.runtime.compile.compile import Program
from ferrum_jax.runtime.compile.refused_kernel import RefusedKernel, is_of_kernel

MESH = Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
KERNELS = "attention 'mosaic_tpu' of 32 heads, 8 of KV, of 128 bfloat16 values and int8 KV in blocks of 32 tokens"


def program(trace, kernels: str = KERNELS) -> Program:
    return Program(what="decode T=8 R=8 M=4", shapes="", mesh=MESH, trace=trace, kernels=kernels)


def raises(error: Exception):
    def trace():
        raise error

    return trace


LONG = f"{_MOSAIC} in kv_write\n" + "  at an operation\n" * 76


def test_a_refused_kernel_is_one_sentence_and_its_traceback_is_a_file():
    with pytest.raises(RefusedKernel) as caught:
        program(raises(jax.errors.JaxRuntimeError(LONG))).compile()
    said = str(caught.value)
    assert said.startswith(f"kv_write does not compile for cpu, in the decode T=8 R=8 M=4 with {KERNELS}, with jax")
    assert f"jax {jax.__version__}" in said and "failed to legalize operation" in said
    assert "take implementation 'xla'" in said and "\n" not in said and len(said) < 600
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    path = pathlib.Path(re.search(r"report what (\S+) holds", said)[1])
    kept = path.read_text()
    path.unlink()
    assert "Traceback" in kept and kept.count("at an operation") == 76


def test_what_pallas_cannot_lower_is_said_so_too():
    def kernel(x, out):
        out[...] = jnp.sort(x[...], axis=0)

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = jax.jit(lambda x: pl.pallas_call(kernel, out_shape=shape)(x))
    with pytest.raises(RefusedKernel, match=r"a kernel does not compile for cpu.*Pallas TPU lowering") as caught:
        program(lambda: call.trace(shape).lower(lowering_platforms=("tpu",))).compile()
    pathlib.Path(re.search(r"report what (\S+) holds", str(caught.value))[1]).unlink()


@pytest.mark.parametrize(
    ("error", "kernels"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm: kv_write"), KERNELS),
        (jax.errors.JaxRuntimeError("INTERNAL: something else"), KERNELS),
        (ValueError("block tables take 9 bytes of scalar memory"), KERNELS),
        (jax.errors.JaxRuntimeError(LONG), ""),
    ],
)
def test_other_errors_stay_what_they_are(error, kernels):
    with pytest.raises(type(error)) as caught:
        program(raises(error), kernels).compile()
    assert caught.value is error


def test_vector_memory_that_a_kernel_lacks_is_the_kernels():
    text = "RESOURCE_EXHAUSTED: Allocation (size=157) would exceed memory (size=134) :: #6 [space=vmem] :: {}.1"
    assert is_of_kernel(RuntimeError(text.format("prefill_attention")))
    assert not is_of_kernel(RuntimeError(text.format("fusion")))
