"""Makes tests/goldens/hearing/: tiny random models that hear, with the outputs of transformers, float32.

    python -m scripts.make_hearing_goldens [--out tests/goldens/hearing] [name ...]

Needs torch and transformers (made with torch 2.13, transformers 5.24); the tests that read the result need neither.
Each folder is a real Hugging Face checkpoint, and `golden.npz` beside it holds, for prompts of three lengths, each with
a sound of its own, or with no, one and two sounds that have tokens in it:

    prompt_I [T] int32    frames_I [frames, mels] float32, of one window, or of all sounds one behind the other
    seconds_I [sounds]    lengths_I [sounds] int32, frames of each
    grids_I [images, 3] int32    patches_I [patches, values], of images beside them
    states_I [positions, D], the encoder's, or tower_I [tokens, D], the embeddings
    logits_I [T, V]    tokens_I [64] int32, greedy    best_I [64, 2], the two best logits of each
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens import heard_in_prompts
from scripts.goldens.command import run
from scripts.goldens.folder import draw
from scripts.goldens.recipe import first_seed, normal
from scripts.goldens.reference import greedy_row, is_steady, load, whole_skeleton
from scripts.make_vision_goldens import law_of

SEED = 71
LENGTHS = (4, 1, 23)
NAMES = ("whisper", *heard_in_prompts.NAMES)


def make(name: str, folder: Path) -> None:
    """Writes one folder, with the first seed for which no token depends on how sums are rounded."""
    like = whole_skeleton(folder)
    in_prompts = heard_in_prompts.law if name != "gemma4_sound" else law_of(like)  # which sees too
    draw(like, folder, SEED, law if name == "whisper" else in_prompts)

    def answer() -> dict[str, np.ndarray] | None:
        model = load(like, folder, lambda tensors: tensors)
        if name == "whisper":
            return answers(model, drawn(like.config))
        return heard_in_prompts.answers(model, heard_in_prompts.drawn(name, like.config.audio_config))

    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **first_seed(folder, SEED, answer))


def drawn(config: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts of three lengths, each with the frames of a window."""
    rng, frames = np.random.default_rng(7), (2 * config.max_source_positions, config.num_mel_bins)
    return [
        (rng.integers(3, config.vocab_size, length).astype(np.int32), rng.normal(size=frames).astype(np.float32))
        for length in LENGTHS
    ]


def law(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What a weight is drawn from, so that greedy outputs vary."""
    if name == "model.decoder.layer_norm.weight":  # of either sign; otherwise a tied table would repeat every token
        return normal(0.0, 1.0)
    if "norm" in name and name.endswith("weight"):
        return normal(1.0, 0.2)
    if name.endswith("bias"):
        return normal(0.0, 0.3)
    if "embed" in name:
        return normal(0.0, 0.5)
    gain = 4.0 if "encoder_attn" in name else 1.5  # so that tokens depend on the sound
    return normal(0.0, gain / math.sqrt(math.prod(shape[1:])))


def answers(model: Any, drawn: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """What golden.npz holds; None for weights that leave too much to chance."""
    said = []
    for asked in drawn:
        if (continued := greedy_row(lambda ids, on=asked[1]: _logits(model, ids, on)[-1], asked[0])) is None:
            return None
        said.append(continued)

    @torch.no_grad()
    def logits() -> torch.Tensor:
        whole = [
            (np.concatenate((prompt, tokens)), frames)
            for (prompt, frames), (tokens, _) in zip(drawn, said, strict=True)
        ]
        return torch.cat([_logits(model, *asked) for asked in whole]).double()

    if not is_steady(logits, model):
        return None
    arrays: dict[str, np.ndarray] = {}
    for i, ((prompt, frames), (tokens, best)) in enumerate(zip(drawn, said, strict=True)):
        found = {"prompt": prompt, "frames": frames, "tokens": tokens, "best": best}
        with torch.no_grad():
            found["states"] = model.model.encoder(_features(frames)).last_hidden_state[0].numpy()
            found["logits"] = _logits(model, prompt, frames).numpy()
        arrays |= {f"{key}_{i}": value for key, value in found.items()}
    return arrays


def _logits(model: Any, ids: np.ndarray, frames: np.ndarray) -> torch.Tensor:  # [T, V]
    asked = torch.from_numpy(ids).long()[None]
    return model(input_features=_features(frames), decoder_input_ids=asked, use_cache=False).logits[0]


def _features(frames: np.ndarray) -> torch.Tensor:  # [1, mels, frames]
    return torch.from_numpy(np.ascontiguousarray(frames.T))[None]


if __name__ == "__main__":
    run(__doc__, NAMES, "tests/goldens/hearing", make, keeps=True)
