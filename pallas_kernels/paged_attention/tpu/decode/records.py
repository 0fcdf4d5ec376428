"""Records: the scalars of a step of the TPU's decode kernels, which come from HBM while earlier steps are computed.

A record has what the kernel asks of a step's items. Records stand in HBM in chunks; scalar memory has a ring of them,
and a ring of the lines of block tables that items need:

    step t     is computed; the lines by which its blocks were found are still there, for its new tokens
    step t+2   its blocks are being fetched, by way of lines that have come
    step t+4   its lines are being fetched, by way of a record that has come
    later      the chunk after the next two is being fetched

Where scalar memory holds all records and tables they are resident: the launch begins with them and fetches none.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.table_lines import LINE, num_lines, row_lines

LOOK_BACK = 2  # idle steps before the first, which the kernel's later stages see
LOW_BITS = 14  # of an item's word that say its first visible token, for windows that are chunks
CHUNKS = 8  # in the ring, a power of two: of the step before to the third after the step's own, which is on its way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """Where a step's scalars are. items: of a step. blocks: of an item. ahead: steps whose blocks are on their way."""

    items: int
    blocks: int
    ahead: int
    is_resident: bool

    @property
    def words(self) -> int:
        """Words of a record, a power of two: one for the step, three for each item, or four with its lines' place."""
        return 1 << ((3 if self.is_resident else 4) * self.items).bit_length()

    @property
    def chunk_steps(self) -> int:
        """Records of a chunk, a power of two: no step sees further than the chunks beside its own."""
        seen = max(LOOK_BACK, 2 * self.ahead)
        return max(LINE // self.words, 1 << (seen - 1).bit_length())

    @property
    def chunk_words(self) -> int:
        return self.chunk_steps * self.words

    @property
    def slots(self) -> int:
        """Steps whose lines are in the ring, a power of two: from the step in work to the last whose lines come."""
        return 1 << (2 * self.ahead).bit_length()

    @property
    def buffers(self) -> int:
        """Semaphores of the ring, a power of two: of the steps that wait for what was started in one or before it."""
        return 1 << self.ahead.bit_length()

    @property
    def item_words(self) -> int:
        """Words of an item's lines."""
        return num_lines(self.blocks) * LINE

    @property
    def step_words(self) -> int:
        """Words of the lines of a step's items."""
        return self.items * self.item_words

    @property
    def first_line(self) -> int:
        """Where lines begin in the ring, behind the records."""
        return CHUNKS * self.chunk_words

    def all_words(self, num_steps: int, num_rows: int, max_blocks: int) -> int:
        """Words that scalar memory has at once."""
        if not self.is_resident:
            return self.first_line + self.slots * self.step_words
        return self.words * (LOOK_BACK + num_steps) + (num_rows * row_lines(max_blocks) + num_lines(self.blocks)) * LINE

    def in_chunks(self, records: jax.Array) -> jax.Array:
        """[steps, words] as whole chunks, [words]."""
        chunks = max(CHUNKS, -(-len(records) // self.chunk_steps) + 3)
        return jnp.pad(records, ((0, chunks * self.chunk_steps - len(records)), (0, 0))).reshape(-1)

    def ring(self, records: jax.Array, tables: jax.Array, lines: jax.Array) -> jax.Array:
        """The ring at the start of a launch: the first chunks, and lines of the steps fetched before the first.

        records: in chunks. lines: [ahead, items] int32, first line of each item in the tables.
        """
        at = lines.reshape(-1, 1) + jnp.arange(num_lines(self.blocks))[None]
        later = (self.slots - self.ahead) * self.step_words
        return jnp.concatenate([records[: self.first_line], tables[at].reshape(-1), jnp.zeros(later, jnp.int32)])
