"""Published model shapes for benchmarks, with random weights; every dimension is real but the vocabulary."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints.rules import expand
from ferrum_jax.models import registry

_VOCABULARY = 16_384  # smaller than published: the output layer is the same work for everybody

SHAPES: dict[str, dict[str, Any]] = {
    # Source: the config.json that Qwen published with Qwen3-0.6B
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": _VOCABULARY,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
}


def write_random_checkpoint(shape: str, parent: pathlib.Path) -> pathlib.Path:
    """A Hugging Face folder of the shape with random float32 weights; made once, then used again."""
    folder = parent / shape
    if (folder / "model.safetensors").exists():
        return folder
    print(f"making random weights of {shape} (once) ...", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    spec = registry.spec_of(config)
    _, targets = registry.unbind(registry.abstract_model(spec, "float32"))
    sources = expand(registry.family_of(spec.architecture).weight_rules(spec))
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for target, parts in sources.items():
        one = targets[target].shape[1:] if len(parts) > 1 else targets[target].shape
        for source in parts:
            assert source.part is None, f"{source}: shapes are of families whose tensors are whole"
            tensors[source.name] = _random(one, rng)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "partial.safetensors")
    (folder / "partial.safetensors").rename(folder / "model.safetensors")  # a killed run leaves no half a model
    return folder


def _random(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Norm weights are 1, all others normal with the usual 0.02."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(0.02)
