"""Bytes of a file as faults and strangers change them."""

import numpy as np


def flipped(content: bytes, random: np.random.Generator, header: int) -> bytes:
    """With up to 8 bits flipped, half of them in the first `header` bytes."""
    changed = bytearray(content)
    for _ in range(int(random.integers(1, 9))):
        place = int(random.integers(min(header, len(changed)) if random.integers(2) else len(changed)))
        changed[place] ^= 1 << int(random.integers(8))
    return bytes(changed)


def spliced(content: bytes, random: np.random.Generator) -> bytes:
    """With a piece taken out, doubled, or filled with one byte."""
    start, end = sorted(int(n) for n in random.integers(0, len(content), 2))
    middle = (b"", content[start:end] * 2, bytes([int(random.integers(256))]) * (end - start))
    return content[:start] + middle[int(random.integers(3))] + content[end:]
