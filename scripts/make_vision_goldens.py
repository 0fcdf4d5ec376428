"""Makes tests/goldens/vision/: tiny random models that see images, with the outputs of transformers, float32.

    python -m scripts.make_vision_goldens [--out tests/goldens/vision] [name ...]

Needs torch and transformers (made with torch 2.13, transformers 5.24); the tests that read the result need neither.
Each folder is a real Hugging Face checkpoint, and `golden.npz` beside it holds, for prompts with no, one and three
images of different sizes:

    prompt_I [T] int32, with a placeholder for each token of an image    grids_I [images, 3] int32
    patches_I [patches, values] float32, of all images    tower_I [tokens, (1 + deepstack) D], the tower's output
    rope_I [3, T] int32, of Qwen    embed_I [T, D], after images took their places
    layers_I [L, T, D], deepstack added    norm_I [T, D]    logits_I [T, V]
    tokens_I [64] int32, greedy    best_I [64, 2], the two best logits of each
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.folder import draw as draw_weights
from scripts.goldens.recipe import Law, first_seed, normal, uniform, write_recipe
from scripts.goldens.reference import greedy_row, is_steady, load, whole_skeleton
from scripts.goldens.weights import ENDING, recipe_of

SEED = 31
IMAGE, VIDEO, START, END = 150, 151, 152, 153
BREAK = VIDEO  # of Mistral 3's images, which no model with videos has
NAMES = (
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_5_vision", "qwen3_5_moe_vision", "gemma3_vision", "gemma4_vision"),
    *("gemma4_vision_causal", "mistral3_vision", "glm4v", "glm4v_moe"),
)
_TURNED = "Qwen3VLMoe"  # whose published folders have the experts' matrices [in, out]
# (tokens of text, an image's rows and columns of patches, tokens of text, ...)
PROMPTS = ((41,), (9, (4, 6), 12), (5, (8, 2), 3, (2, 2), 17, (6, 10), 4))
SQUARE = (12, 12)  # the one size that Gemma's tower takes
SQUARE_PROMPTS = ((41,), (9, SQUARE, 12), (5, SQUARE, 3, SQUARE, 17, SQUARE, 4))

POOLED_PROMPTS = ((41,), (9, (6, 9), 12), (5, (12, 3), 3, (3, 3), 17, (6, 15), 4))


def _sizes(name: str) -> tuple[tuple[tuple[Any, ...], ...], int, int]:
    """Prompts of a golden, patches of a side of a token and values of a patch."""
    if name == "gemma3_vision":
        return SQUARE_PROMPTS, 3, 3 * 4 * 4
    if name.startswith("gemma4"):
        return POOLED_PROMPTS, 3, 3 * 4 * 4
    return PROMPTS, 2, 3 * 4 * 4 * (1 if name == "mistral3_vision" else 2)


def make(name: str, folder: Path) -> None:
    """Writes one folder, with the first seed for which no token depends on how sums are rounded."""
    like = whole_skeleton(folder)
    family = family_of(like)
    draw_weights(like, folder, SEED, law_of(like))
    if family == _TURNED:
        turn_experts(folder / f"model{ENDING}")
    rng = np.random.default_rng(7)
    prompts, merge, values = _sizes(name)
    drawn = [draw(parts, rng, merge, values, breaks=family == "Mistral3") for parts in prompts]

    def answer() -> dict[str, np.ndarray] | None:
        return answers(load(like, folder, turned_back if family == _TURNED else lambda tensors: tensors), drawn)

    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **first_seed(folder, SEED, answer))


def answers(model: Any, drawn: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """What golden.npz holds; None for weights that leave too much to chance."""
    said = []
    for asked in drawn:
        if (continued := greedy(model, *asked)) is None:
            return None
        said.append(continued)

    @torch.no_grad()
    def logits() -> torch.Tensor:
        ids = [np.concatenate((asked[0], tokens)) for asked, (tokens, _) in zip(drawn, said, strict=True)]
        rows = [
            model(**_inputs(model, torch.from_numpy(row).long()[None], *asked[1:]), use_cache=False).logits[0]
            for row, asked in zip(ids, drawn, strict=True)
        ]
        return torch.cat(rows).double()

    if not is_steady(logits, model):
        return None
    arrays: dict[str, np.ndarray] = {}
    for i, ((prompt, grids, patches), (tokens, best)) in enumerate(zip(drawn, said, strict=True)):
        found = {"prompt": prompt, "grids": grids, "patches": patches, "tokens": tokens, "best": best}
        found |= observe(model, prompt, grids, patches)
        arrays |= {f"{key}_{i}": value for key, value in found.items()}
    return arrays


def turn_experts(path: Path) -> None:
    """Says of the experts' matrices that they are stored [in, out], as the published folders have them."""
    stored = recipe_of(path)
    for name, said in stored.items():
        if ".mlp.experts." in name:
            experts, rows, columns = said["shape"]
            stored[name] = said | {"shape": [experts, columns, rows]}
    write_recipe(path, SEED, stored)


def turned_back(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.mT.contiguous() if ".mlp.experts." in name else x for name, x in tensors.items()}


def family_of(model: Any) -> str:
    """The prefix of the reference's classes."""
    return type(model).__name__.removesuffix("ForConditionalGeneration")


def law_of(model: Any) -> Law:
    """What its weights are drawn from."""
    return functools.partial(_law, family=family_of(model))


def _law(name: str, shape: tuple[int, ...], family: str) -> dict[str, Any]:
    """So that greedy outputs vary."""
    is_zero_centred = family in ("Qwen3_5", "Qwen3_5Moe", "Gemma3")  # but for norms of recurrences and of the tower
    if name.endswith("language_model.norm.weight") and family in ("Gemma3", "Gemma4"):
        # of either sign; otherwise a tied table would repeat every token
        return normal(-1.0 if family == "Gemma3" else 0.0, 1.0)
    if ("norm" in name or "ln_pre" in name) and name.endswith("weight"):
        is_offset = is_zero_centred and not any(part in name for part in ("visual", "linear_attn", "vision_tower"))
        return normal(0.0 if is_offset else 1.0, 0.2)
    if name.endswith(("put_min", "put_max")):  # so that some of a product's values are cut
        return uniform(-2.0, -1.0) if name.endswith("min") else uniform(1.0, 2.0)
    if "std_" in name or name.endswith("layer_scalar"):
        return normal(1.0, 0.3)
    if name.endswith("A_log"):
        return uniform(-4.0, 1.0)
    if name.endswith("bias"):
        return normal(0.0, 0.3)
    if name.endswith("position_embedding_table"):
        return uniform(-0.5, 1.5)
    if "embed" in name and "patch" not in name and "projection" not in name:
        is_scaled = "embed_tokens" in name and family in ("Gemma3", "Gemma4")
        return normal(0.0, 0.2 if is_scaled else 0.5)
    gain = 3.0 if name.endswith("lm_head.weight") else 1.5
    return normal(0.0, gain / math.sqrt(math.prod(shape[1:])))


def draw(
    parts: tuple[Any, ...], rng: np.random.Generator, merge: int, values: int, *, breaks: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompt [T], grids [images, 3] and the patches of all images. merge: patches of a side of a token. values: of a
    patch. breaks: whether BREAK stands between two rows of tokens."""
    ids, grids = [], []
    for part in parts:
        if isinstance(part, int):
            ids.append(rng.integers(6, IMAGE, part))
            continue
        rows, columns = part
        grids.append((1, rows, columns))
        row = [IMAGE] * (columns // merge) + [BREAK] * breaks
        ids.append([START, *(row * (rows // merge))[: -1 if breaks else None], END])
    count = sum(math.prod(grid) for grid in grids)
    patches = rng.uniform(-1, 1, (count, values)).astype(np.float32)
    flat = np.array(list(itertools.chain.from_iterable(ids)), np.int32)
    return flat, np.array(grids, np.int32).reshape(-1, 3), patches


def _inputs(model: Any, ids: torch.Tensor, grids: np.ndarray, patches: np.ndarray) -> dict[str, Any]:
    if not len(grids):
        return {"input_ids": ids}
    if isinstance(model, transformers.Gemma3ForConditionalGeneration):
        return {"input_ids": ids, "token_type_ids": (ids == IMAGE).int(), "pixel_values": _pixels(grids, patches)}
    if isinstance(model, transformers.Gemma4ForConditionalGeneration):
        return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **places(grids, patches)}
    if isinstance(model, transformers.Mistral3ForConditionalGeneration):
        return {"input_ids": ids, **_padded(grids, patches)}
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.from_numpy(patches),
        "image_grid_thw": torch.from_numpy(grids).long(),
    }


def places(grids: np.ndarray, patches: np.ndarray) -> dict[str, torch.Tensor]:
    """Patches with their places, padded to the longest image; they stand by squares of 3 x 3, channels last."""
    side = round((patches.shape[1] // 3) ** 0.5)
    values = patches.reshape(-1, 3, side, side).transpose(0, 2, 3, 1).reshape(patches.shape)
    most = max(int(math.prod(grid)) for grid in grids)
    pixels = np.zeros((len(grids), most, patches.shape[1]), np.float32)
    places = np.full((len(grids), most, 2), -1)
    at = 0
    for i, (_, rows, columns) in enumerate(grids.tolist()):
        squares = itertools.product(range(0, rows, 3), range(0, columns, 3), range(3), range(3))
        places[i, : rows * columns] = [(left + x, top + y) for top, left, y, x in squares]
        pixels[i, : rows * columns] = values[at : at + rows * columns]
        at += rows * columns
    return {"pixel_values": torch.from_numpy(pixels), "image_position_ids": torch.from_numpy(places)}


def _padded(grids: np.ndarray, patches: np.ndarray) -> dict[str, torch.Tensor]:
    """Images padded to the largest, with their sizes; their patches stand by squares of 2 x 2."""
    side = round((patches.shape[1] // 3) ** 0.5)
    rows, columns = grids[:, 1:].max(axis=0) * side
    pixels, at = np.zeros((len(grids), 3, rows, columns), np.float32), 0
    for image, (_, rows, columns) in zip(pixels, grids.tolist(), strict=True):
        squares = patches[at : at + rows * columns].reshape(rows // 2, columns // 2, 2, 2, 3, side, side)
        whole = squares.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)
        image[:, : rows * side, : columns * side] = whole
        at += rows * columns
    return {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.from_numpy(grids[:, 1:] * side)}


def _pixels(grids: np.ndarray, patches: np.ndarray) -> torch.Tensor:
    """[images, 3, side, side] of images whose patches stand row by row."""
    _, rows, columns = grids[0]
    side = round((patches.shape[1] // 3) ** 0.5)
    parts = patches.reshape(len(grids), rows, columns, 3, side, side).transpose(0, 3, 1, 4, 2, 5)
    return torch.from_numpy(parts.reshape(len(grids), 3, rows * side, columns * side).copy())


def greedy(model: Any, prompt: np.ndarray, *pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """`greedy_row`, whose tokens are none of an image."""

    def logits(ids: np.ndarray) -> torch.Tensor:
        inputs = _inputs(model, torch.from_numpy(ids).long()[None], *pictures)
        return model(**inputs, use_cache=False).logits[0, -1, :IMAGE]

    return greedy_row(logits, prompt)


@torch.no_grad()
def observe(model: Any, prompt: np.ndarray, grids: np.ndarray, patches: np.ndarray) -> dict[str, np.ndarray]:
    """The tower's output, rotary positions, what the first layer is given, outputs of layers and norm, and logits."""
    seen: dict[str, np.ndarray] = {}
    body = model.model.language_model
    given: dict[str, np.ndarray] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: seen.__setitem__(name, output[0].numpy())

    def enters(name: str) -> Any:
        return lambda module, inputs, named: given.__setitem__(
            name, (inputs[0] if inputs else named["hidden_states"])[0].numpy()
        )

    handles = [body.norm.register_forward_hook(keep("norm"))]
    # what the norm is given is the last layer's output
    for i, module in enumerate([*body.layers, body.norm]):
        handles.append(module.register_forward_pre_hook(enters(f"{i}"), with_kwargs=True))
    ids = torch.from_numpy(prompt).long()[None]
    logits = model(**_inputs(model, ids, grids, patches), use_cache=False).logits[0].numpy()
    for handle in handles:
        handle.remove()
    layers = np.stack([given[f"{i + 1}"] for i in range(len(body.layers))])
    found = {"embed": given["0"], "layers": layers, "norm": seen["norm"], "logits": logits}
    if not len(grids):
        return found
    inputs = _inputs(model, ids, grids, patches)
    if "image_position_ids" in inputs:
        images = model.model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"], return_dict=True)
        return found | {"tower": torch.cat(list(images.pooler_output)).numpy()}
    if "image_sizes" in inputs:
        pixels = inputs["pixel_values"], inputs["image_sizes"]
        images = model.model.get_image_features(*pixels, vision_feature_layer=-1, return_dict=True)
        return found | {"tower": torch.cat(list(images.pooler_output)).numpy()}
    if "image_grid_thw" not in inputs:
        images = model.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output
        return found | {"tower": images.reshape(-1, images.shape[-1]).numpy()}
    rope, _ = model.model.get_rope_index(ids, inputs["mm_token_type_ids"], inputs["image_grid_thw"])
    out = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], return_dict=True)
    whole = torch.cat([out.pooler_output, *getattr(out, "deepstack_features", ())], dim=-1).numpy()
    return found | {"tower": whole, "rope": rope[:, 0].numpy().astype(np.int32)}


if __name__ == "__main__":
    run(__doc__, NAMES, "tests/goldens/vision", make, keeps=True)
