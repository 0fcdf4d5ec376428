"""Sounds that goldens are made of: the same samples wherever they are drawn."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

# What files of published processors say.
PROCESSORS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("sound_processors.json").read_text())
WHISPER = PROCESSORS["whisper"]


def sound(seconds: float, seed: int, rate: int = 16_000) -> np.ndarray:
    """float32 [samples]: notes that come and go over noise, so that every band and every frame has something to say."""
    random = np.random.default_rng(seed)
    count = round(seconds * rate)
    found = 0.01 * random.standard_normal(count)
    time = np.arange(count) / rate
    for _ in range(6):
        pitch, beat, loud = random.uniform(80, 4000), random.uniform(0.2, 3), random.uniform(0.02, 0.2)
        found += loud * np.sin(2 * np.pi * pitch * time) * np.sin(2 * np.pi * beat * time) ** 2
    return found.astype(np.float32)


def wav(seconds: float, rate: int, channels: int) -> bytes:
    """A WAV of 16 bits with another sound in each channel."""
    samples = np.stack([sound(seconds, seed, rate) for seed in range(channels)], axis=1)
    content = (samples.clip(-1, 1) * 32767).astype("<i2").tobytes()
    block = 2 * channels
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block, block, 16)
    chunks = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
