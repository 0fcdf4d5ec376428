"""The fingerprint of a model: what its weights are, whatever folder or format they came from.

It digests the spec's text, the dtype, and each tensor's name, shape and a sample of its bytes: 64 runs of
1 KB at fixed strides, or everything where the tensor has at most 64 KB. Runs, not single elements, so that
64 pages of a mapped file are read for a tensor, and a device array needs one small gather.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from checkpoints.remote import RemoteArray
from checkpoints.rules import HEAD, Expansion, StoredTensor

SAMPLE_BYTES = 65_536
_RUNS = 64
_EMBEDDING = "embed.weight"
_HEAD = "head.weight"  # the parameter of a model whose head is no copy
_CHUNK_BYTES = 1 << 26


class Fingerprint(NamedTuple):
    """A model's fingerprint, and the one that an earlier version gave it, which may be the same."""

    digest: bytes
    once: bytes


def fingerprint(spec_text: str, dtype: str, tensors: Mapping[str, jax.Array | np.ndarray]) -> str:
    """blake2b-128 (32 hex digits) of the spec, the dtype and the sampled tensors, in the order of their names."""
    return fingerprints((spec_text, spec_text), dtype, tensors).digest.hex()


def fingerprints(
    spec_texts: tuple[str, str],
    dtype: str,
    tensors: Mapping[str, jax.Array | np.ndarray],
    expansions: Mapping[str, Expansion] = MappingProxyType({}),
) -> Fingerprint:
    """The fingerprints with each text of the spec; tensors are sampled once.

    expansions: for tensors that are longer on a mesh than in the checkpoint; they are digested as stored.
    """
    digests = [hashlib.blake2b(digest_size=16) for _ in spec_texts]
    for digest, text in zip(digests, spec_texts, strict=True):
        _add(digest, text.encode())
        _add(digest, dtype.encode())
    for name in sorted(tensors):
        tensor, expansion = tensors[name], expansions.get(name)
        shape = tensor.shape if expansion is None else expansion.stored_shape(tensor.shape)
        content = sample(tensor, expansion).tobytes()
        for digest in digests:
            _add(digest, f"{name} {list(shape)}".encode())
            _add(digest, content)
    return Fingerprint(*(digest.digest() for digest in digests))


def sample(tensor: jax.Array | np.ndarray | RemoteArray, expansion: Expansion | None = None) -> np.ndarray:
    """[at most SAMPLE_BYTES / itemsize], in the tensor's dtype: its elements at the fixed strides, on the host."""
    if expansion is None and tensor.nbytes <= SAMPLE_BYTES and _everywhere(tensor) is None:
        return np.asarray(tensor).reshape(-1)
    shape = tensor.shape if expansion is None else expansion.stored_shape(tensor.shape)
    flat = _sample_indices(math.prod(shape), tensor.dtype.itemsize)
    if isinstance(tensor, RemoteArray):
        return tensor.take(flat)
    if expansion is None and (isinstance(tensor, np.ndarray) or _is_host_view(tensor)):
        return np.asarray(tensor).reshape(-1)[flat]
    # One index array for each axis: flattening a sharded array would gather all of it.
    where = [axis.astype(np.int32) for axis in np.unravel_index(flat, shape)]
    if expansion is not None:
        where[0] = expansion.places(where[0])
    return np.asarray(_gather_to(_everywhere(tensor))(tensor, tuple(where)))


@functools.lru_cache(maxsize=256)
def _sample_indices(size: int, itemsize: int) -> np.ndarray:
    if size * itemsize <= SAMPLE_BYTES:
        return np.arange(size)
    run = SAMPLE_BYTES // _RUNS // itemsize
    starts = [i * (size - run) // (_RUNS - 1) for i in range(_RUNS)]
    return (np.asarray(starts, np.int64)[:, None] + np.arange(run)).reshape(-1)


@functools.cache
def _gather_to(sharding: jax.sharding.Sharding | None) -> Any:
    return jax.jit(_gather, out_shardings=sharding)


def _everywhere(tensor: Any) -> jax.sharding.Sharding | None:
    """A sharding that every process can read; None where this process can read the whole tensor already."""
    if not isinstance(tensor, jax.Array) or tensor.is_fully_addressable:
        return None
    assert isinstance(tensor.sharding, jax.sharding.NamedSharding)
    return jax.sharding.NamedSharding(tensor.sharding.mesh, jax.sharding.PartitionSpec())


def _gather(tensor: jax.Array, where: tuple[jax.Array, ...]) -> jax.Array:
    """The elements, gathered as integers: a sharded gather is a sum over devices, which would turn -0.0 into 0.0."""
    bits = jax.lax.bitcast_convert_type(tensor, f"uint{8 * tensor.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(bits[where], tensor.dtype)


def _is_host_view(tensor: jax.Array) -> bool:
    return len(tensor.sharding.device_set) == 1 and next(iter(tensor.sharding.device_set)).platform == "cpu"


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def check_copies_of_head(
    tensors: Mapping[str, Any], harmless: Iterable[str], plan: Mapping[str, Sequence[StoredTensor]]
) -> None:
    """Raises ValueError where a head that may be left over differs from the embedding of the plan.

    The reference takes the head, and a model without it would give other logits and say
    nothing. What is not in this machine's memory or files is compared in the samples that a fingerprint takes.
    """
    for name in harmless:
        if name.endswith(HEAD) and name in tensors and _EMBEDDING in plan and _HEAD not in plan:
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
