"""One row of a case, without its companions."""

import dataclasses

import numpy as np

from pallas_kernels.paged_attention import RaggedBatch
from pallas_kernels.paged_attention.cases import Arguments, Case


def alone_of(case: Case, a: Arguments, r: int) -> tuple[Case, Arguments]:
    """Row r of a step that decodes, in the same pool."""
    batch = RaggedBatch(
        block_tables=a.batch.block_tables[r : r + 1],
        starts=a.batch.starts[r : r + 1],
        counts=a.batch.counts[r : r + 1],
        query_offsets=np.zeros(1, np.int32),
    )
    one = dataclasses.replace(a, q=a.q[r : r + 1], k=a.k[r : r + 1], v=a.v[r : r + 1], batch=batch)
    return dataclasses.replace(case, rows=(case.rows[r],), num_tokens=1, num_rows=1), one
