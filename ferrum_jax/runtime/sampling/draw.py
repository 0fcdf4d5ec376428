"""The choice of each row's next token, inside the step; every parameter is data, nothing recompiles.

Order: tokens that a row's mask does not allow are minus infinity before all else. Log-probabilities are those of the
model's own logits, so masked. Then logit_bias, min_tokens (no stop ids), repetition, frequency and presence penalty, a
transcript's times, temperature, min-p, top-k, top-p of what these left (the order of vLLM), and the draw: the largest
of logit + Gumbel noise, whose key is fold(fold(seed, choice), position). So a draw depends on the row alone.
Temperature 0 takes the largest edited logit, the lowest id among equals. The three filters keep what is at or above a
threshold, equals together, and a threshold is found by bisection over float32's ordered integer image, exactly and
without sorting. What no row asks for stands behind `lax.cond` in `sample`; `drawn` is for rows that ask for little, and
has neither branches nor loops.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ferrum_jax.core.plan import Draw
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.runtime.sampling.edits import add_bias, forbids_stops, mask_stops, penalise, prefer_stamps
from ferrum_jax.runtime.sampling.logprobs import RESULT_WORDS, drawn_results, finite_or_marked, row_results
from ferrum_jax.runtime.sampling.masks import allow, only, packed
from ferrum_jax.runtime.sampling.noise import gumbel
from ferrum_jax.runtime.sampling.record_words import (
    ASKS_BIAS,
    ASKS_COUNTS,
    ASKS_LIKELIEST_FIRST,
    ASKS_LOGPROBS,
    ASKS_MIN_P,
    ASKS_NOISE,
    ASKS_PROCESSED,
    ASKS_REPETITION,
    ASKS_STAMPS,
    ASKS_TOP_K,
    ASKS_TOP_LOGPROBS,
    ASKS_TOP_P,
    FLAGS,
    MIN_P,
    NUM_PROMPT_TOKENS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from ferrum_jax.runtime.sampling.slots import as_float, read_parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """The tokens that a step drew. Rows that are not active hold zeros."""

    token_ids: jax.Array  # [R] int32; NOT_FINITE where the model's own logits hold NaN or infinity
    result: jax.Array  # [R, RESULT_WORDS] int32: token id, logprob, rank, top ids and logprobs; see `unpack`
    drawable: jax.Array | None = None  # [R, ceil(V / 32)] int32, where asked for: which tokens could have been drawn


def sample(
    logits: jax.Array,  # [R, V] f32, the model's own
    slots: jax.Array,  # [S, W + L] int32
    row_slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32, absolute position the new token will take
    active: jax.Array,  # [R] bool, rows that sample in this step
    mask_ids: jax.Array | None = None,  # [R] int32; None is 0 for all
    masks: jax.Array | None = None,  # [S, ceil(V / 32)] int32
    *,
    gives_masks: bool = False,
) -> Sampled:
    """The next token of each active row and, where asked for, its log-probabilities.

    gives_masks: what could have been drawn in its place too; of a row without noise that is its token alone.
    """
    words = read_parameters(slots, row_slots)
    flags = jnp.where(active, words[:, FLAGS], 0)
    settled = (flags & ASKS_LIKELIEST_FIRST != 0) & (positions == words[:, NUM_PROMPT_TOKENS])
    flags = jnp.where(settled, flags & ~(ASKS_NOISE | ASKS_TOP_K | ASKS_TOP_P | ASKS_MIN_P), flags)
    forbids = forbids_stops(words, flags, positions)
    masked = jnp.bool_(False) if mask_ids is None else jnp.any(mask_ids > 0)
    edits = _any(flags, ASKS_BIAS | ASKS_REPETITION | ASKS_COUNTS | ASKS_STAMPS) | jnp.any(forbids) | masked

    def own() -> jax.Array:
        if masks is None or mask_ids is None:
            return logits
        allowed = functools.partial(allow, logits, masks, mask_ids)
        return lax.cond(masked, allowed, lambda: logits)

    def choose() -> tuple[jax.Array, ...]:
        edited = functools.partial(_edited, slots=slots, row_slots=row_slots, flags=flags, positions=positions)
        x = lax.cond(edits, lambda: edited(own(), words=words, forbids=forbids), lambda: logits)
        # The scores leave a branch as an array: an argmax that fuses with their computation is slow on the CPU.
        scores = _cond(_any(flags, ASKS_NOISE), lambda x: _scores(x, words, flags, positions), x)
        return _largest(scores), *((packed(scores > -jnp.inf),) if gives_masks else ())

    def choose_largest() -> tuple[jax.Array, ...]:
        nothing = jnp.zeros((len(logits), ceil_div(logits.shape[1], 32)), jnp.int32)
        return _largest(logits), *((nothing,) if gives_masks else ())

    # One outer branch whose result is [R]: a greedy step passes no [R, V] array through a conditional.
    token_ids, *kept = lax.cond(edits | _any(flags, ASKS_NOISE), choose, choose_largest)
    token_ids = jnp.where(active, finite_or_marked(logits, token_ids), 0)
    result = row_results(
        own,
        token_ids,
        wanted=_any(flags, ASKS_LOGPROBS),
        tops_wanted=_any(flags, ASKS_LOGPROBS) & _any(flags, ASKS_TOP_LOGPROBS),
    )
    return Sampled(
        token_ids=token_ids,
        result=jnp.where(active[:, None], result, 0),
        drawable=jnp.where((flags & ASKS_NOISE != 0)[:, None], kept[0], only(token_ids, logits.shape[1]))
        if gives_masks
        else None,
    )


def drawn(
    logits: jax.Array,  # [R, V] f32, the model's own
    slots: jax.Array,  # [S, W + L] int32
    row_slots: jax.Array,  # [R] int32
    positions: jax.Array,  # [R] int32
    active: jax.Array,  # [R] bool
    *,
    draw: Draw,
) -> jax.Array:
    """The result of `sample` [R, RESULT_WORDS], bit for bit, of rows that ask for no more than `draw`; not FULL."""
    if draw == Draw.GREEDY:
        token_ids = jnp.where(active, finite_or_marked(logits, _largest(logits)), 0)
        return jnp.pad(token_ids[:, None], ((0, 0), (0, RESULT_WORDS - 1)))
    words = read_parameters(slots, row_slots)
    flags = jnp.where(active, words[:, FLAGS], 0)
    noisy, scaled = _scaled(logits, words, flags)
    noise = gumbel(words, positions, logits.shape[1])
    scores = jnp.where(noisy[:, None], scaled + noise, logits)
    token_ids = jnp.where(active, finite_or_marked(logits, _largest(scores)), 0)
    return drawn_results(logits, token_ids, wanted=active & _any(flags, ASKS_LOGPROBS))


def reported(
    logits: jax.Array,  # [n, V] f32, the model's own
    slots: jax.Array,  # [S, W + L] int32
    row_slots: jax.Array,  # [n] int32
    positions: jax.Array,  # [n] int32, that the scored token takes
) -> jax.Array:
    """Logits to report log-probabilities from: the model's own, or the drawn-from ones of rows that ask for them."""
    words = read_parameters(slots, row_slots)
    asks = words[:, FLAGS] & ASKS_PROCESSED != 0

    def processed() -> jax.Array:
        flags = jnp.where(asks, words[:, FLAGS], 0)
        forbids = forbids_stops(words, flags, positions)
        x = _edited(
            logits, slots=slots, row_slots=row_slots, words=words, flags=flags, positions=positions, forbids=forbids
        )
        noisy, scaled, keeps = _kept(x, words, flags)
        return jnp.where(noisy[:, None], jnp.where(keeps, scaled, -jnp.inf), x)

    return lax.cond(jnp.any(asks), processed, lambda: logits)


def _edited(
    logits: jax.Array,
    *,
    slots: jax.Array,
    row_slots: jax.Array,
    words: jax.Array,
    flags: jax.Array,
    positions: jax.Array,
    forbids: jax.Array,
) -> jax.Array:
    """Logits after logit_bias, min_tokens, penalties and times, of the rows whose flags ask for them."""
    x = _cond(_any(flags, ASKS_BIAS), lambda x: add_bias(x, slots, row_slots, words, flags), logits)
    x = _cond(jnp.any(forbids), lambda x: mask_stops(x, slots, row_slots, words, forbids), x)
    penalties = _any(flags, ASKS_REPETITION | ASKS_COUNTS)
    x = _cond(penalties, lambda x: penalise(x, slots, row_slots, words, flags, positions), x)
    return _cond(_any(flags, ASKS_STAMPS), lambda x: prefer_stamps(x, words, flags), x)


def _largest(x: jax.Array) -> jax.Array:
    """The lowest index of each row's largest value: [R, V] f32 -> [R] int32; V where one is NaN.

    Two reductions, which vectorise on the CPU where an argmax does not; and what both read is not computed within them.
    """
    places = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x == jnp.max(x, axis=1, keepdims=True), places, x.shape[1]), axis=1)


def _scores(logits: jax.Array, words: jax.Array, flags: jax.Array, positions: jax.Array) -> jax.Array:
    """[R, V] float32; the largest is the draw: kept logits plus noise for rows with noise, else the logits."""
    noisy, scaled, keeps = _kept(logits, words, flags)
    noise = gumbel(words, positions, logits.shape[1])
    return jnp.where(noisy[:, None], jnp.where(keeps, scaled + noise, -jnp.inf), logits)


def _kept(logits: jax.Array, words: jax.Array, flags: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[R] rows with noise; [R, V] their logits over their temperature, and whether a token may be drawn."""
    noisy, scaled = _scaled(logits, words, flags)
    image = _ordered(scaled)
    return noisy, scaled, image >= _thresholds(scaled, image, words, flags)[:, None]


def _scaled(logits: jax.Array, words: jax.Array, flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R] rows with noise; [R, V] their logits less the largest, over their temperature."""
    noisy = flags & ASKS_NOISE != 0
    temperature = jnp.where(noisy, as_float(words[:, TEMPERATURE]), 1.0)
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    return noisy, shifted / temperature[:, None]


def _thresholds(scaled: jax.Array, image: jax.Array, words: jax.Array, flags: jax.Array) -> jax.Array:
    """[R] uint32: the lowest image that a row keeps; 0 keeps all. scaled: [R, V] with largest value 0."""

    def top_k() -> jax.Array:
        count = words[:, TOP_K]
        found = _search(lambda t: jnp.sum(image >= t[:, None], axis=1, dtype=jnp.int32) >= count, count.shape)
        return jnp.where(flags & ASKS_TOP_K != 0, found, zeros)

    def top_p(lowest: jax.Array) -> jax.Array:
        weights = jnp.where(image >= lowest[:, None], jnp.exp(scaled), 0.0)
        mass = as_float(words[:, TOP_P]) * jnp.sum(weights, axis=1)
        found = _search(
            lambda t: jnp.sum(jnp.where(image >= t[:, None], weights, 0.0), axis=1) >= mass,
            lowest.shape,
        )
        return jnp.where(flags & ASKS_TOP_P != 0, jnp.maximum(found, lowest), lowest)

    zeros = jnp.zeros(words.shape[0], jnp.uint32)
    min_p = _ordered(jnp.log(as_float(words[:, MIN_P])))  # the largest scaled logit is 0
    lowest = jnp.where(flags & ASKS_MIN_P != 0, min_p, zeros)
    lowest = lax.cond(_any(flags, ASKS_TOP_K), lambda: jnp.maximum(lowest, top_k()), lambda: lowest)
    return lax.cond(_any(flags, ASKS_TOP_P), lambda: top_p(lowest), lambda: lowest)


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 images of float32 in the same order (-0.0 just below 0.0)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _search(holds, shape: tuple[int, ...]) -> jax.Array:
    """The largest t, per row, for which `holds(t)` ([R] uint32 -> [R] bool); it holds up to there, then not."""

    def step(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | jnp.uint32(1 << 31) >> i.astype(jnp.uint32)
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, 32, step, jnp.zeros(shape, jnp.uint32))


def _any(flags: jax.Array, bits: int) -> jax.Array:
    return jnp.any(flags & bits != 0)


def _cond(asked: jax.Array, edit, x: jax.Array) -> jax.Array:
    return lax.cond(asked, edit, lambda x: x, x)
