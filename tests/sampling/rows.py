"""Rows for the sampling tests: a request's parameters and tokens, and the pool that holds them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.runtime.sampling import ALL, RECORD_WORDS, Sampled, TokenLogprobs, sample, slot_record, unpack
from ferrum_jax.sampling_params import SamplingParams

MAX_LEN = 300
ROWS = 256  # one bucket for all tests, so that one executable serves them
V = 97
GREEDY = SamplingParams(temperature=0.0)


def null_slots(max_num_seqs: int, max_model_len: int) -> jax.Array:
    """A pool of max_num_seqs records and the null record 0."""
    return jnp.zeros((max_num_seqs + 1, RECORD_WORDS + max_model_len), jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    sampling: SamplingParams = GREEDY
    prompt: tuple[int, ...] = (1, 2, 3)
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0
    active: bool = True

    def record(self) -> np.ndarray:
        return slot_record(
            self.sampling,
            seed=self.seed,
            choice=self.choice,
            num_prompt_tokens=len(self.prompt),
            stop_ids=self.stop_ids,
            token_ids=self.prompt + self.output,
            max_model_len=MAX_LEN,
        )

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


compiled_step = jax.jit(sample)


def step(logits, slots, row_slots, positions, active, mask_ids=None, masks=None) -> Sampled:
    """One executable for all tests of a shape: rows without masks have those that allow everything."""
    if mask_ids is None:
        mask_ids, masks = np.zeros(len(logits), np.int32), np.full((3, -(-logits.shape[1] // 32)), ALL, np.int32)
    return compiled_step(logits, slots, row_slots, positions, active, mask_ids, masks)


def pool_of(rows: list[Row], slot_ids: list[int], max_seqs: int = ROWS) -> jax.Array:
    """The pool in which row i has slot slot_ids[i]."""
    pool = np.zeros((max_seqs + 1, RECORD_WORDS + MAX_LEN), np.int32)
    for slot, row in zip(slot_ids, rows, strict=True):
        pool[slot] = row.record()
    return jnp.asarray(pool)


def run(
    rows: list[Row],
    logits: np.ndarray,
    slot_ids: list[int] | None = None,
    bucket: int = ROWS,
    max_seqs: int = ROWS,
) -> tuple[np.ndarray, TokenLogprobs]:
    """Samples each row once, row i with logits[i], padded to `bucket` rows; token ids and what the host reads."""
    slot_ids = slot_ids or list(range(1, len(rows) + 1))
    padding = bucket - len(rows)
    sampled = step(
        np.pad(logits, ((0, padding), (0, 0))),
        pool_of(rows, slot_ids, max_seqs),
        np.array([*slot_ids, *[0] * padding], np.int32),
        np.array([*(row.position for row in rows), *[0] * padding], np.int32),
        np.array([*(row.active for row in rows), *[False] * padding]),
    )
    return np.asarray(sampled.token_ids)[: len(rows)], unpack(np.asarray(sampled.result)[: len(rows)])


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 3).astype(np.float32)
