"""Published model shapes for benchmarks, with random weights: in a folder, or made on the engine's devices.

A folder is for CPUs: float32, and a smaller vocabulary, because the output layer is the same work for every engine.
"""

import functools
import json
import pathlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from checkpoints.rules import Expansion, expand
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.models.families import registry
from scripts.published import config_of

_VOCABULARY = 16_384  # of a folder, at most


def _published(name: str, model_type: str) -> dict[str, Any]:
    """The config.json of a published model, without an end: a smaller vocabulary may lack that token."""
    return {key: value for key, value in config_of(name).items() if key != "eos_token_id"} | {"model_type": model_type}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _published("Qwen3-0.6B", "qwen3"),
    "llama-3-8b": _published("Llama-3-8B", "llama"),
    "qwen3-30b-a3b": _published("Qwen3-30B-A3B", "qwen3_moe"),
}


def small(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json with few layers and sizes that a test runs."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 16}
    return {name: sizes.get(name, value) for name, value in config.items()}


def random_source(config: Mapping[str, Any]) -> ModelSource:
    """Random weights for a config.json, made on the devices that need them, so nothing is copied there."""

    def read(
        targets: Mapping[str, jax.ShapeDtypeStruct], expansions: Mapping[str, Expansion] = MappingProxyType({})
    ) -> dict[str, jax.Array]:
        if expansions:
            raise ValueError(f"the mesh does not divide {sorted(expansions)}; random weights want one that does")
        keys = jax.random.split(jax.random.key(0), len(targets))
        return {
            name: _maker(target.shape, target.dtype, target.sharding)(key)
            for key, (name, target) in zip(keys, targets.items(), strict=True)
        }

    return ModelSource(spec=registry.spec_of(config), read=read)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Any) -> Any:
    """A function that draws a weight as `random_weight` does, on its devices."""

    def make(key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        if jnp.issubdtype(dtype, jnp.integer):  # codes of a form
            return jax.random.bits(key, shape, jnp.uint8).astype(dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    return jax.jit(make, out_shardings=sharding)


def write_random_checkpoint(shape: str, parent: pathlib.Path) -> pathlib.Path:
    """A Hugging Face folder of the shape with random float32 weights; made once, then used again."""
    folder = parent / shape
    if (folder / "model.safetensors").exists():
        return folder
    print(f"making random weights of {shape} (once) ...", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    published = SHAPES[shape]
    vocab_size = min(published["vocab_size"], _VOCABULARY)
    config = published | {"vocab_size": vocab_size, "torch_dtype": "float32"}
    spec = registry.spec_of(config)
    _, targets = registry.unbind(registry.abstract_model(spec, "float32"))
    sources = expand(registry.family_of(spec.architecture).weight_rules(spec))
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for target, parts in sources.items():
        one = targets[target].shape[1:] if len(parts) > 1 else targets[target].shape
        for source in parts:
            assert source.part is None, f"{source}: shapes are of families whose tensors are whole"
            tensors[source.name] = random_weight(one, rng)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "partial.safetensors")
    (folder / "partial.safetensors").rename(folder / "model.safetensors")  # a killed run leaves no partial model
    return folder


def random_weight(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Norm weights are 1, all others normal with the usual 0.02."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)
