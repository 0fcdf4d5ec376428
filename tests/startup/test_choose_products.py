"""Which implementation multiplies weights in a form: what is named, else what a check on this chip proved."""

import dataclasses
import types
from pathlib import Path

import jax
import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup.choose_attention import AttentionChoice
from ferrum_jax.engine.startup.choose_products import DENSE_EXPERTS, choose_products, entry_of_form, recorded_products
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import quantised_spec, spec_of
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime.compile.verdicts import Verdict, VerdictKey, VerdictStore
from ferrum_jax.runtime.settled import settle
from scripts.published import config_of
from tests.rows import rows_beside

LLAMA3_8B = config_of("Llama-3-8B")
QWEN3_30B_A3B = config_of("Qwen3-30B-A3B")

CHIP = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
SPEC = quantised_spec(spec_of(LLAMA3_8B | {"num_hidden_layers": 2}), "int4-g128")


def config(folder: Path, **fields: str) -> EngineConfig:
    return EngineConfig(compilation_cache_dir=str(folder / "executables"), **fields)


def keep(folder: Path, entries: set[str], **changes) -> None:
    """Verdicts of a check on this chip."""
    fields = {"implementation": "mosaic_tpu", "device_kind": CHIP.device_kind, "speed": 2.0} | changes
    store = VerdictStore(str(folder / "executables"), VerdictKey.here("chip"))
    store.keep(dict.fromkeys(entries, Verdict(**fields)))


def entries_of(spec) -> set[str]:
    return {entry_of_form(name, form) for name, form in spec.forms}


def test_without_a_check_of_its_form_a_model_is_multiplied_by_xla(tmp_path):
    choice = choose_products(SPEC, config(tmp_path), CHIP, chip="chip")
    assert choice.implementation == "xla"
    assert "no check on this chip proved 'mosaic_tpu' for quantized_matmul bfloat16 int4 group=128" in choice.why
    keep(tmp_path, {"quantized_matmul bfloat16 int8 group=all by int8"})
    assert choose_products(SPEC, config(tmp_path), CHIP, chip="chip").implementation == "xla", "of another form"


def test_a_form_that_was_found_right_and_faster_is_multiplied_by_the_kernel(tmp_path):
    keep(tmp_path, entries_of(SPEC))
    choice = choose_products(SPEC, config(tmp_path), CHIP, chip="chip")
    assert choice.implementation == "mosaic_tpu" and "found it right and faster" in choice.why
    assert choose_products(SPEC, config(tmp_path), CHIP, chip="another").implementation == "xla"
    other = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    assert choose_products(SPEC, config(tmp_path), other, chip="chip").implementation == "xla"


@pytest.mark.parametrize(
    ("changes", "says"), rows_beside(__file__)["a kernel that is wrong slower or not timed is left"]
)
def test_a_kernel_that_is_wrong_slower_or_not_timed_is_left(tmp_path, changes, says):
    keep(tmp_path, entries_of(SPEC), **changes)
    choice = choose_products(SPEC, config(tmp_path), CHIP, chip="chip")
    assert choice.implementation == "xla" and says in choice.why


def test_every_form_of_a_model_must_be_proven_experts_by_their_own_kernel(tmp_path):
    spec = quantised_spec(spec_of(QWEN3_30B_A3B | {"num_hidden_layers": 2}), "mxfp4")
    assert entries_of(spec) == {f"{op} bfloat16 mxfp4 group=32" for op in ("quantized_matmul", "grouped_matmul")}
    keep(tmp_path, {"quantized_matmul bfloat16 mxfp4 group=32"})
    choice = choose_products(spec, config(tmp_path), CHIP, chip="chip")
    assert choice.implementation == "xla" and "for grouped_matmul bfloat16 mxfp4" in choice.why
    keep(tmp_path, entries_of(spec))
    assert choose_products(spec, config(tmp_path), CHIP, chip="chip").implementation == "mosaic_tpu"


def test_a_hopper_gpu_takes_its_own_kernels_where_a_check_proved_them(tmp_path):
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    choice = choose_products(SPEC, config(tmp_path), gpu, chip="chip")
    assert choice.implementation == "xla" and "no check on this chip proved 'mosaic_gpu'" in choice.why
    keep(tmp_path, entries_of(SPEC), implementation="mosaic_gpu", device_kind=gpu.device_kind)
    assert choose_products(SPEC, config(tmp_path), gpu, chip="chip").implementation == "mosaic_gpu"
    by_int8 = quantised_spec(spec_of(LLAMA3_8B | {"num_hidden_layers": 2}), "int8")
    choice = choose_products(by_int8, config(tmp_path), gpu, chip="chip")
    assert (choice.implementation, choice.why) == ("xla", ""), "XLA's product of int8 is exact"


def test_what_is_named_is_taken_and_elsewhere_there_is_nothing_to_choose(tmp_path):
    keep(tmp_path, entries_of(SPEC))
    for named in ("xla", "mosaic_tpu", "mosaic_gpu"):
        assert choose_products(SPEC, config(tmp_path, product_implementation=named), CHIP).implementation == named
    assert choose_products(SPEC, config(tmp_path, check="off"), CHIP, chip="chip").implementation == "xla"
    cpu = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    for spec, device in ((SPEC, cpu), (spec_of(LLAMA3_8B), CHIP)):
        choice = choose_products(spec, config(tmp_path), device, chip="chip")
        assert (choice.implementation, choice.why) == ("xla", "")


def test_kernels_of_another_platform_are_refused_before_anything_is_loaded():
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    for named, other in (("mosaic_tpu", "TPU"), ("mosaic_gpu", "Hopper GPU")):
        with pytest.raises(ValueError, match=f"product_implementation is '{named}', and 'cpu' is no {other}; leave it"):
            settle(spec_of(LLAMA3_8B), EngineConfig(product_implementation=named), mesh)


def test_a_job_s_record_has_both_and_records_of_attention_alone_are_still_read():
    options = settle(spec_of(LLAMA3_8B), EngineConfig(), make_mesh(MeshShape(), jax.devices()[:1])).options
    made = {"implementation": "mosaic_tpu", "tiles": "tile_kv=512,items=2"}
    attention, both = (
        dataclasses.replace(options, **made, products=products).recorded for products in ("xla", "mosaic_tpu")
    )
    assert (options.recorded, attention) == ("xla", "mosaic_tpu tile_kv=512,items=2")
    assert recorded_products(both) == (attention, "mosaic_tpu") and recorded_products(attention) == (attention, "xla")
    assert AttentionChoice.recorded(recorded_products(both)[0]).tiles == "tile_kv=512,items=2"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("Qwen3-Next-80B-A3B", "gated_delta bfloat16 128 by 128"),
        ("Kimi-Linear-48B-A3B", "gated_delta bfloat16 128 by 128 by channel"),
        ("Granite-4.0-H-Small", "state_space bfloat16 64 by 128"),
    ],
)
def test_a_recurrence_has_a_verdict_of_its_own(name, entry, tmp_path):
    spec = spec_of(config_of(name))
    keep(tmp_path, {DENSE_EXPERTS})
    choice = choose_products(spec, config(tmp_path), CHIP, chip="chip")
    assert choice.why.startswith(f"recurrences run on 'xla': no check on this chip proved 'mosaic_tpu' for {entry};")
    keep(tmp_path, {entry})
    choice = choose_products(spec, config(tmp_path), CHIP, chip="chip")
    assert choice.implementation == "mosaic_tpu" and "recurrences run on 'mosaic_tpu'" in choice.why


def test_bfloat16_experts_have_a_verdict_of_their_own(tmp_path):
    spec = spec_of(QWEN3_30B_A3B | {"num_hidden_layers": 2})
    choice = choose_products(spec, config(tmp_path), CHIP, chip="chip")
    assert choice.implementation == "xla" and choice.why.startswith("products of experts run on 'xla': no check on")
    keep(tmp_path, {DENSE_EXPERTS})
    assert choose_products(spec, config(tmp_path), CHIP, chip="chip").implementation == "mosaic_tpu"
    assert choose_products(spec, config(tmp_path, dtype="float32"), CHIP, chip="chip").why == "", "no kernel of it"
