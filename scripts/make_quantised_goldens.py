"""Makes tests/goldens/quantised/: tiny models in every published format of quantised weights.

    python -m scripts.make_quantised_goldens [--out tests/goldens/quantised] [name ...]

Needs torch, transformers and compressed-tensors (made with 2.13, 5.24 and 0.20); the tests need none of them. Each
folder is a checkpoint as it would be published: a config.json by hand (its dtype is float32 where inputs are rounded to
fp8: embeddings of eight bits put them on ties of two codes), codes and scales by a recipe, and `golden.npz` beside it
what transformers says of what the weights stand for:

    prompt_I [T] int32   tokens_I [64] int32, greedy   best_I [64, 2] float64, the two best logits of each step
    last_logits [prompts, V] float64

It computes in float64. Where a format rounds activations, the inputs of each quantised product are rounded as
pallas_kernels/quantized_matmul/activations.py says.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.folder import draw
from scripts.goldens.quantised import FORMATS, Quantised, ignored
from scripts.goldens.recipe import first_seed, write_recipe
from scripts.goldens.reference import (
    Laws,
    Limits,
    config_of,
    draw_prompts,
    is_same_on_meshes,
    load,
    skeleton,
    steady,
)
from scripts.goldens.weights import ENDING, recipe_of

_SEEDS = {"dense": 50, "experts": 51, "latent": 52}  # the first of weights, by model
_LAWS = Laws(gain=2.0)
EXACT = Limits(4, 1e-7, 5e-6)
ROUNDED = Limits(12, 2e-7, 5e-6)  # a code that is rounded otherwise moves an answer by a thousandth
# Formats with mesh tests. fp8_blocks has one too, but none of 700 seeds keeps its codes away from ties in the rows too.
ON_MESHES = ("w8a8", "w8a8_experts", "w4a16_experts", "gptq_v2_ordered")
_PROMPTS = (1, 2)  # of those that the other goldens have


def make(name: str, folder: Path) -> None:
    """Writes one folder, with the first seed for which no token and no code of an input lies near a tie."""
    chosen = FORMATS[name]
    seed, config = _SEEDS[chosen.model], config_of(folder)
    like = skeleton(config)
    draw(like, folder, seed, _LAWS.of)
    shapes = _quantise(folder, chosen, seed)
    drawn = draw_prompts(config.vocab_size, seed)
    prompts = [drawn[i] for i in _PROMPTS]

    def answer() -> dict[str, np.ndarray] | None:
        model = load(like, folder, lambda tensors: _decoded(tensors, chosen, shapes)).double()
        limits = EXACT if chosen.rounding is None else ROUNDED
        with _rounding(model, chosen, set(shapes)):
            found = steady(model, prompts, limits)
            if found is None or (name in ON_MESHES and not is_same_on_meshes(folder, model, limits)):
                return None
            return found

    found = first_seed(folder, seed, answer)
    np.savez_compressed(folder / "golden.npz", allow_pickle=False, **found)


def _quantise(folder: Path, chosen: Quantised, seed: int) -> dict[str, tuple[int, int]]:
    """Puts codes and scales in place of the recipe's matrices, whose shapes are the answer."""
    path, stored, shapes = folder / f"model{ENDING}", {}, {}
    for name, said in recipe_of(path).items():
        module = name.removesuffix(".weight")
        if len(said["shape"]) != 2 or "embed" in name or ignored(module):
            stored[name] = said
            continue
        shapes[name] = tuple(said["shape"])
        drawn = chosen.stored(module, shapes[name], said["normal"][1])
        stored |= {f"{module}.{end}": each for end, each in drawn.items()}
    write_recipe(path, seed, stored)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": chosen.config}, indent=1) + "\n")
    return shapes


def _decoded(
    tensors: dict[str, torch.Tensor], chosen: Quantised, shapes: dict[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """The same with dense weights."""
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        ends = [key.removeprefix(f"{module}.") for key in tensors if key.startswith(f"{module}.")]
        own = {end: tensors.pop(f"{module}.{end}") for end in ends}
        tensors[name] = chosen.decode(module, own, shape)
    return tensors


@contextlib.contextmanager
def _rounding(model: Any, chosen: Quantised, decoded: set[str]) -> Iterator[None]:
    """Rounds what goes into products with these weights, also those that the model has stacked."""
    if chosen.rounding is None:
        yield
        return
    linear = torch.nn.functional.linear
    left = tuple(f"{end}.weight" for end in chosen.not_rounded)
    owned = [p for n, p in model.named_parameters() if (n in decoded or ".experts." in n) and not n.endswith(left)]
    spans = [(p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in owned]

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        is_quantised = any(first <= weight.data_ptr() < last for first, last in spans)
        return linear(_round(x, chosen) if is_quantised else x, weight, bias)

    torch.nn.functional.linear = rounded
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def _round(x: torch.Tensor, chosen: Quantised) -> torch.Tensor:
    limit = 127 if chosen.rounding == "int8" else 448
    groups = x.unflatten(-1, (-1, chosen.group or x.shape[-1]))
    scale = groups.abs().amax(-1, keepdim=True) / limit
    scale = (
        torch.where(scale == 0, 1.0, scale) if chosen.input_scale is None else torch.tensor(chosen.input_scale).double()
    )
    share = groups / scale
    if chosen.rounding == "int8":
        codes = torch.round(share).clamp(-128, 127)
    else:
        codes = share.clamp(-limit, limit).float().to(torch.float8_e4m3fn).double()
    return (codes * scale).flatten(-2)


if __name__ == "__main__":
    run(__doc__, FORMATS, "tests/goldens/quantised", make, keeps=True)
