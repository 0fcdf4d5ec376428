"""Golden models whose prompts have tokens for sounds: their clips as a processor makes them, and encoded."""

import functools
import hashlib

import jax
import numpy as np

from checkpoints import open_checkpoint
from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.models.families import registry
from ferrum_jax.runtime.media_encoders.packing import given, packed
from tests.golden_table import GOLDENS
from tests.models.test_goldens import parameters_of

HEARING = GOLDENS / "hearing"
QWEN, VOXTRAL, GEMMA = "qwen3_asr", "voxtral", "gemma4_sound"


@functools.cache
def load(name: str = QWEN):
    """(spec, parameters, golden arrays)."""
    spec = registry.spec_of(open_checkpoint(HEARING / name).config)
    return spec, parameters_of(HEARING / name, spec), dict(np.load(HEARING / name / "golden.npz"))


def clips_of(prompt: int, *, louder: float = 0.0, name: str = QWEN) -> list[ProcessedClip]:
    """The sounds of a golden prompt. louder: than the golden's, which makes others of them."""
    spec, _, golden = load(name)
    frames, tokens = spec.sound.chunk
    clips, at = [], 0
    for length in golden[f"lengths_{prompt}"].tolist():
        ends_anywhere = not spec.sound.window_chunks
        whole = length if ends_anywhere else ceil_div(length, frames) * frames
        features = golden[f"frames_{prompt}"][at : at + whole].copy()
        features[:length] += np.float32(louder)
        clips.append(
            ProcessedClip(
                features=features,
                grid=(1, whole, 1),
                num_frames=length,
                num_tokens=length // frames * tokens + ceil_div(length % frames, frames if ends_anywhere else 8),
                seconds=length / 100,
                digest=hashlib.blake2b(features).digest(),
            )
        )
        at += whole
    return clips


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(sound, graph, weights, values, places):
    tower = registry.bind(graph, {name.removeprefix("sound."): x for name, x in weights.items()})
    return tower(*given(sound, values, places))


def encoded(clips: list[ProcessedClip], num_frames: int, name: str = QWEN) -> list[np.ndarray]:
    """The embeddings of each clip of one call, which has room for so many frames."""
    spec, parameters, _ = load(name)
    graph, names = registry.abstract_tower(spec.sound)
    values, places, where = packed(spec.sound, num_frames, clips)
    found = np.asarray(_encode(spec.sound, graph, {each: parameters[each] for each in names}, values, places))
    assert np.isfinite(found).all()
    return [found[own] for own in where]
