"""A head that a checkpoint has beside its embedding, of a model whose config.json says that both are one matrix.

It is left over where it is a copy. Where it is not, config.json does not describe these weights: the reference takes
the head, and a model without it would give other logits and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from checkpoints.fingerprint import sample
from checkpoints.rules import HEAD, StoredTensor

_EMBEDDING = "embed.weight"
_CHUNK_BYTES = 1 << 26


def check_copies_of_head(
    tensors: Mapping[str, Any], harmless: Iterable[str], plan: Mapping[str, Sequence[StoredTensor]]
) -> None:
    """Raises ValueError where a head that may be left over differs from the embedding of the plan.

    What is not in this machine's memory or files is compared in the samples that a fingerprint takes.
    """
    for name in harmless:
        if name.endswith(HEAD) and name in tensors and _EMBEDDING in plan:
            (source,) = plan[_EMBEDDING]
            if not _are_equal(tensors[name], source.of(tensors)):
                raise ValueError(
                    f"{name} differs from {source}, and config.json says in tie_word_embeddings that both are one: set "
                    f"it to false if the head is to be used, or remove {name} from the checkpoint"
                )


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if tuple(one.shape) != tuple(other.shape):
        return False
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return one.dtype != other.dtype or np.array_equal(sample(one), sample(other), equal_nan=True)
    rows = max(1, _CHUNK_BYTES // max(1, one[:1].nbytes))
    wide = np.float32 if one.dtype != other.dtype else one.dtype
    return all(
        np.array_equal(one[i : i + rows].astype(wide), other[i : i + rows].astype(wide), equal_nan=True)
        for i in range(0, len(one), rows)
    )
