"""Each operation on a step's tokens gives a token the same bits in a step of any size from 64 to 2,048 tokens.

What stands in tiles of one size is not here: attention, logits and what is made of them. Widths, heads and experts are
those of published models and of the goldens. Steps have multiples of 64 tokens, for `make_ladder` rounds up to them.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ferrum_jax.inputs.sizes.invariance import COMPILER_OPTIONS, EXPERT_TILE, MIN_ROWS
from ferrum_jax.models.families import registry
from ferrum_jax.models.layers import text_rows
from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.linear import project
from ferrum_jax.models.layers.mlp import ACTIVATIONS, Gated
from ferrum_jax.models.layers.moe import MoE
from ferrum_jax.models.layers.norm import LayerNorm, RMSNorm
from ferrum_jax.models.layers.recurrent.gated_delta import unit_heads
from ferrum_jax.models.layers.rope import rotate, rotations
from ferrum_jax.models.spec import RopeSpec
from tests.support import GOLDENS

MOST = 2048
WIDTHS = (16, 32, 44, 48, 60, 64, 96, 128, 384, 768, 896, 1024, 1536, 2048, 2560, 2880, 3072, 4096)
HEADS = ((1, 256), (2, 16), (2, 128), (4, 16), (4, 128), (8, 64), (8, 128), (16, 64), (16, 128), (32, 128), (64, 128))
EXPERTS = ((4, 2), (8, 2), (8, 8), (16, 4), (32, 4), (44, 6), (60, 4), (64, 8), (128, 4), (128, 8), (512, 10))
DOTS = (
    *((k, n) for k in (8, 16, 32, 44, 64, 96, 128, 256, 512) for n in (1, 2, 8, 32, 44, 64, 128, 200)),
    *((768, 768), (768, 256), (1024, 1), (1024, 32), (1024, 128), (1024, 3072), (2048, 512), (2880, 32), (3072, 1024)),
)
# Heads of a device, what each is given, and what it gives; narrow ones, of 17 to 32 values, are other sums in 2,048.
LATENTS = ((4, 128, 512), (4, 512, 128), (2, 256, 128), (2, 192, 512), (2, 512, 256), (4, 128, 64))
Operation = Callable[[jax.Array], jax.Array]  # [T, ...] to [T, ...]
Case = tuple[Callable[[], Operation], tuple[int, ...]]  # how it is made, and the shape of what it is given of a token


@functools.cache
def _spec(name: str):
    return registry.spec_of(json.loads((GOLDENS / name / "config.json").read_text()))


def _moe(num: int, per_token: int, is_normed: bool) -> MoE:
    spec = _spec("qwen3_moe")
    experts = dataclasses.replace(
        spec.experts, num_experts=num, num_experts_per_tok=per_token, norm_topk_prob=is_normed
    )
    moe = MoE(spec.hidden_size, experts, spec.mlp, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))
    moe.router.weight[...] = moe.router.weight[...] * 50  # the weights of experts differ
    return moe


def _route(num: int, per_token: int, is_normed: bool) -> Operation:
    moe = _moe(num, per_token, is_normed)
    return lambda x: jnp.concatenate([part.astype(jnp.float32) for part in moe.route(x)], axis=1)


def _experts(num: int, per_token: int) -> Operation:
    moe = _moe(num, per_token, True)
    return lambda x: moe(x, LayerContext(expert_tile=EXPERT_TILE))


def _gate(name: str) -> Operation:
    return lambda x: Gated(ACTIVATIONS[name])(x[:, 0], x[:, 1])


def _unit_heads(x: jax.Array) -> jax.Array:
    heads = unit_heads(x, *_spec("qwen3_next").recurrence.state_shape)
    return jnp.concatenate([head.reshape(len(x), -1) for head in heads], axis=1)


def _turned(x: jax.Array) -> jax.Array:
    rope = RopeSpec(rope_theta=1e6)
    return rotate(x, *rotations(jnp.arange(len(x), dtype=jnp.int32) % MIN_ROWS, rope, x.shape[-1]))


def _project(num_in: int, num_out: int) -> Operation:
    weight = np.random.default_rng(1).standard_normal((num_out, num_in))
    return functools.partial(project, weight=jnp.asarray(weight, jnp.float32))


def _of_latents(num_heads: int, num_in: int, num_out: int) -> Operation:
    """What brings a head's query to the side of its latent, or a result from it."""
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((num_heads, num_out, num_in)), jnp.float32)
    return lambda x: jnp.einsum("tni,noi->tno", x, weight)


def _cases() -> dict[str, Case]:
    part, f32 = functools.partial, jnp.dtype(jnp.float32)
    cases: dict[str, Case] = {}
    for shape in (*((width,) for width in WIDTHS), *HEADS):
        cases[f"rms_norm{shape}"] = part(RMSNorm, shape[-1], eps=1e-6, dtype=f32), shape
        cases[f"zero_centred{shape}"] = part(RMSNorm, shape[-1], eps=1e-6, zero_centred=True, dtype=f32), shape
        if len(shape) == 1:
            cases[f"layer_norm{shape}"] = part(LayerNorm, shape[-1], eps=1e-12, dtype=f32), shape
        else:
            cases[f"rotation{shape}"] = lambda: _turned, shape
    width = _spec("qwen3_moe").hidden_size
    for num, per_token in EXPERTS:
        for is_normed in (True, False):
            cases[f"route {per_token} of {num} {is_normed}"] = part(_route, num, per_token, is_normed), (width,)
    cases |= {f"experts {x} of {e}": (part(_experts, e, x), (width,)) for e, x in ((4, 2), (8, 8), (60, 4))}
    cases |= {f"dot {num_in} {num_out}": (part(_project, num_in, num_out), (num_in,)) for num_in, num_out in DOTS}
    cases |= {name: (part(_gate, name), (2, 200)) for name in ACTIVATIONS}
    cases |= {f"latents {n} {i} {o}": (part(_of_latents, n, i, o), (n, i)) for n, i, o in LATENTS}
    cases["unit heads"] = lambda: _unit_heads, (_spec("qwen3_next").recurrence.conv_channels,)
    return cases


FAST = (
    "rms_norm(44,)",
    "rms_norm(8, 128)",
    "layer_norm(32,)",
    "route 8 of 8 True",
    "experts 8 of 8",
    "dot 44 8",
    "silu",
    "unit heads",
)


def _check(cases: Mapping[str, Case], sizes: tuple[int, ...]) -> None:
    """Every row of every size, against the row in the array of the fewest rows."""
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.standard_normal((MOST, *shape)).astype(np.float32) for name, (_, shape) in sorted(cases.items())
    }
    operations = {name: make() for name, (make, _) in cases.items()}
    run = jax.jit(lambda x: {name: operations[name](x[name]) for name in x}, compiler_options=COMPILER_OPTIONS)

    def some(first: int, count: int) -> dict[str, jax.Array]:
        return jax.device_get(run({name: x[first : first + count] for name, x in inputs.items()}))

    parts = [some(first, MIN_ROWS) for first in range(0, MOST, MIN_ROWS)]
    expected = {name: np.concatenate([part[name] for part in parts]) for name in cases}
    for size in sizes:
        found = some(0, size)
        differ = [name for name in cases if found[name].tobytes() != expected[name][:size].tobytes()]
        assert not differ, f"in a step of {size} tokens the bits differ from those in a step of 64: {differ}"


@pytest.mark.slow
def test_a_token_has_the_same_bits_in_steps_of_few_sizes():
    cases = _cases()
    _check({name: cases[name] for name in FAST}, (512, 2048))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rms", "zero", "layer", "rotation", "route", "experts", "dot", "latents", ""])
def test_a_token_has_the_same_bits_in_steps_of_all_sizes(kind):
    kinds = ("rms", "zero", "layer", "rotation", "route", "experts", "dot", "latents")
    found = {name: case for name, case in _cases().items() if next(filter(name.startswith, kinds), "") == kind}
    assert found
    _check(found, tuple(range(2 * MIN_ROWS, MOST + 1, MIN_ROWS)))


@pytest.mark.parametrize(
    ("length", "heads", "size"), [(512, 12, 32), pytest.param(256, 12, 64, marks=pytest.mark.slow)]
)
def test_texts_of_an_encoder_attend_alike_in_two_rows_and_in_more(length, heads, size):
    rng, most = np.random.default_rng(0), MOST // length
    heads_of = [jnp.asarray(rng.standard_normal((most, length, heads, size)), jnp.float32) for _ in range(3)]
    given = (*heads_of, jnp.asarray(rng.integers(1, length + 1, most), jnp.int32))
    attend = jax.jit(functools.partial(text_rows.attend, scale=size**-0.5), compiler_options=COMPILER_OPTIONS)
    expected = np.asarray(attend(*given))
    for first in range(0, most, 2):
        found = np.asarray(attend(*(x[first : first + 2] for x in given)))
        np.testing.assert_array_equal(found, expected[first : first + 2])
