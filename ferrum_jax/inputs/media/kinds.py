"""Kinds of media, as errors and URLs name them, and how long work on one is cancelled."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

Look = Callable[[], None]  # called between steps of long work; what it raises ends that


def do_not_look() -> None:
    """Nobody can leave."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaKind:
    """noun: of one in errors. type: of media in headers, before the slash. example: of what stands behind it.
    smaller: what to do with one that is too large."""

    noun: str
    type: str
    example: str
    smaller: str = "make it smaller"


IMAGE = MediaKind(noun="image", type="image", example="png")
SOUND = MediaKind(noun="sound", type="audio", example="wav", smaller="cut it shorter, or save it compressed")
VIDEO = MediaKind(noun="video", type="video", example="mp4", smaller="cut it shorter, or save it smaller")


class MediaRefused(ValueError):
    """An error about a medium whose file may be sound, in words that stand alone."""


@contextlib.contextmanager
def naming(noun: str, number: int) -> Iterator[None]:
    """Raises ValueError with the noun and number of a medium of a prompt before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{noun} {number}: {error}") from error


def media_digest(values: np.ndarray, settings: Mapping[str, Any]) -> bytes:
    """The digest of decoded pixels or samples and of what processes them: equal media have equal digests."""
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=32)
    digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
