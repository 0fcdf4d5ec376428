"""Invariant mode: what gives a token the same bits in every bucket, on the CPU in float32.

Sums: XLA:CPU hands norms and softmaxes to a library, whose loops follow the size of the whole array. With
`COMPILER_OPTIONS` the library computes dots alone. XLA's own loops add a row's values in windows of 32, each in
order, then the windows' sums likewise, so the order follows from the row's width.
Dots: the library computes a row of a dot alike in all arrays of MIN_ROWS rows and more.
Tiles: those of attention, experts and logits have one size in all buckets.

tests/invariance/test_operations.py shows it for each operation at all sizes, test_bits.py for whole models.
"""

MIN_ROWS = 64  # tokens and rows of a bucket: below it dots of small widths take other loops
EXPERT_TILE = 16
COMPILER_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
