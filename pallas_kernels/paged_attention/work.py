"""What a case of paged attention asks for, whatever computes it: the numbers that times are set against."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.paged_attention.cases import Case, make_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a case asks for, whatever the kernel."""

    kv_tokens: int  # that a row or, in prefill, a row's chunk must read
    flops: int  # of visible query-key pairs
    kv_bytes: int  # of these tokens in the pool, as the kernels keep them

    @classmethod
    def of(cls, case: Case, implementation: str = "mosaic_tpu") -> Work:
        """Counted from the rows."""
        pool = make_shapes(case, implementation).pool
        per_token = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pool)) // pool.values.shape[0]
        tokens = pairs = 0
        for start, count in case.rows:
            last = start + count
            oldest = 0 if case.window is None else max(0, start - case.window + 1)
            tokens += last - oldest
            for position in range(start, last):
                behind = position + 1 if case.window is None else min(position + 1, case.window)
                pairs += behind if case.causal else last
        return cls(
            kv_tokens=tokens,
            flops=4 * pairs * case.num_heads * case.head_dim,
            kv_bytes=tokens * per_token // case.block_size,
        )
