"""The weights' recipe of a tiny model's folder, drawn for what the reference implementation would save."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.recipe import Law, replace_weights, write_recipe
from scripts.goldens.reference import packed_experts
from scripts.goldens.weights import ENDING, recipe_of


def draw(like: Any, folder: Path, seed: int, law: Law) -> None:
    """Writes the recipe of a folder that has a config.json, whose dtype and quantization_config it follows."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: x.to(getattr(torch, config["dtype"])) for name, x in like.state_dict().items()}
    for old in folder.glob(f"*{ENDING}"):
        old.unlink()
    with tempfile.TemporaryDirectory() as saved:
        like.save_pretrained(saved, state_dict=weights)
        replace_weights(Path(saved), seed, law, like.all_tied_weights_keys)
        for path in Path(saved).glob(f"*{ENDING}"):
            shutil.copy(path, folder)
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        pack_experts(folder, seed)


def pack_experts(folder: Path, seed: int) -> None:
    """Puts MXFP4 experts in place of dense ones."""
    path, stored = folder / f"model{ENDING}", {}
    for name, said in recipe_of(path).items():
        is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        stored |= packed_experts(name, tuple(said["shape"])) if is_expert else {name: said}
    write_recipe(path, seed, stored)
