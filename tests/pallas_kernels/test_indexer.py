"""Keys that an indexer chooses, and attention to them, against float64 oracles, over pools poisoned with NaN."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chosen_keys import ChosenKeys
from pallas_kernels.indexer import IndexerSchedule, choose_keys, make_indexer_schedule, oracle
from pallas_kernels.kv_pool import KV_DTYPES, KVPool, make_pool, pool_shape, with_index_keys
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import AttentionConfig, RaggedBatch, make_schedule, paged_attention
from pallas_kernels.paged_attention.schedule import Schedule
from tests.fast_compile import FAST_COMPILE
from tests.marks import slow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (start, count) of each. heads: of the indexer; width: of its keys. form: of the pool.

    by_head: each head of the indexer chooses for a KV head. group, local: see `make_indexer_schedule`.
    """

    rows: tuple[tuple[int, int], ...]
    top_k: int
    num_tokens: int
    table: int  # blocks
    block_size: int = 8
    heads: int = 7
    width: int = 12
    num_heads: int = 6
    form: tuple[tuple[str, Any], ...] = (("num_kv_heads", 1), ("head_dim", 10), ("v_head_dim", 4), ("is_latent", True))
    kv_dtype: str = "float32"
    decode_only: bool = False
    invariant: bool = False
    by_head: bool = False
    group: int = 1
    local: int = 0
    together: int = 1


_MIXED = ((40, 1), (0, 1), (129, 1), (0, 70), (33, 5), (16, 48))
_HEADS = (("num_kv_heads", 2), ("head_dim", 6), ("v_head_dim", 6))
_UNLIKE = (("num_kv_heads", 2), ("head_dim", 6), ("v_head_dim", 4))
_BY_HEAD: dict[str, Any] = {"by_head": True, "heads": 2, "form": _HEADS}
CASES = {
    "mixed": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20),
    "more_than_any_has": Case(rows=_MIXED, top_k=150, num_tokens=128, table=20),
    "one_key": Case(rows=_MIXED, top_k=1, num_tokens=128, table=20),
    "covered": Case(rows=_MIXED, top_k=160, num_tokens=128, table=20),
    "several_scored_tiles": Case(rows=((1300, 3), (700, 1)), top_k=300, num_tokens=8, table=180),
    "side_by_side": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20, together=3),
    "decode": Case(rows=((40, 1), (5, 1), (129, 1)), top_k=16, num_tokens=4, table=20, decode_only=True),
    "invariant": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20, invariant=True),
    "odd_blocks": Case(rows=_MIXED, top_k=20, num_tokens=128, table=10, block_size=17),
    "heads": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20, form=_HEADS),
    "int8": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20, form=_HEADS, kv_dtype="int8"),
    "bfloat16": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20, kv_dtype="bfloat16"),
    "fp8": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20, form=_HEADS, kv_dtype="fp8_e4m3"),
    "groups": Case(rows=_MIXED, top_k=24, num_tokens=128, table=20, group=12, local=1),
    "groups_of_heads": Case(rows=_MIXED, top_k=32, num_tokens=128, table=20, **_BY_HEAD, group=16, local=1),
    "local_groups_alone": Case(rows=_MIXED, top_k=16, num_tokens=128, table=20, **_BY_HEAD, group=8, local=2),
    "groups_of_int8": Case(rows=_MIXED, top_k=24, num_tokens=128, table=20, **_BY_HEAD, kv_dtype="int8", group=4),
    "groups_in_several_tiles": Case(rows=((1300, 3), (700, 1)), top_k=300, num_tokens=8, table=180, group=20, local=3),
    "groups_and_unlike_sizes": Case(
        rows=_MIXED, top_k=16, num_tokens=128, table=20, **(_BY_HEAD | {"form": _UNLIKE}), group=8, invariant=True
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A case's arrays: of the indexer, of attention, the pool of what came before, and the rows."""

    indexer: tuple[Any, Any, Any]  # NumPy's arrays: q [T, J, I], weights [T, J] or None, key [T, I]
    attention: tuple[Any, Any, Any]  # q, k, v
    pool: KVPool
    batch: Any  # RaggedBatch of NumPy's arrays


def made(case: Case, seed: int = 0, *, whole_numbers: bool = False) -> Made:
    """Random; NaN in padding, and in all of the pool that is no row's context.

    whole_numbers: the indexer's arrays are small whole numbers, so that many scores are equal.
    """
    rng = np.random.default_rng(seed)
    T, C, R = case.num_tokens, case.block_size, len(case.rows) + 1
    real = sum(count for _, count in case.rows)

    def drawn(*shape: int, whole: bool = False) -> np.ndarray:
        x = rng.integers(-1, 2, shape) if whole else rng.standard_normal(shape)
        x = x.astype(np.float32)
        x[real:] = np.nan
        return x

    J, I, form = case.heads, case.width, dict(case.form)
    is_latent = form.get("is_latent", False)
    H, V = form["head_dim"], form["v_head_dim"]
    indexer = drawn(T, J, I, whole=whole_numbers), drawn(T, J, whole=whole_numbers), drawn(T, I, whole=whole_numbers)
    indexer = (indexer[0], None, indexer[2]) if case.by_head else indexer
    attention = (
        drawn(T, case.num_heads, H + V if is_latent else H),
        drawn(T, form["num_kv_heads"], H),
        drawn(T, form["num_kv_heads"], V),
    )
    blocks = rng.permutation(np.arange(1, 1 + R * case.table)).reshape(R, case.table).astype(np.int32)
    ragged: Any = np.array([*case.rows, (0, 0)], np.int32).T
    starts, counts = ragged
    offsets: Any = (np.cumsum(counts) - counts).astype(np.int32)
    tables: Any = blocks
    batch = RaggedBatch(block_tables=tables, starts=starts, counts=counts, query_offsets=offsets)
    shape = pool_shape(
        num_blocks=1 + R * case.table,
        block_size=C,
        **form,
        dtype=KV_DTYPES[case.kv_dtype],
        implementation="xla",
    )
    pool = make_pool(with_index_keys(shape, I), fill=jnp.nan)
    places = [(blocks[r][p // C], p % C) for r, start in enumerate(starts[:-1]) for p in range(start)]
    n = len(places)
    before = [rng.standard_normal((n, *x.shape[1:])).astype(np.float32) for x in attention[1:]]
    keys = (rng.integers(-1, 2, (n, I)) if whole_numbers else rng.standard_normal((n, I))).astype(np.float32)
    ids, offsets = (np.array(column, np.int32) for column in zip(*places, strict=True))
    ids, offsets = jnp.asarray(ids), jnp.asarray(offsets)
    pool = kv_write(pool, jnp.asarray(before[0]), jnp.asarray(before[1]), ids, offsets)
    nothing = IndexerSchedule(write_blocks=ids, write_offsets=offsets, reads=None, top_k=10**6, group=1, local=0)
    _, pool = choose_keys(jnp.zeros((n, J, I)), jnp.zeros((n, J)), jnp.asarray(keys), pool, nothing)
    return Made(indexer=indexer, attention=attention, pool=pool, batch=batch)


def schedules_of(batch: RaggedBatch, case: Case) -> tuple[Schedule, IndexerSchedule]:
    sizes: Any = {"num_tokens": case.num_tokens, "block_size": case.block_size}
    config = AttentionConfig.choose(**sizes, decode_only=case.decode_only, invariant=case.invariant)
    tile_kv = -(-config.tile_kv // case.block_size) * case.block_size
    how: Any = {"together": case.together, "decode_together": case.together, "tile_kv": tile_kv}
    schedule = make_schedule(batch, **sizes, config=dataclasses.replace(config, **how))
    assert isinstance(schedule, Schedule)
    is_covered = case.table * case.block_size <= case.top_k
    reads = None if is_covered else schedule
    how = {"top_k": case.top_k, "group": case.group, "local": case.local}
    return schedule, make_indexer_schedule(batch, **sizes, **how, attention=reads)


@functools.partial(jax.jit, static_argnames=("case",), compiler_options=FAST_COMPILE)
def choose(indexer: Any, pool: KVPool, batch: RaggedBatch, *, case: Case) -> tuple[ChosenKeys | None, KVPool]:
    q, weights, key = indexer
    return choose_keys(q, weights, key, pool, schedules_of(batch, case)[1])


@functools.partial(jax.jit, static_argnames=("case",), compiler_options=FAST_COMPILE)
def attended(attention: Any, pool: KVPool, batch: RaggedBatch, chosen: ChosenKeys | None, *, case: Case) -> jax.Array:
    q, k, v = attention
    return paged_attention(q, k, v, pool, schedules_of(batch, case)[0], scale=0.3, chosen=chosen)[0]


def positions_of(chosen: ChosenKeys, batch: RaggedBatch, case: Case) -> list[list[list[int]]]:
    """The positions of the keys of each token of a row, of all heads or of each, in the order of its places."""
    found, token, C = [], 0, case.block_size
    for table, count in zip(batch.block_tables, batch.counts, strict=True):
        at = {int(block): i for i, block in enumerate(table)}
        for _ in range(count):
            of_heads = [places[places > 0].tolist() for places in np.asarray(chosen.places[token])]
            found.append([[at[place // C] * C + place % C for place in places] for places in of_heads])
            token += 1
    return found


def expected_choice(case: Case, arrays: Made, pool: KVPool) -> list[list[tuple[list[int], float]]]:
    """The oracle's, of keys as the pool keeps them."""
    kept = np.asarray(pool.index_keys)[:, :, 0].view(pool.index_dtype).astype(np.float64)
    q, weights, key = arrays.indexer
    rounded = key.astype(pool.index_dtype).astype(np.float64)
    b = arrays.batch
    rows = list(zip(b.block_tables, b.starts, b.counts, strict=True))
    return oracle.choose(q, weights, rounded, kept, rows, top_k=case.top_k, group=case.group, local=case.local)


FAST = ("mixed", "decode", "int8", "groups", "groups_and_unlike_sizes")


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES if name != "covered"])
def test_the_best_scores_of_a_row_s_context_are_chosen_in_order(name):
    case = CASES[name]
    arrays = made(case)
    chosen, pool = choose(arrays.indexer, arrays.pool, arrays.batch, case=case)
    schedule, _ = schedules_of(arrays.batch, case)
    starts = np.concatenate([np.arange(start, start + count) for start, count in case.rows])
    compared = 0
    for position, of_heads, expected_of_heads in zip(
        starts, positions_of(chosen, arrays.batch, case), expected_choice(case, arrays, pool), strict=True
    ):
        if position < case.top_k and not schedule.invariant and not any(of_heads):
            continue  # its tile's queries see all that is before them
        for got, (expected, gap) in zip(of_heads, expected_of_heads, strict=True):
            assert got == expected or gap < 1e-4, f"position {position}"
        compared += 1
    assert compared or case.top_k > max(starts)


@pytest.mark.parametrize("name", ["mixed", "groups_of_heads"])
def test_of_equal_scores_the_earlier_positions_are_chosen(name):
    case = dataclasses.replace(CASES[name], heads=2, width=3)
    arrays = made(case, whole_numbers=True)
    chosen, pool = choose(arrays.indexer, arrays.pool, arrays.batch, case=case)
    pairs = zip(positions_of(chosen, arrays.batch, case), expected_choice(case, arrays, pool), strict=True)
    found = [pair for of_heads in pairs for pair in zip(*of_heads, strict=True)]
    ties = [got == expected for got, (expected, gap) in found if got and gap == 0]
    assert len(ties) > 20 and all(ties)


def test_every_key_is_chosen_where_no_row_can_have_more():
    case = CASES["covered"]
    arrays = made(case)
    chosen, pool = choose(arrays.indexer, arrays.pool, arrays.batch, case=case)
    assert chosen is None
    table, offsets = arrays.batch.block_tables[0], 40
    kept = np.asarray(pool.index_keys)[table[offsets // 8], offsets % 8, 0]
    np.testing.assert_array_equal(kept, arrays.indexer[2][0])


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES])
def test_attention_reads_the_chosen_keys_and_nothing_else(name):
    case = CASES[name]
    arrays = made(case)
    chosen, pool = choose(arrays.indexer, arrays.pool, arrays.batch, case=case)
    got = np.asarray(attended(arrays.attention, pool, arrays.batch, chosen, case=case))
    _, written = jax.jit(paged_attention, static_argnames="scale")(
        *arrays.attention, pool, schedules_of(arrays.batch, case)[0], scale=0.3
    )
    k, v = _kept(written)
    chosen_positions = expected_choice(case, arrays, pool)
    schedule, _ = schedules_of(arrays.batch, case)
    C, token = case.block_size, 0
    ours = positions_of(chosen, arrays.batch, case) if chosen is not None else [[[]]] * len(chosen_positions)
    for table, (start, count) in zip(arrays.batch.block_tables, case.rows, strict=False):
        for position in range(start, start + count):
            all_seen = not any(ours[token]) and not (schedule.invariant and chosen is not None)
            of_heads = [np.arange(position + 1)] if all_seen else map(np.array, ours[token])
            where = [(table[at // C], at % C) for at in of_heads]
            expected = _attend_to(arrays.attention[0][token], k, v, where)
            np.testing.assert_allclose(got[token], expected, rtol=2e-5, atol=2e-5, err_msg=f"position {position}")
            token += 1
    assert not np.isnan(got[token:]).any()


def _kept(pool: KVPool) -> tuple[np.ndarray, np.ndarray]:
    """K and V, [P, C, K, H or V] float64, as the pool keeps them."""
    values = np.asarray(pool.values)
    values = values.view(pool.bits_of) if pool.bits_of is not None else values
    values = values.astype(np.float64)
    if pool.is_latent:
        return values, values[..., : pool.head_dim]
    if pool.is_packed:
        return values[..., : pool.head_dim], values[..., pool.head_dim :]
    if pool.scales is not None:
        values = values * np.asarray(pool.scales).transpose(0, 2, 1)[..., None]
    return values[:, :, 0::2], values[:, :, 1::2]


def _attend_to(q: np.ndarray, k: np.ndarray, v: np.ndarray, where: list[Any]) -> np.ndarray:
    """[N, V] of one query, whose KV heads read K and V [P, C, K, H or V] at one place, or each at its own."""
    if len(where) == 1:
        return _attend(q, k[where[0]], v[where[0]])
    parts = np.split(q, len(where))
    each = [_attend(part, k[at][:, [i]], v[at][:, [i]]) for i, (part, at) in enumerate(zip(parts, where, strict=True))]
    return np.concatenate(each)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[N, V] of one query, over keys [S, K, H]."""
    copies = len(q) // k.shape[1]
    k, v = (np.repeat(x, copies, axis=1) for x in (k, v))
    logits = np.einsum("nh,snh->ns", q.astype(np.float64), k) * 0.3
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.einsum("ns,snv->nv", weights / weights.sum(axis=1, keepdims=True), v)


@pytest.mark.parametrize("name", ["invariant", "groups_and_unlike_sizes"])
def test_a_choice_does_not_depend_on_how_a_row_is_cut_into_steps(name):
    case = CASES[name]
    arrays = made(dataclasses.replace(case, rows=((3, 100),)))
    one, _ = choose(arrays.indexer, arrays.pool, arrays.batch, case=case)
    pool, parts = arrays.pool, []
    for start, count in ((3, 33), (36, 1), (37, 66)):
        step = tuple(None if x is None else np.roll(x, 3 - start, axis=0) for x in arrays.indexer)
        batch = dataclasses.replace(
            arrays.batch, starts=np.array([start, 0], np.int32), counts=np.array([count, 0], np.int32)
        )
        batch = dataclasses.replace(batch, query_offsets=np.array([0, count], np.int32))
        chosen, pool = choose(step, pool, batch, case=case)
        parts.append(np.asarray(chosen.places)[:count])
    np.testing.assert_array_equal(np.concatenate(parts), np.asarray(one.places)[:100])


def test_an_indexer_needs_a_schedule_where_rows_may_have_more_keys():
    arrays = made(CASES["mixed"])
    with pytest.raises(ValueError, match="contexts may be longer than 16 keys"):
        make_indexer_schedule(arrays.batch, num_tokens=128, block_size=8, top_k=16, attention=None)


def test_groups_that_do_not_fit_into_the_chosen_are_refused():
    arrays, sizes = made(CASES["mixed"]), {"num_tokens": 128, "block_size": 8, "attention": None}
    for how in ({"group": 5}, {"group": 8, "local": 3}):
        with pytest.raises(ValueError, match="top_k is 16; it must be a multiple of group"):
            make_indexer_schedule(arrays.batch, **sizes, top_k=16, **how)


def test_keys_of_other_heads_than_the_pool_s_are_refused():
    case = CASES["groups_of_heads"]
    arrays = made(case)
    chosen = ChosenKeys(places=jnp.zeros((128, 3, 128), jnp.int32), top_k=32)
    with pytest.raises(ValueError, match="3 heads have keys of their own; it must be 1 or each of 2"):
        attended(arrays.attention, arrays.pool, arrays.batch, chosen, case=case)


def test_a_pool_without_an_indexer_s_keys_is_refused():
    arrays = made(CASES["mixed"])
    pool = dataclasses.replace(arrays.pool, index_keys=None)
    with pytest.raises(ValueError, match="its index_dim is 0"):
        choose_keys(*arrays.indexer, pool, schedules_of(arrays.batch, CASES["mixed"])[1])
