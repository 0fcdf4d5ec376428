"""The characters by which byte-level vocabularies spell bytes."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, and the byte.

    Source: Radford et al. 2019 (GPT-2), `bytes_to_unicode` of the released encoder: printable Latin-1 stands
    for itself, the other bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_alphabet()
