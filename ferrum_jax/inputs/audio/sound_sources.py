"""The sounds that a user may give: arrays with their rate, and what `MediaSources` has for media of all kinds."""

import dataclasses
from pathlib import PurePosixPath
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np

from ferrum_jax.inputs.audio.sound_decoding import decoded_sound, said_length, waveform_of_array
from ferrum_jax.inputs.audio.waveform import Look, SaidLength, SoundBounds, do_not_look
from ferrum_jax.inputs.media.kinds import SOUND, MediaKind
from ferrum_jax.inputs.media.media_sources import MediaSources

_FETCHED = ("http:", "https:")
_SCHEMES = ("data:", *_FETCHED, "file:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundSources(MediaSources):
    """bounds: of each sound, before and while it is decoded."""

    kind: ClassVar[MediaKind] = SOUND
    max_bytes: int = 128 << 20
    bounds: SoundBounds = dataclasses.field(default_factory=SoundBounds)

    def waveform(self, given: Any, rate: int, look: Look = do_not_look) -> np.ndarray:
        """float32 [samples] at `rate`, of what a Python user gives. Raises ValueError saying what is wrong with it."""
        if is_array_with_rate(given):
            return waveform_of_array(given[0], given[1], rate, bounds=self.bounds, look=look)
        content = self.content(given)
        if content is None:
            raise ValueError(
                f"the sound is a {type(given).__name__}; it must be bytes, a pathlib.Path, a URL, or an array with its "
                "rate, as in (samples, 16000)"
            )
        look()
        return decoded_sound(content, rate, bounds=self.bounds, look=look)

    def said_length(self, url: str) -> SaidLength | None:
        """The length that the sound's header says; None where it does not, and for one that would have to be fetched.

        Raises ValueError as `waveform`, as far as the header tells.
        """
        if url.lower().startswith(_FETCHED):
            return None
        content = self.content(url)
        assert content is not None, "a URL has bytes or is refused"
        return said_length(content, bounds=self.bounds)

    def of_row(self, named: str) -> str:
        """The URL of a sound that a job's row names: a URL, or a path below the root. Raises ValueError for a path
        where there is no root."""
        if named.lower().startswith(_SCHEMES):
            return named
        if self.root is None:
            raise ValueError(
                f"file is {named[:80]!r}; paths are read below image_root, which is not given: name the folder, or "
                "give a URL"
            )
        return "file://" + quote(str(PurePosixPath(self.root) / named))


def is_array_with_rate(given: object) -> bool:
    """Whether it is (samples, rate)."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], np.ndarray)
