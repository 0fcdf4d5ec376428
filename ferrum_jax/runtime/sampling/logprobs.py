"""Log-probabilities of chosen and of prompt tokens, packed so that the host fetches one int32 array.

A result is RESULT_WORDS words: token id or NOT_FINITE, bits of its logprob, its rank, the ids of the MAX_LOGPROBS most
likely tokens and the bits of their logprobs. All are of the model's own logits (log_softmax, float32).
Words that nobody in the step asked for are 0. A token of a prompt has SCORE_WORDS, a result and then the bits of the
logprobs of MAX_NAMED_IDS tokens that a request names.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ferrum_jax.core.outputs import NOT_FINITE, Logprob
from ferrum_jax.sampling_params import MAX_LOGPROBS, MAX_NAMED_IDS

RESULT_WORDS = 3 + 2 * MAX_LOGPROBS
SCORE_WORDS = RESULT_WORDS + MAX_NAMED_IDS


class ByRow(Protocol):
    """A function of each row's logits: `compute(logits [m, V] f32, *rows [m])` gives [m, words].

    Rows may be divided among devices, so `compute` sees some of them and must treat each by itself.
    """

    def __call__(
        self,
        hidden: jax.Array,  # [n, D]
        compute: Callable[..., jax.Array],
        *rows: jax.Array,  # [n] each, the first their slots
    ) -> jax.Array: ...  # [n, words]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """A result array as the host reads it; every field is a view."""

    token_ids: np.ndarray  # [R] int32; NOT_FINITE where the logits are not, and then nothing else is of use
    logprobs: np.ndarray  # [R] f32
    ranks: np.ndarray  # [R] int32, 1 is the most likely; 0 where nobody asked
    top_ids: np.ndarray  # [R, MAX_LOGPROBS] int32, most likely first, the lowest id first among equals
    top_logprobs: np.ndarray  # [R, MAX_LOGPROBS] f32, -inf beyond the vocabulary

    def row(self, row: int, num_logprobs: int) -> dict[int, Logprob]:
        """Token id to Logprob: the chosen token, then the `num_logprobs` most likely ones."""
        chosen = Logprob(logprob=float(self.logprobs[row]), rank=int(self.ranks[row]))
        entries = {int(self.token_ids[row]): chosen}
        for place in range(num_logprobs):
            value = float(self.top_logprobs[row, place])
            if value == -np.inf:
                break
            entries.setdefault(int(self.top_ids[row, place]), Logprob(logprob=value, rank=place + 1))
        return entries


def unpack(result: np.ndarray) -> TokenLogprobs:
    """The fields of a result array [R, RESULT_WORDS or more] int32."""
    ids, values = result[:, 3 : 3 + MAX_LOGPROBS], result[:, 3 + MAX_LOGPROBS : RESULT_WORDS]
    return TokenLogprobs(
        token_ids=result[:, 0],
        logprobs=result.view(np.float32)[:, 1],
        ranks=result[:, 2],
        top_ids=ids,
        top_logprobs=values.view(np.float32),
    )


def finite_or_marked(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """token_ids [R]; NOT_FINITE where the row of logits [R, V], the model's own, holds NaN or infinity."""
    return jnp.where(jnp.all(jnp.isfinite(logits), axis=1), token_ids, NOT_FINITE)


def row_results(
    make_logits: Callable[[], jax.Array], token_ids: jax.Array, *, wanted: jax.Array, tops_wanted: jax.Array
) -> jax.Array:
    """[R, RESULT_WORDS] int32 of logits [R, V] f32 and tokens [R]; wanted and tops_wanted: bool scalars."""

    def chosen() -> jax.Array:
        logits = make_logits()
        normaliser = jax.nn.logsumexp(logits, axis=1)
        head = _chosen(logits, token_ids, normaliser)
        tops = lax.cond(
            tops_wanted, lambda: _tops(logits, normaliser), lambda: jnp.zeros((rows, 2 * MAX_LOGPROBS), jnp.int32)
        )
        return jnp.concatenate([head, tops], axis=1)

    def bare() -> jax.Array:
        return jnp.pad(token_ids[:, None], ((0, 0), (0, RESULT_WORDS - 1)))

    rows = len(token_ids)
    return lax.cond(wanted, chosen, bare)


def drawn_results(logits: jax.Array, token_ids: jax.Array, *, wanted: jax.Array) -> jax.Array:
    """`row_results` without the most likely tokens, of the rows [R] that are wanted, in no branch."""
    head = _chosen(logits, token_ids, jax.nn.logsumexp(logits, axis=1))
    of_token = jnp.where(wanted[:, None] | (jnp.arange(3) == 0)[None, :], head, 0)
    return jnp.pad(of_token, ((0, 0), (0, RESULT_WORDS - 3)))


def _chosen(logits: jax.Array, token_ids: jax.Array, normaliser: jax.Array) -> jax.Array:
    """[R, 3] int32: tokens, the bits of their logprobs and their ranks."""
    value = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    rank = 1 + jnp.sum(logits > value, axis=1, dtype=jnp.int32)
    return jnp.stack([token_ids, _bits(value[:, 0] - normaliser), rank], axis=1)


def named_results(logits: jax.Array, named: jax.Array, *, wanted: jax.Array) -> jax.Array:
    """[R, K] int32 of logits [R, V] f32: the bits of the log-probabilities of tokens [R, K]; wanted: a bool scalar."""

    def found() -> jax.Array:
        return _bits(jnp.take_along_axis(logits, named, axis=1) - jax.nn.logsumexp(logits, axis=1, keepdims=True))

    return lax.cond(wanted, found, lambda: jnp.zeros(named.shape, jnp.int32))


def all_results(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """[R, 1 + V] int32 of logits [R, V] f32: the token, and the bits of every log-probability."""
    values = logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)
    return jnp.concatenate([token_ids[:, None], _bits(values)], axis=1)


def _tops(logits: jax.Array, normaliser: jax.Array) -> jax.Array:
    """[R, 2 * MAX_LOGPROBS] int32: ids and logprob bits of the most likely tokens."""
    count = min(MAX_LOGPROBS, logits.shape[1])
    values, ids = lax.top_k(logits, count)
    room = ((0, 0), (0, MAX_LOGPROBS - count))
    values = jnp.pad(values - normaliser[:, None], room, constant_values=-jnp.inf)
    return jnp.concatenate([jnp.pad(ids.astype(jnp.int32), room), _bits(values)], axis=1)


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)
