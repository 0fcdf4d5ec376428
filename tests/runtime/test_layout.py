"""What follows from spec, config and device: implementation, KV dtype and block size, or every reason against them."""

import dataclasses
import re
from typing import Any

import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import AttentionSpec, CacheGroup, IndexerSpec, MlpSpec, ModelSpec
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.placing.fit import scalar_bytes
from ferrum_jax.runtime.settled import lacks_kernels
from pallas_kernels.kv_pool import KV_DTYPES
from pallas_kernels.paged_attention.support import refusals
from pallas_kernels.target import Target
from scripts.published import PUBLISHED
from scripts.slices_page import Described
from tests.rows import rows_beside

CPU = Described("cpu", "cpu", 0)
V6E = Described("tpu", "TPU v6 lite", 0)
V5E = Described("tpu", "TPU v5 lite", 0)
H200 = Described("gpu", "NVIDIA H200", 0)


def spec_of(*, heads=8, kv_heads=8, head_dim=128, intermediate_size=8, **fields) -> ModelSpec:
    """One small layer."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 512}
    return ModelSpec(
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        attention=AttentionSpec(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim),
        mlp=MlpSpec(intermediate_size=intermediate_size),
        **{**sizes, **fields},
    )


def layout_of(device, spec: ModelSpec | None = None, **config):
    engine = EngineConfig(**{"num_blocks": 9, "kv_memory_bytes": 1, "max_num_seqs": 2, **config})
    return lay_out(spec or spec_of(), engine, make_mesh(MeshShape(), [device]))


@pytest.mark.parametrize(
    ("device", "heads", "config", "tokens"),
    [
        (CPU, 8, {}, 16),
        (V6E, 8, {}, 16),
        (V6E, 1, {}, 64),
        (V6E, 8, {"kv_dtype": "int8"}, 16),
        (V6E, 1, {"kv_dtype": "int8"}, 128),
        (V6E, 1, {"kv_dtype": "float32"}, 32),
        (V6E, 1, {"block_size": 256}, 256),
    ],
)
def test_a_block_has_32_kb_a_layer_on_an_accelerator_unless_its_size_is_named(device, heads, config, tokens):
    layout = layout_of(device, spec_of(kv_heads=heads), **config)
    assert layout.options.block_size == layout.ledger.block_size == tokens
    assert {pool.block_size for pool in layout.pools.kv} == {tokens}


def test_a_windows_pool_has_what_it_needs_and_the_others_have_the_rest():
    groups = (CacheGroup(kind="full", layers=(0,)), CacheGroup(kind="window", layers=(1,), window=33))
    spec = spec_of(num_hidden_layers=2, cache_groups=groups, max_position_embeddings=4096)
    config = EngineConfig(kv_memory_bytes=1 << 25, max_num_seqs=2, max_num_batched_tokens=64, dtype="float32")
    layout = lay_out(spec, config, make_mesh(MeshShape(), [CPU]))
    full, window = layout.ledger.groups
    assert window.num_blocks == 2 * (2 * 7 + 4), (
        "a row's window of 33 and block of 16 tokens touch 4 blocks, and 3 more"
    )
    assert full.num_blocks == (1 << 25) // full.block_bytes - window.num_blocks - 2 and full.num_blocks > 200
    assert [pool.values.shape[0] for pool in layout.pools.kv] == [full.num_blocks + 1, window.num_blocks + 1]
    assert (layout.ledger.num_blocks, layout.ledger.kv_bytes) == (full.num_blocks, 1 << 25)


def test_implementation_and_kv_dtype_default_to_the_platform_s_own():
    on_cpu, on_tpu = layout_of(CPU), layout_of(V6E)
    assert (on_cpu.options.implementation, on_cpu.kv_dtype) == ("xla", "float32")
    assert (on_tpu.options.implementation, on_tpu.kv_dtype) == ("mosaic_tpu", "bfloat16")
    assert layout_of(V6E, implementation="xla", kv_dtype="int8").pools.kv[0].dtype == KV_DTYPES["int8"]


@pytest.mark.parametrize("head_dim", [80, 112, 160, 240])
def test_heads_that_the_tpus_kernels_pad_run_and_their_zeros_stand_in_the_ledger(head_dim):
    layout = layout_of(V6E, spec_of(head_dim=head_dim), num_blocks=8)
    lanes = layout.pools.kv[0].values.shape[3]
    assert (layout.options.implementation, lanes) == ("mosaic_tpu", 128 if head_dim < 128 else 256)
    assert layout.ledger.padded_bytes == layout.ledger.kv_bytes * (lanes - head_dim) // lanes
    assert layout_of(V6E, spec_of(head_dim=128), num_blocks=8).ledger.padded_bytes == 0


def test_weights_that_leave_no_memory_of_the_machine_are_what_a_refusal_names(monkeypatch):
    monkeypatch.setattr("ferrum_jax.runtime.pools.budget.free_host_bytes", lambda: 100_000)  # less than the weights
    wanted = r"^weights of \d+\.\d\d GiB leave nothing of this machine's free memory"
    with pytest.raises(ValueError, match=wanted) as refused:
        layout_of(CPU, kv_memory_bytes=None, num_blocks=None)
    assert "kv_memory_bytes" not in str(refused.value) and "int8" in str(refused.value)


def test_what_cannot_run_is_refused_with_every_reason():
    with pytest.raises(ValueError, match=r"'mosaic_tpu' on cpu, which is no TPU; .*head_dim is 72; .*block_size is 8"):
        layout_of(CPU, spec_of(head_dim=72), implementation="mosaic_tpu", block_size=8)
    with pytest.raises(ValueError, match=r"kv_dtype is 'fp8_e4m3'; v5e has no float8.*max_model_len is 9000"):
        layout_of(V5E, kv_dtype="fp8_e4m3", max_model_len=9000)
    assert layout_of(V5E, kv_dtype="fp8_e4m3", implementation="xla").kv_dtype == "fp8_e4m3"


def test_heads_that_are_padded_are_refused_where_an_indexer_chooses_keys():
    heads = AttentionSpec(num_attention_heads=8, num_key_value_heads=2, head_dim=96)
    indexer = IndexerSpec(num_heads=2, head_dim=96, top_k=64, by_head=True, group_size=16)
    spec = dataclasses.replace(spec_of(), attention=dataclasses.replace(heads, indexer=indexer))
    with pytest.raises(ValueError, match="has an indexer, and heads of 96 values are padded for 'mosaic_tpu'"):
        layout_of(V6E, spec)
    assert layout_of(V6E, spec, implementation="xla").options.implementation == "xla"
    wide = dataclasses.replace(heads, head_dim=128, indexer=indexer)
    assert layout_of(V6E, dataclasses.replace(spec, attention=wide)).options.implementation == "mosaic_tpu"
    with pytest.raises(ValueError, match="has an indexer and no latents, which 'mosaic_gpu' does not run"):
        layout_of(H200, dataclasses.replace(spec, attention=wide), implementation="mosaic_gpu")


def room_for(most, monkeypatch):
    """Lets attention refuse buckets whose block tables have more entries than this."""

    def attention_config(bucket, options, pool, num_heads):
        if bucket.num_rows * bucket.table_width > most:
            raise ValueError("no room")

    monkeypatch.setattr("ferrum_jax.runtime.refusals.attention_config", attention_config)


@pytest.mark.parametrize(
    ("most", "config", "tokens", "rows", "why"),
    rows_beside(__file__)["blocks grow and only then rows are fewer where attention has no room"],
)
def test_blocks_grow_and_only_then_rows_are_fewer_where_attention_has_no_room(
    monkeypatch, most, config, tokens, rows, why
):
    room_for(most, monkeypatch)
    open_config = EngineConfig(num_blocks=9, **config)
    layout = lay_out(spec_of(), open_config, make_mesh(MeshShape(), [V6E]))
    assert (layout.ledger.block_size, layout.options.block_size, layout.num_rows) == (tokens, tokens, rows)
    assert re.search(why, layout.why_bounded) and layout.max_num_seqs == rows
    assert layout.ladder.buckets[-1].num_rows == rows and layout.ladder.buckets[-1].table_width == -(-512 // tokens)


@pytest.mark.parametrize("config", [{"block_size": 16, "max_num_seqs": 64}, {"max_num_seqs": 600}])
def test_what_is_named_is_refused_and_not_changed_where_attention_has_no_room(monkeypatch, config):
    room_for(400, monkeypatch)
    with pytest.raises(ValueError, match=r"no room.* Any one of these would do: max_num_seqs="):
        layout_of(V6E, **config)


def test_a_bucket_that_exceeds_scalar_memory_is_refused_before_compiling():
    with pytest.raises(ValueError, match=r"the bucket .* cannot run with 'mosaic_tpu': .* scalar memory"):
        layout_of(V6E, max_num_batched_tokens=2**16)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("context", [40_960, 131_072])
def test_256_rows_of_long_contexts_are_not_refused_whatever_the_blocks_are(context, block_size):
    layout = layout_of(V6E, spec_of(max_position_embeddings=context), max_num_seqs=256, block_size=block_size)
    assert layout.ladder.buckets[-1].table_width == context // block_size
    scalars = scalar_bytes(layout)
    assert scalars is not None and scalars[0] < scalars[1]


def test_the_changes_that_a_refusal_names_are_the_smallest_that_fit():
    config: dict[str, Any] = {"max_num_batched_tokens": 2**16}
    with pytest.raises(ValueError, match="Any one of these would do") as refusal:
        layout_of(V6E, **config)
    named = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", str(refusal.value).split("would do")[1])}
    assert set(named) == {"max_num_batched_tokens"}
    for name, value in named.items():
        layout_of(V6E, **config | {name: value})
        with pytest.raises(ValueError, match="scalar memory"):
            layout_of(V6E, **config | {name: value + 1})


def test_a_gpu_takes_xla_unless_the_kernels_are_named():
    assert layout_of(H200).options.implementation == "xla"
    layout = layout_of(H200, implementation="mosaic_gpu", kv_dtype="int8")
    assert layout.pools.kv[0].values.shape[2:] == (16, 128)
    with pytest.raises(ValueError, match="cannot run with 'mosaic_gpu': activations are float32"):
        layout_of(H200, implementation="mosaic_gpu", dtype="float32", kv_dtype="bfloat16")


def test_xla_has_no_limits_and_an_unknown_implementation_is_named():
    sizes = {"target": Target.named("cpu"), "head_dim": 80, "block_size": 8, "kv_dtype": "fp8_e5m2"}
    assert refusals("xla", **sizes) == []
    assert refusals("mosaic", **sizes) == [
        "implementation is 'mosaic'; it must be one of ('xla', 'mosaic_tpu', 'mosaic_gpu')"
    ]
    with pytest.raises(ValueError, match="implementation is 'mosaic'; it must be one of"):
        EngineConfig(implementation="mosaic")
    with pytest.raises(ValueError, match="kv_dtype is 'int4'; it must be one of"):
        EngineConfig(kv_dtype="int4")


@pytest.mark.parametrize("name", ["Llama-4-Scout", "Gemma-4-E2B", "Gemma-4-31B", "Gemma-3-4B", "MiMo-V2-Flash"])
def test_chunks_wide_heads_narrow_values_and_whole_images_have_kernels(name: str):
    spec = registry.spec_of(PUBLISHED[name][0])
    assert not lacks_kernels(spec, "bfloat16", "tpu") and not lacks_kernels(spec, "bfloat16", "gpu")
