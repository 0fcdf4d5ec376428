"""Gumbel noise that depends on a row's seed, choice and position alone, written so that it fuses.

The bits are those of `jax.random.bits(fold_in(fold_in(key(seed), choice), position), (V,))` with partitionable
threefry. They are computed here because jax rolls threefry into a loop on the CPU, which writes every round to
memory: four times slower, and it cannot fuse with the draw.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.runtime.sampling.record_words import CHOICE, SEED_HIGH, SEED_LOW

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def gumbel(words: jax.Array, positions: jax.Array, vocabulary: int) -> jax.Array:
    """[R, V] f32 standard Gumbel noise. words: [R, NUM_PARAMETERS] int32; positions: [R] int32."""
    low = row_bits(words, positions, vocabulary).astype(jnp.float32)
    # Small values of `uniform` are the large noise, and there 32 bits keep their full relative precision.
    uniform = jnp.minimum((low + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def row_bits(words: jax.Array, positions: jax.Array, vocabulary: int) -> jax.Array:
    """[R, V] uint32 random bits of each row."""
    key = (_unsigned(words[:, SEED_HIGH, None]), _unsigned(words[:, SEED_LOW, None]))
    for folded in (words[:, CHOICE, None], positions[:, None]):
        key = _threefry(key, (jnp.zeros(folded.shape, jnp.uint32), _unsigned(folded)))
    place = lax.broadcasted_iota(jnp.uint32, (1, vocabulary), 1)
    high, low = _threefry((_once(key[0]), _once(key[1])), (jnp.zeros_like(place), place))
    return high ^ low


def _once(word: jax.Array) -> jax.Array:
    """The word [R, 1] as a sum: XLA would compute anything cheaper again for each of the V elements that read it."""
    return jnp.sum(jnp.where(jnp.arange(2)[None, :] == 0, word, jnp.uint32(0)), axis=1, keepdims=True)


def _threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of 20 rounds: the counter's two words encrypted with the key's.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
    """
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _unsigned(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.uint32)
