"""Kinds of media: what errors call one, and how its URLs are written."""

from __future__ import annotations

import dataclasses


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
