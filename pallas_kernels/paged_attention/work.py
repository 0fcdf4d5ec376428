"""The work of a case of paged attention, whatever computes it: the numbers that times are set against."""

from __future__ import annotations

import dataclasses

from pallas_kernels.paged_attention.cases import Case, make_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a case, whatever the kernel."""

    kv_tokens: int  # that a row or, in prefill, a row's chunk must read
    flops: int  # of visible query-key pairs, but for those that spans add
    kv_bytes: int  # of these tokens in the pool, as the kernels keep them

    @classmethod
    def of(cls, case: Case, implementation: str = "mosaic_tpu") -> Work:
        """Counted from the rows."""
        pool = make_shapes(case, implementation).pool
        lanes = pool.values.shape[3]
        on_tpu = -(-lanes // 128) * 128 if implementation == "mosaic_tpu" else lanes  # a TPU's tiles have 128
        values = pool.values.size // lanes * on_tpu * pool.values.dtype.itemsize
        per_token = (values + (0 if pool.scales is None else pool.scales.size * 4)) // pool.values.shape[0]
        tokens = pairs = 0
        for start, count in case.rows:
            last = start + count
            tokens += last - case.oldest(start)
            pairs += sum((p + 1 if case.causal else last) - case.oldest(p) for p in range(start, last))
        return cls(
            kv_tokens=tokens,
            flops=2 * pairs * case.num_heads * (case.key_dim + case.value_dim),
            kv_bytes=tokens * per_token // case.block_size,
        )
