"""The sound of an OGG or MP3, decoded by libsndfile. Runs in a child, which can open no module later."""

import json
from typing import Any

from ferrum_jax.inputs.audio.plain_files import said_of_file, waveform_of_file
from ferrum_jax.inputs.audio.waveform import SoundBounds, library

for _name in ("soundfile", "soxr"):
    library(_name)


def waveform_bytes(content: bytes, order: dict[str, Any]) -> memoryview:
    """Bytes of the waveform, float32 [samples]. order: the `rate` that is wanted, and the `bounds`."""
    return waveform_of_file(content, order["rate"], SoundBounds(**order["bounds"])).data.cast("B")


def said_bytes(content: bytes, order: dict[str, Any]) -> bytes:
    """JSON of the length that the header says, [samples, rate] or null. order: the `bounds`."""
    return json.dumps(said_of_file(content, SoundBounds(**order["bounds"]))).encode()
