"""The halves of a step of published models, compiled for TPUs that are not here: what they contain and what not."""

import json

import pytest

from tests.aot.described import described
from tests.rows import rows_beside

pytestmark = pytest.mark.aot
LAYERS = 2  # more of them add the same ops again


def case(model: str, topology: str, mesh: str, buckets: list[tuple[int, bool]], slow: bool = False, **options: str):
    fields = {"model": model, "topology": topology, "mesh": mesh, "buckets": buckets, **options}
    name = "_".join([model, topology, mesh, *(f"T{tokens}" for tokens, _ in buckets), *options.values()])
    return pytest.param(fields, id=name.replace("-", "_"), marks=[pytest.mark.slow] * slow)


# Mixed buckets of 384 tokens are for weights of 512 rows a device, since as many tokens make activations that look like
# them; and for experts on v5e:4x4, where libtpu makes an all-reduce of the reduce-scatter of 512 tokens a shard. Decode
# is of 32 rows where 64 fill 1,024 places of experts, which look like a weight.
CASES = [case(**row) for row in rows_beside(__file__)["cases"]]


@pytest.fixture(scope="module", params=CASES)
def program(request) -> tuple[dict, list[dict]]:
    """A case, and what the program of each of its buckets contains."""
    buckets = describe(request.param | {"layers": LAYERS})
    print(json.dumps([{"bucket": b["bucket"], "compile_s": round(b["compile_s"], 1)} for b in buckets]))
    return request.param, buckets


def describe(fields: dict) -> list[dict]:
    """What the program of each bucket of a case contains."""
    return described("step_program", fields)


def test_the_only_collectives_are_layer_sums_the_embedding_and_logits(program):
    """Where a token's inputs are spread and rounded together, their largest one is agreed upon before each sum."""
    fields, buckets = program
    for bucket in buckets:
        assert not bucket["unexpected_collectives"], "\n".join((bucket["bucket"], *bucket["unexpected_collectives"]))
        is_forward = bucket["bucket"].startswith(("decode", "mixed"))
        sums = 2 * LAYERS + 1 if is_forward and fields["mesh"] != "tp=1" else 0
        sums += 2 * LAYERS if sums and fields.get("weights") == "int8" else 0  # the largest input of each token
        assert bucket["collectives"].get("all-reduce", 0) == sums, bucket["bucket"]


def test_every_pool_is_aliased_and_none_is_copied_and_the_ledger_knows_their_bytes(program):
    """Slots and prompts, which are small, may be padded."""
    for bucket in program[1]:
        aliased, donated = bucket["aliased_bytes"], bucket["pool_bytes"]
        assert donated <= aliased <= 1.01 * donated + (1 << 20), bucket["bucket"]
        assert bucket["pool_copies"] == [], bucket["bucket"]
        assert bucket["temp_bytes"] < bucket["layer_pool_bytes"], bucket["bucket"]


def test_no_weight_is_copied_or_widened_and_no_constant_is_large(program):
    for bucket in program[1]:
        assert bucket["weight_copies"] == [], bucket["bucket"]
        assert bucket["wide_weights"] == [], bucket["bucket"]
        assert bucket["constants"] == [], bucket["bucket"]


def test_the_kernels_take_every_weight_in_a_form_and_none_is_decoded_in_memory(program):
    for bucket in program[1]:
        assert bucket["refused_products"] == {}
        assert bucket["dense_weights"] == [], bucket["bucket"]


def test_a_step_fits_the_memory_of_its_device(program):
    for bucket in program[1]:
        assert bucket["peak_bytes"] < bucket["memory_bytes"], bucket["bucket"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "topology", "mesh"), [("Llama-3-70B", "v5e:4x4", "tp=16"), ("Qwen3-235B-A22B", "v6e:4x8", "tp=32")]
)
def test_a_decode_step_of_full_depth_fits_its_slice(model, topology, mesh):
    """Minutes of compiling: run by hand."""
    for bucket in describe({"model": model, "topology": topology, "mesh": mesh, "buckets": [(64, True)]}):
        print(json.dumps(bucket))
        assert bucket["peak_bytes"] < bucket["memory_bytes"]
        assert bucket["pool_copies"] == [] and bucket["weight_copies"] == []
