"""Drafts over paged blocks, in two steps, on one device and on two: they are the reference's, and hidden states too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from checkpoints import open_checkpoint
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.llm import LLM
from ferrum_jax.models.families.registry import bind, rules_of, spec_of
from ferrum_jax.models.layers.attention import ForwardContext
from ferrum_jax.models.sharding import make_mesh, partitions
from ferrum_jax.runtime.layer_calls import LayerCalls, LayerSchedule
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.step_options import attention_config, implementation_of
from pallas_kernels.paged_attention import RaggedBatch, make_schedule
from pallas_kernels.state_rows import StateRows
from tests.engine.test_mtp import GREEDY, MTP, PROMPTS, KeptDrafts, drafting_engine, run_all
from tests.forked import call
from tests.models.test_goldens import assert_close
from tests.sharding.same import said_on
from tests.support import GOLDENS, INVARIANT, SMALL

STEPS = ((0, 16), (16, 39))  # tokens of the prompt, whose last one has no next


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_drafts_over_blocks_are_the_reference_on_one_device_and_on_two(name):
    golden = np.load(GOLDENS / "mtp" / name / "golden.npz")
    one, two = call(_drafted, name, ("tp=1", "tp=2"), devices=2)
    for key, value in one.items():
        assert_close(f"{name}: {key}", value, golden[key][: len(value)])
        error = np.max(np.abs(two[key] - value)) / np.max(np.abs(value))
        assert error < 1e-5, f"{key} of two devices is off by {error:.1e}"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("deepseek_v3", "tp=2"),
        pytest.param("deepseek_v3", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "ep=2", marks=pytest.mark.slow),
    ],
)
def test_an_engine_on_a_mesh_drafts_and_says_what_one_device_does(name, mesh):
    one, many = said_on(_said, name, "tp=1", mesh)
    assert many["tokens"] == one["tokens"] and many["drafted"] > 20
    assert many["drafts"].keys() == one["drafts"].keys()
    others = [ids for ids, token in one["drafts"].items() if many["drafts"][ids] != token]
    assert len(others) * 50 <= len(one["drafts"]), "but for logits that are as good as equal"


def _said(name: str, mesh: str) -> dict[str, object]:
    """The tokens of an engine that computes drafts, over blocks of NaN at first, and its drafts."""
    llm = LLM(str(GOLDENS / "mtp" / name), dataclasses.replace(INVARIANT, mesh=mesh), speculative_config=MTP)
    engine = drafting_engine(llm, source := KeptDrafts())
    tokens = [output.token_ids for output in run_all(engine, PROMPTS, GREEDY)]
    return {"tokens": tokens, "drafts": source.kept, "drafted": engine.scheduler.drafting.counts.drafted_tokens}


def _drafted(name: str, meshes: tuple[str, ...]) -> list[dict[str, np.ndarray]]:
    return [_on(name, MeshShape.parse(mesh)) for mesh in meshes]


def _on(name: str, shape: MeshShape) -> dict[str, np.ndarray]:
    """What the model and its first layer behind the last give, step by step, in one row whose blocks are 1, 2, ...

    The keys and values of blocks that nobody has written are NaN.
    """
    checkpoint = open_checkpoint(GOLDENS / "mtp" / name)
    spec, mesh = spec_of(checkpoint.config, mtp=True), make_mesh(shape, jax.devices()[: shape.size])
    config = dataclasses.replace(SMALL, dtype="float32", max_model_len=64, max_num_batched_tokens=32, mesh=str(shape))
    layout = lay_out(spec, config, mesh)
    rules, harmless = rules_of(spec)
    weights = checkpoint.load(
        rules=rules, harmless=harmless, targets=layout.targets, expansions=layout.model.expansions
    )
    caches = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype, device=a.sharding), layout.pools.caches)
    ids = np.load(GOLDENS / "mtp" / name / "golden.npz")["prompt"]
    found = []
    for start, end in STEPS:
        step = _step(layout, start, end - start)
        arguments = (weights, caches, ids[start:end], ids[start + 1 : end + 1])
        if mesh.size > 1:
            given = (*partitions((layout.targets, layout.pools.caches)), PartitionSpec(), PartitionSpec())
            outs = (given[1], PartitionSpec(), PartitionSpec(), PartitionSpec(None, "tp"))
            step = jax.shard_map(step, mesh=mesh, in_specs=given, out_specs=outs, check_vma=False)
        caches, *outputs = jax.jit(step)(*arguments)
        found.append([np.asarray(x) for x in outputs])
    hidden, draft, logits = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {"hidden": hidden, "draft_0": draft, "logits_0": logits[:, : spec.vocab_size]}


def _step(layout: Layout, start: int, count: int):
    """(caches, hidden, draft, logits) of a step of one row, from weights, caches, its tokens and the next ones."""
    options, spec = layout.options, layout.spec
    bucket = dataclasses.replace(layout.ladder.buckets[-1], num_tokens=count, num_rows=2, decode_only=False)
    starts, counts = jnp.array([start, 0], jnp.int32), jnp.array([count, 0], jnp.int32)
    offsets, blocks = jnp.array([0, count], jnp.int32), jnp.array([[1, 2, 3, 4], [0] * 4], jnp.int32)
    batch = RaggedBatch(block_tables=blocks, starts=starts, counts=counts, query_offsets=offsets)
    rows = StateRows(slots=jnp.array([1, 0], jnp.int32), starts=starts, counts=counts, offsets=offsets)

    def schedule_of(pool, group):
        implementation, heads = implementation_of(bucket, options, pool), options.local.attention_of(group.layers[0])
        how = attention_config(bucket, options, pool, heads.num_attention_heads)
        form = {"num_tokens": count, "block_size": options.block_size, "implementation": implementation}
        schedule = make_schedule(batch, config=how, window=group.window, **form)
        return LayerSchedule(implementation=implementation, attention=schedule)

    def step(weights, caches, ids, following):
        pools, states = caches
        schedules = {i: schedule_of(pools[i], group) for group in spec.kv_groups for i in group.layers}
        calls = LayerCalls(options, pools, states, schedules, rows, jnp.ones(count, bool))
        context = ForwardContext(run=calls, shards=options.shards)
        model, positions = bind(layout.graph, weights), start + jnp.arange(count, dtype=jnp.int32)
        hidden = model(ids, positions, context)
        draft = model.draft(following, hidden, positions, context)
        return (tuple(calls.pools), tuple(calls.states)), hidden, draft, model.logits(draft)

    return step
