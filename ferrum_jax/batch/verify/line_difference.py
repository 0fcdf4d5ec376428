"""Two lines of one row, the one that was written and the one of the answer given again, compared value by value."""

import base64
import binascii
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ferrum_jax.batch.journal.line_record import LINE, RECORD, REQUEST
from ferrum_jax.batch.verify.output_lines import Line

BITS, TEXT, TIE, DIFFERENT = "equal to the bit", "equal in text", "different at a near tie", "different"
_ALTERNATIVES = ("top_logprobs", "prompt_logprobs")
_FINGERPRINT = ("response", "body", "system_fingerprint")
_DIGEST = ("response", RECORD, LINE)
_TOKENS, _REQUEST = ("response", RECORD, "tokens"), ("response", RECORD, REQUEST)
_MISSING = object()

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueDifference:
    """A value that is not what it was. written, here: None where the other has no such value."""

    path: Path
    written: Any
    here: Any

    @property
    def where(self) -> str:
        """As in response.body.choices[0].text."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).removeprefix(".")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """How two lines compare. gap: between numbers that differ, at most; 0 where none do."""

    verdict: str
    differences: Sequence[ValueDifference] = ()
    gap: float = 0.0

    @property
    def is_of_text(self) -> bool:
        """Whether other tokens were generated."""
        return any(each.path == _TOKENS for each in self.differences)


def compare(written: Line, here: Line, *, bits: bool, margin: float, same_model: bool) -> Compared:
    """bits: whether equal ones are promised. margin: by which numbers may differ where they are not.

    same_model: the fingerprints are to be equal too.
    """
    every = list(_differences(written._asdict(), here._asdict(), ()))
    if any(each.path == _REQUEST and each.written is None for each in every):  # a line of an older version
        every = [each for each in every if each.path not in (_REQUEST, _DIGEST)]
    found = [each for each in every if each.path not in (_DIGEST, _FINGERPRINT)]  # the digest follows from the others
    if same_model:
        found += [each for each in every if each.path == _FINGERPRINT or (each.path == _DIGEST and not found)]
    if not found:
        return Compared(verdict=BITS)
    gaps = [_gap(each) for each in found]
    gap = max((each for each in gaps if each is not None), default=0.0)
    beyond = []
    for each, own in zip(found, gaps, strict=True):
        # the likeliest tokens of a place may be others where numbers differ a little
        is_rounding = any(name in each.path for name in _ALTERNATIVES) if own is None else gap <= margin
        if bits or not is_rounding:
            beyond.append(each)
    return Compared(verdict=DIFFERENT if beyond else TEXT, differences=beyond or found, gap=gap)


def _differences(written: Any, here: Any, path: Path) -> Iterator[ValueDifference]:
    if isinstance(written, dict) and isinstance(here, dict):
        for name in dict.fromkeys((*written, *here)):
            yield from _differences(written.get(name, _MISSING), here.get(name, _MISSING), (*path, name))
    elif isinstance(written, list) and isinstance(here, list):
        for place in range(max(len(written), len(here))):
            one, other = (each[place] if place < len(each) else _MISSING for each in (written, here))
            yield from _differences(one, other, (*path, place))
    elif type(written) is not type(here) or written != here:
        one, other = (None if each is _MISSING else each for each in (written, here))
        yield ValueDifference(path=path, written=one, here=other)


def _gap(difference: ValueDifference) -> float | None:
    """By how much two numbers differ, or two vectors at most; None where something else differs."""
    written, here = difference.written, difference.here
    if isinstance(written, float) and isinstance(here, float):
        return abs(written - here)
    if difference.path[-1] == "embedding" and isinstance(written, str) and isinstance(here, str):
        one, other = _vector(written), _vector(here)
        if one is not None and other is not None and one.shape == other.shape:
            gap = float(np.max(np.abs(one - other), initial=0.0))
            return gap if math.isfinite(gap) else None
    return None


def _vector(text: str) -> np.ndarray | None:  # [D] float32
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except (binascii.Error, ValueError):
        return None
