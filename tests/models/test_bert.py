"""Encoders against the hidden states and vectors of the reference implementation, float32."""

import functools
import itertools
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints import open_checkpoint
from checkpoints.rules import expand
from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.models.families import registry
from ferrum_jax.models.layers.text_rows import TextRows, attend
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime import encoder_runtime
from ferrum_jax.runtime.compile.executable_store import ExecutableStore
from ferrum_jax.runtime.encoder_runner import EncoderRunner, VectorsInFlight, WholeText
from scripts.published import PUBLISHED_ENCODERS
from tests.fast_compile import FAST_COMPILE
from tests.support import COMPILED, GOLDENS

ENCODERS = GOLDENS / "encoders"
NAMES = sorted(path.parent.name for path in ENCODERS.glob("*/golden.npz"))


def one_device():
    return make_mesh(MeshShape(), jax.devices())


@functools.cache
def load(name: str, max_num_batched_tokens: int = 512):
    """(a runner of one golden folder, its golden arrays)."""
    checkpoint = open_checkpoint(ENCODERS / name)
    config = EngineConfig(max_model_len=64, max_num_seqs=32, max_num_batched_tokens=max_num_batched_tokens)
    layout = encoder_runtime.lay_out_encoder(registry.encoder_spec_of(checkpoint.config), config, one_device())
    weights = registry.weights_of(checkpoint.config)
    tensors = checkpoint.load(rules=weights.rules, harmless=weights.harmless, targets=layout.model.targets)
    store = ExecutableStore(str(COMPILED))
    executables = encoder_runtime.compile_encoder(layout, executable_cache=store)
    golden = dict(np.load(ENCODERS / name / "golden.npz"))
    return EncoderRunner(tuple(tensors.values()), executables), golden


def steps(runner: EncoderRunner, texts: list[np.ndarray], pooling: str = "mean") -> list[tuple[int, VectorsInFlight]]:
    """Tokens and texts of each step, texts of one length after another."""
    wholes = [WholeText(i, text, pooling, None) for i, text in enumerate(texts)]
    wholes.sort(key=lambda text: runner.length_of(len(text.token_ids)))
    found = []
    for _, same in itertools.groupby(wholes, lambda text: runner.length_of(len(text.token_ids))):
        left = list(same)
        while left:
            before = runner.num_padded_tokens
            step, left = runner.dispatch(left)
            found.append((runner.num_padded_tokens - before, step))
    return found


def vectors(runner: EncoderRunner, texts: list[np.ndarray], pooling: str) -> np.ndarray:
    found = {}
    for _, step in steps(runner, texts, pooling):
        found |= dict(zip([text.id for text in step.texts], step.fetch(), strict=True))
    return np.stack([found[i] for i in range(len(texts))])


@pytest.mark.parametrize("name", [n if n == "bert" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_vectors_of_every_pooling_are_the_reference_vectors(name: str):
    runner, golden = load(name)
    texts = [golden[f"prompt_{i}"] for i in range(7)]
    for pooling in encoder_runtime.POOLINGS:
        wanted = np.stack([golden[f"{pooling}_{i}"] for i in range(7)])
        np.testing.assert_allclose(vectors(runner, texts, pooling), wanted, rtol=1e-5, atol=1e-5)


def test_companions_padding_and_row_counts_change_no_bit_of_a_vector():
    runner, golden = load("bert")
    texts = [golden[f"prompt_{i}"] for i in range(7)]
    alone = np.concatenate([vectors(runner, [text], "mean") for text in texts])
    rng = np.random.default_rng(1)
    others = [rng.integers(5, 90, int(n)) for n in rng.integers(1, 65, 60)]
    together = vectors(runner, [*others[:30], *texts, *others[30:]], "mean")[30:37]
    np.testing.assert_array_equal(together, alone)


def test_a_step_takes_texts_of_one_length_until_its_tokens_are_full():
    runner, _ = load("bert")

    def sizes(lengths: list[int]) -> list[tuple[int, int]]:
        return [(n, len(step.texts)) for n, step in steps(runner, [np.full(length, 7) for length in lengths])]

    assert {(b.num_tokens, b.num_texts) for b in runner._executables if b.length == 32} == {(128, 6), (512, 24)}
    assert sizes([20]) == [(128, 1)]
    assert sizes([20] * 30) == [(512, 24), (128, 6)]  # no room for a 25th text
    assert sizes([32] * 17) == [(512, 16), (128, 1)]  # nor for a 513th token
    assert sizes([20] * 18) == [(128, 6)] * 3 and sizes([20] * 19) == [(512, 19)]
    assert [number for _, number in sizes([30] * 4 + [17] * 3)] == [4, 3]  # 8 tokens are left over


def test_texts_that_stand_end_to_end_are_spread_over_rows_and_joined_again():

    @jax.jit
    def there_and_back(lengths: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        rows = TextRows(lengths, length=4, num_tokens=10)
        return (spread := rows.spread(x)), rows.join(spread), rows.positions

    x = np.array([*range(8), np.nan, np.nan], np.float32)
    spread, joined, positions = there_and_back(np.array([3, 1, 0, 4], np.int32), x)
    assert spread.tolist() == [[0, 1, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0], [4, 5, 6, 7]]
    assert np.asarray(joined)[:8].tolist() == x[:8].tolist()
    assert np.asarray(positions)[:8].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_a_reach_hides_what_is_farther_away_on_both_sides():
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, 1, 1024, 1, 4)).astype(np.float32)
    run = jax.jit(functools.partial(attend, scale=0.5, reach=3), compiler_options=FAST_COMPILE)
    found = np.asarray(run(*arrays, np.array([900], np.int32)))[0, :, 0]
    wide = arrays.astype(np.float64)[:, 0, :, 0]
    for place in (0, 511, 512, 898):
        near = slice(max(place - 3, 0), min(place + 4, 900))
        weights = np.exp(wide[0][place] @ wide[1][near].T / 2)
        np.testing.assert_allclose(found[place], weights @ wide[2][near] / weights.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_ladder_of_other_row_counts_changes_no_bit_of_a_vector():
    _, golden = load("bert")
    texts = [golden[f"prompt_{i}"] for i in range(7)] * 3
    small, large = (vectors(load("bert", tokens)[0], texts, "mean") for tokens in (512, 256))
    np.testing.assert_array_equal(small, large)


def test_long_texts_attend_tile_by_tile_as_they_would_at_once():
    """The same queries in one tile and in two, and keys beyond a row's length count nothing."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, 2, 1024, 1, 4)).astype(np.float32)
    lengths = np.array([700, 1024], np.int32)
    found = np.asarray(jax.jit(functools.partial(attend, scale=0.5), compiler_options=FAST_COMPILE)(*arrays, lengths))
    for row, length in enumerate(lengths):
        wide = arrays.astype(np.float64)[:, row, :, 0]
        scores = wide[0] @ wide[1][:length].T / 2
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        wanted = weights @ wide[2][:length] / weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found[row, :, 0], wanted, rtol=1e-5, atol=1e-5)


def test_every_length_has_a_bucket_for_many_texts_and_one_for_few():
    buckets = encoder_runtime.encoder_buckets(300, 256, 2048)
    assert [(b.length, b.num_tokens, b.num_texts) for b in buckets] == [
        *((16, 128, 12), (16, 2048, 192), (32, 128, 6), (32, 2048, 96), (64, 128, 3), (64, 2048, 48)),
        *((128, 128, 1), (128, 2048, 24), (256, 256, 1), (256, 2048, 12), (304, 304, 1), (304, 2048, 10)),
    ]
    assert max(encoder_runtime.encoder_buckets(8190, 256, 2048)).length == 8192  # a multiple of the query tile
    assert all(b.num_tokens >= 128 for b in encoder_runtime.encoder_buckets(20, 1, 1))
    assert (
        min(b.num_texts for b in encoder_runtime.encoder_buckets(300, 1, 1, invariant=True)) == 2
    )  # one row attends by other dots


def test_what_an_encoder_does_not_use_or_understand_is_refused_by_name():
    config = read_json(ENCODERS / "bert" / "config.json")
    spec = registry.encoder_spec_of(config)
    wrong = EngineConfig(block_size=16, mesh="tp=3", max_model_len=100)
    with pytest.raises(ValueError, match=r"block_size is 16, which an encoder does not use.*is 100, mo") as refused:
        encoder_runtime.lay_out_encoder(spec, wrong, one_device())
    assert "mesh is 'tp=3': num_attention_heads, 4, is not a multiple of tp, 3, inter" in str(refused.value)
    assert str(refused.value).endswith("tp may be 1, 2, 4")


@pytest.mark.parametrize("name", PUBLISHED_ENCODERS)
def test_a_published_encoder_has_its_number_of_parameters_and_all_rules(name: str):
    config, count = PUBLISHED_ENCODERS[name]
    weights = registry.weights_of(config)
    assert sum(math.prod(x.shape) for x in weights.targets.values()) == count
    assert set(expand(weights.rules)) == set(weights.targets)


def test_there_are_two_goldens_of_each_family_of_encoders():
    found = [read_json(Path(ENCODERS, name, "config.json"))["model_type"] for name in NAMES]
    assert sorted(found) == [kind for kind in ("bert", "gemma3_text", "modernbert", "xlm-roberta") for _ in range(2)]
