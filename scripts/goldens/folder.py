"""The checkpoint folder of a tiny model, as the reference implementation saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from scripts.goldens.golden import Golden
from scripts.goldens.recipe import replace_weights, write_recipe
from scripts.goldens.reference import law, packed_experts
from scripts.goldens.weights import ENDING, recipe_of

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER_TEXT = [
    "A block holds the keys and values of its tokens. A request reads the blocks of its prompt.",
    "def next_token(logits): return int(logits.argmax())",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the summer's heat.",
]


def save(model: Any, golden: Golden, folder: Path) -> None:
    """Recipes of weights in golden.dtype, config.json, generation_config.json and, where asked for, a tokenizer."""
    shard = {"max_shard_size": golden.shard} if golden.shard else {}
    weights = {name: x.to(getattr(torch, golden.dtype)) for name, x in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights, **shard)  # which empties it
    tied = model.all_tied_weights_keys
    replace_weights(folder, golden.seed, lambda name, shape: law(name, shape, golden), tied)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": golden.dtype}
    if golden.says:
        config["rope_parameters"] |= golden.says
    if golden.mxfp4:
        pack_experts(folder, golden)
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    if golden.old_rope:
        rope = config.pop("rope_parameters")
        if "sliding_attention" in rope:
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
            del config["layer_types"]
            rope = rope["full_attention"]
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    path.write_text(json.dumps(config, indent=2) + "\n")
    if golden.tokenizer:
        save_tokenizer(folder, golden.config["vocab_size"])


def pack_experts(folder: Path, golden: Golden) -> None:
    """Puts MXFP4 experts in place of dense ones."""
    path, stored = folder / f"model{ENDING}", {}
    for name, said in recipe_of(path).items():
        is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        stored |= packed_experts(name, tuple(said["shape"])) if is_expert else {name: said}
    write_recipe(path, golden.seed, stored)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most vocab_size tokens, a chat template, and a second end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
