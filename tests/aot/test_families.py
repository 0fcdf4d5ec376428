"""Every bucket of every family, in its tiny size, compiled for devices that are not here: what is in its program.

By hand, in parts: `-m "aot and not slow"` is four families, each for one target, 3 CPU minutes, and an encoder; `-m aot
-k v6e` is one target, `-k "v6e and qwen3"` some families of it. A family takes 25 to 85 CPU seconds for a target, an
encoder 10, all of them for all targets about an hour. "tpu" targets want libtpu beside jax, "gpu:h200" the CUDA plugin.
"""

import json

import pytest

from tests.aot.described import described, turn_of
from tests.aot.program_text import wide_weights
from tests.golden_table import goldens
from tests.support import GOLDENS

pytestmark = pytest.mark.aot
TARGETS = ("tpu:v5e:2x2", "tpu:v6e:2x2", "tpu:TPU7x:2x2x1", "gpu:h200")
FAMILIES = sorted(folder.name for folder in GOLDENS.iterdir() if (folder / "config.json").is_file())
ENCODERS = ("bert", "xlm_roberta", "modernbert", "embedding_gemma")
# Heads of keys and values that fill no tile of XLA's, in a family that XLA alone computes: see docs/laboratory.md.
COPIED_ON_TPUS = goldens("copies", "tpu")
IN_TURN = goldens("aot", "in turn")  # each for one target; all others are run by hand


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (target, family),
            id=f"{target}-{family}",
            marks=[] if family in IN_TURN and turn_of(family, TARGETS) == target else [pytest.mark.slow],
        )
        for target in TARGETS
        for family in FAMILIES
    ],
)
def buckets(request) -> list[dict]:
    """What the program of each bucket contains."""
    target, family = request.param
    is_copied = family in COPIED_ON_TPUS and target.startswith("tpu")
    return [bucket | {"is_copied": is_copied} for bucket in describe(target, family)]


def describe(target: str, golden: str) -> list[dict]:
    found = described("family_program", target, golden)
    assert "error" not in found, found["error"]
    print(json.dumps([{"bucket": b["bucket"], "compile_s": round(b["compile_s"], 1)} for b in found["buckets"]]))
    return found["buckets"]


def test_there_is_a_bucket_for_decodes_and_one_for_anything_and_one_that_samples(buckets):
    assert [bucket["bucket"].split()[0] for bucket in buckets] == ["decode", "mixed", "sample"]


def test_pools_are_aliased_and_not_copied(buckets):
    for bucket in buckets:
        assert bucket["aliased_bytes"] >= bucket["pool_bytes"], bucket["bucket"]
        of_a_step = not bucket["bucket"].startswith("sample")
        assert bool(bucket["pool_copies"]) == (bucket["is_copied"] and of_a_step), bucket["bucket"]


def test_no_constant_is_large_and_no_weight_is_widened(buckets):
    for bucket in buckets:
        assert bucket["constants"] == [], bucket["bucket"]
        assert bucket["wide_weights"] == [], bucket["bucket"]


def test_a_float32_weight_is_found_in_memory_and_beside_a_product():
    fused = "%{0} (p: bf16[4,8]) -> f32[4] {{\n %wide.{0} = f32[4,8] convert(%p)\n %end.{0} = f32[4] {1}(%x)\n}}\n"
    main = "ENTRY %main (p: bf16[4,8]) -> f32[4] {\n %x = f32[8,4] fusion(%p), calls=%sums\n"
    text = (
        fused.format("sums", "reduce") + fused.format("dots", "dot") + main + " %y = f32[4] fusion(%p), calls=%dots\n}"
    )
    found = wide_weights("HloModule m\n" + text, {(4, 8)})
    assert found == ["convert %wide.dots f32[4, 8]", "fusion %x f32[8, 4]"]


@pytest.mark.parametrize(
    ("target", "encoder"),
    [
        pytest.param(target, encoder, marks=[] if (target, encoder) == (TARGETS[1], "bert") else [pytest.mark.slow])
        for target in TARGETS
        for encoder in ENCODERS
    ],
)
def test_no_constant_of_an_encoder_is_large_and_no_weight_is_widened(target, encoder):
    buckets = describe(target, f"encoders/{encoder}")
    lengths = {bucket["bucket"].rpartition("S=")[2] for bucket in buckets}
    assert lengths == {"16", "32", "64", "80"}
    for bucket in buckets:
        assert bucket["num_ops"] > 100, bucket["bucket"]
        assert bucket["constants"] == [], bucket["bucket"]
        assert bucket["wide_weights"] == [], bucket["bucket"]
