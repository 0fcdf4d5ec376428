"""Small checkpoint folders that tests write: two layers of one matrix and one stack of three experts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from checkpoints import Rule

CONFIG = {"architectures": ["TinyForCausalLM"], "hidden_size": 6}
HARMLESS = ("*.rotary_emb.inv_freq", "lm_head.weight")
RULES = (
    Rule(source="model.embed_tokens.weight", target="embedding.weight"),
    Rule(source="model.layers.{i}.q_proj.weight", target="layers.{i}.attention.q.weight", layers=(0, 1)),
    Rule(source="model.layers.{i}.experts.{e}.up.weight", target="layers.{i}.mlp.up", layers=(1,), experts=3),
)
SHAPES = {
    "embedding.weight": (300, 64),
    "layers.0.attention.q.weight": (10, 64),
    "layers.1.attention.q.weight": (10, 64),
    "layers.1.mlp.up": (3, 5, 64),
}


def targets(dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SHAPES.items()}


def tensors(dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Hugging Face tensors that RULES take, with two harmless leftovers."""
    random = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (300, 64),
        "lm_head.weight": (300, 64),
        "model.layers.0.q_proj.weight": (10, 64),
        "model.layers.1.q_proj.weight": (10, 64),
        **{f"model.layers.1.experts.{e}.up.weight": (5, 64) for e in range(3)},
    }
    made = {name: random.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}
    made["model.embed_tokens.weight"][::3, ::3] *= made["model.embed_tokens.weight"].dtype.type(0)  # of both signs
    return made | {"model.layers.0.rotary_emb.inv_freq": np.ones(4, np.float32)}


def parameters(made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters that RULES make of `tensors`, by hand."""
    return {
        "embedding.weight": made["model.embed_tokens.weight"],
        "layers.0.attention.q.weight": made["model.layers.0.q_proj.weight"],
        "layers.1.attention.q.weight": made["model.layers.1.q_proj.weight"],
        "layers.1.mlp.up": np.stack([made[f"model.layers.1.experts.{e}.up.weight"] for e in range(3)]),
    }


def write_single(folder: Path, made: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(made, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, made: dict[str, np.ndarray]) -> Path:
    """The same in two files with an index, tensors dealt out in turn."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {name: files[i % 2] for i, name in enumerate(made)}
    for file in files:
        safetensors.numpy.save_file({n: made[n] for n, f in index.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
