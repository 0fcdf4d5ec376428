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

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts.goldens import heard_in_prompts
from scripts.goldens.command import run
from scripts.goldens.recipe import first_seed, normal, replace_weights
from scripts.goldens.reference import MARGIN, NUM_GREEDY, is_steady, load

SEED = 71
LENGTHS = (4, 1, 23)
GOLDENS: dict[str, dict[str, Any]] = {
    "whisper": {
        "vocab_size": 154,
        "num_mel_bins": 10,
        "d_model": 48,
        "encoder_layers": 3,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 76,
        "decoder_layers": 2,
        "decoder_attention_heads": 3,
        "decoder_ffn_dim": 60,
        "max_source_positions": 37,
        "max_target_positions": 128,
        "pad_token_id": 1,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "decoder_start_token_id": 2,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
}


def make(name: str, folder: Path) -> None:
    """Writes one folder, with the first seed for which no token depends on how sums are rounded."""
    in_prompts = name in heard_in_prompts.GOLDENS
    like = heard_in_prompts.skeleton(name) if in_prompts else skeleton(name)
    like.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    replace_weights(folder, SEED, heard_in_prompts.law_of(name) if in_prompts else law)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2) + "\n")

    def answer() -> dict[str, np.ndarray] | None:
        model = load(like, folder, lambda tensors: tensors)
        if in_prompts:
            return heard_in_prompts.answers(model, heard_in_prompts.drawn(name))
        return answers(model, drawn(name))

    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **first_seed(folder, SEED, answer))


def skeleton(name: str) -> Any:
    """The model in float32, with weights that nobody uses."""
    config = transformers.WhisperConfig(**GOLDENS[name], attn_implementation="eager")
    return transformers.WhisperForConditionalGeneration(config).eval()


def drawn(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts of three lengths, each with the frames of a window."""
    config, rng = GOLDENS[name], np.random.default_rng(7)
    frames = (2 * config["max_source_positions"], config["num_mel_bins"])
    return [
        (rng.integers(3, config["vocab_size"], length).astype(np.int32), rng.normal(size=frames).astype(np.float32))
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
        if (continued := greedy(model, *asked)) is None:
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


@torch.no_grad()
def greedy(model: Any, prompt: np.ndarray, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(tokens [64], two best logits of each step [64, 2]), end tokens too. None where two logits nearly tie."""
    ids, best = prompt, []
    for _ in range(NUM_GREEDY):
        top = torch.topk(_logits(model, ids, frames)[-1], 2)
        if top.values[0] - top.values[1] < MARGIN * top.values.abs().max():
            return None
        best.append(top.values.numpy())
        ids = np.append(ids, top.indices[0].numpy()).astype(np.int32)
    return ids[len(prompt) :], np.stack(best)


def _logits(model: Any, ids: np.ndarray, frames: np.ndarray) -> torch.Tensor:  # [T, V]
    asked = torch.from_numpy(ids).long()[None]
    return model(input_features=_features(frames), decoder_input_ids=asked, use_cache=False).logits[0]


def _features(frames: np.ndarray) -> torch.Tensor:  # [1, mels, frames]
    return torch.from_numpy(np.ascontiguousarray(frames.T))[None]


if __name__ == "__main__":
    run(__doc__, GOLDENS | heard_in_prompts.GOLDENS, "tests/goldens/hearing", make)
