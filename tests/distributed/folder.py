"""A tiny model that can be divided among eight devices, and a batch of rows for it."""

import itertools
import json
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 304, "hidden_size": 64, "num_hidden_layers": 1}
CONFIG |= {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5}
CONFIG |= {"max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False}
CONFIG |= {"torch_dtype": "float32", "eos_token_id": 303}
NUM_ROWS = 8


def write_model(folder: Path) -> Path:
    """A Hugging Face folder with random weights."""
    random, D, F, V = np.random.default_rng(7), 64, 96, 304
    head = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        kv = (CONFIG["num_key_value_heads"] * head, D)
        shapes |= {f"{layer}.{norm}_layernorm.weight": (D,) for norm in ("input", "post_attention")}
        attention = {"q": (D, D), "k": kv, "v": kv, "o": (D, D)}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
        mlp = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    tensors = {
        name: np.float32(np.ones(shape) if len(shape) == 1 else random.standard_normal(shape) * 0.2)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """The model's tokens: the bytes, pairs of letters, and the end token."""
    end = CONFIG["eos_token_id"]
    texts = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product("abcdefg", repeat=2))[: end - len(texts)]
    vocabulary = {text: place for place, text in enumerate([*texts, *map("".join, pairs)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.token_to_id("<|end|>") == end
    tokenizer.save(str(folder / "tokenizer.json"))


def write_rows(path: Path, max_tokens: int, *, shared: bool = True) -> Path:
    """Rows that share prefixes, or none; greedy and drawn ones."""
    rows = [
        {
            "custom_id": f"row-{i}",
            "prompt_token_ids": [*range(first, first + 40 - 8 * (i % 3)), 100 + i],
            "max_tokens": max_tokens,
            "temperature": 0.8 if i % 4 == 3 else 0,
            "ignore_eos": True,
            "logprobs": 2,
        }
        for i, first in enumerate([20] * NUM_ROWS if shared else range(20, 20 + NUM_ROWS))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
