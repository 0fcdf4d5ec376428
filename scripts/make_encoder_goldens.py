"""Makes tests/goldens/encoders/: tiny random encoders of every family, and transformers' float32 vectors.

    python -m scripts.make_encoder_goldens [--out tests/goldens/encoders] [name ...]

Needs torch and transformers (made with torch 2.13, transformers 5.24); the tests that read the result need neither.
Each folder is a real checkpoint, one of them in the layout of sentence-transformers, and `golden.npz` beside it holds,
for texts of one token and more:

    prompt_I [T] int32    hidden_I [T, D] float32, the last layer    mean_I, cls_I, last_I [D], pooled, not normalised

Weights are rounded to the dtype they are stored in.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]

from scripts.goldens.command import run
from scripts.goldens.recipe import normal, replace_weights
from scripts.goldens.reference import load
from scripts.goldens.weights import made

LENGTHS = (1, 2, 13, 16, 17, 40, 64)
WORDS = (
    *("a", "block", "holds", "the", "keys", "and", "values", "of", "its", "tokens", "query", "document", "quick"),
    *("brown", "fox", "jump", "##s", "over", "lazy", "dog"),
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """One tiny encoder. model: a class of transformers. sentence: saved in the layout of sentence-transformers.

    `golden.npz` then has what that makes of each prompt: sentence_I.
    """

    model: str
    dtype: str
    config: dict[str, Any]
    sentence: bool = False
    dense: tuple[int, ...] = ()  # widths of the linear layers behind the pooling


GOLDENS = {
    "bert": Golden(
        model="BertModel",
        dtype="float32",
        sentence=True,
        config={
            "vocab_size": 90,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 76,
            "max_position_embeddings": 70,
        },
    ),
    "bert_masked": Golden(
        model="BertForMaskedLM",
        dtype="bfloat16",
        config={
            "vocab_size": 101,
            "hidden_size": 60,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "intermediate_size": 92,
            "max_position_embeddings": 128,
            "type_vocab_size": 3,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
        },
    ),
    "xlm_roberta": Golden(
        model="XLMRobertaModel",
        dtype="float32",
        config={
            "vocab_size": 110,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 88,
            "max_position_embeddings": 82,
            "type_vocab_size": 1,
            "pad_token_id": 1,
        },
    ),
    "xlm_roberta_masked": Golden(
        model="XLMRobertaForMaskedLM",
        dtype="float16",
        config={
            "vocab_size": 96,
            "hidden_size": 42,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "intermediate_size": 70,
            "max_position_embeddings": 140,
            "type_vocab_size": 1,
            "pad_token_id": 0,
            "hidden_act": "relu",
        },
    ),
    "modernbert": Golden(
        model="ModernBertModel",
        dtype="float32",
        config={
            "vocab_size": 92,
            "hidden_size": 48,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "intermediate_size": 68,
            "max_position_embeddings": 70,
            "local_attention": 12,
            "pad_token_id": 0,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
    ),
    "modernbert_masked": Golden(
        model="ModernBertForMaskedLM",
        dtype="bfloat16",
        config={
            "vocab_size": 99,
            "hidden_size": 72,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "intermediate_size": 44,
            "max_position_embeddings": 128,
            "local_attention": 31,
            "global_attn_every_n_layers": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "hidden_activation": "gelu_pytorch_tanh",
            "norm_eps": 1e-3,
            "pad_token_id": 0,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
    ),
    "embedding_gemma": Golden(
        model="Gemma3TextModel",
        dtype="float32",
        config={
            "vocab_size": 93,
            "hidden_size": 40,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 52,
            "max_position_embeddings": 70,
            "sliding_window": 14,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "use_bidirectional_attention": True,
            "pad_token_id": 0,
        },
    ),
    "embedding_gemma_dense": Golden(
        model="Gemma3TextModel",
        dtype="bfloat16",
        sentence=True,
        dense=(56, 36),
        config={
            "vocab_size": 90,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 44,
            "max_position_embeddings": 128,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 12,
            "use_bidirectional_attention": True,
            "pad_token_id": 0,
        },
    ),
}


def make(name: str, folder: Path) -> None:
    """Writes one folder."""
    golden, seed = GOLDENS[name], list(GOLDENS).index(name)
    like = skeleton(golden)
    save(like, golden, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": golden.dtype}, indent=2) + "\n")
    if golden.sentence:
        save_sentence_layout(folder, golden.config["vocab_size"])
    if golden.dense:
        save_dense(folder, golden.config["hidden_size"], golden.dense)
    replace_weights(folder, seed, lambda weight, shape: law(weight, shape, golden), like.all_tied_weights_keys)
    model = load(like, folder, lambda tensors: tensors)
    encoder = model if golden.model.endswith("Model") else model.base_model
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for i, length in enumerate(LENGTHS):
        prompt = rng.integers(5, golden.config["vocab_size"], length).astype(np.int32)
        with torch.no_grad():
            hidden = encoder(torch.from_numpy(prompt).long()[None]).last_hidden_state[0]
        pooled = {"mean": hidden.double().mean(dim=0).float(), "cls": hidden[0], "last": hidden[-1]}
        arrays |= {f"prompt_{i}": prompt, f"hidden_{i}": hidden.numpy()}
        arrays |= {f"{how}_{i}": vector.numpy() for how, vector in pooled.items()}
        if golden.dense:
            arrays[f"sentence_{i}"] = sentence_vector(folder, prompt)
    np.savez_compressed(folder / "golden.npz", **arrays)  # pyright: ignore[reportArgumentType]


def skeleton(golden: Golden) -> Any:
    """The model in float32, with weights that nobody uses."""
    kind = getattr(transformers, golden.model)
    return kind(kind.config_class(**golden.config, attn_implementation="eager")).eval()


def save(like: Any, golden: Golden, folder: Path) -> None:
    """Its folder, as it would be published."""
    weights = {name: x.to(getattr(torch, golden.dtype)) for name, x in like.state_dict().items()}
    like.save_pretrained(folder, state_dict=weights)


def law(name: str, shape: tuple[int, ...], golden: Golden) -> dict[str, Any]:
    """What a weight is drawn from."""
    if "norm.weight" in name.lower():
        return normal(0.0 if "Gemma" in golden.model else 1.0, 0.2)  # Gemma's multiply by 1 + weight
    if name.endswith("bias"):
        return normal(0.0, 0.3)
    if name == "linear.weight":
        return normal(0.0, 1 / math.sqrt(shape[-1]))
    return normal(0.0, 0.5 if "embeddings" in name else 1.5 / math.sqrt(shape[-1]))


def save_dense(folder: Path, width: int, widths: tuple[int, ...]) -> None:
    """Linear layers between pooling and normalisation, as EmbeddingGemma has them; the last has a bias and a tanh."""
    steps = json.loads((folder / "modules.json").read_text())
    last = steps.pop()
    for number, (num_in, num_out) in enumerate(zip((width, *widths), widths, strict=False), start=2):
        ends = num_out == widths[-1]
        place = folder / f"{number}_Dense"
        place.mkdir()
        activation = "torch.nn.modules.activation.Tanh" if ends else "torch.nn.modules.linear.Identity"
        config = {"in_features": num_in, "out_features": num_out, "bias": ends, "activation_function": activation}
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {"linear.weight": torch.zeros(num_out, num_in)}  # drawn later
        tensors |= {"linear.bias": torch.zeros(num_out)} if ends else {}
        save_file(tensors, place / "model.safetensors")
        kind = "sentence_transformers.models.Dense"
        steps.append({"idx": number, "name": str(number), "path": place.name, "type": kind})
    steps.append(last | {"idx": len(steps), "name": str(len(steps)), "path": f"{len(steps)}_Normalize"})
    (folder / "modules.json").write_text(json.dumps(steps, indent=2) + "\n")


def sentence_vector(folder: Path, prompt: np.ndarray) -> np.ndarray:
    """What sentence-transformers makes of token ids."""
    import sentence_transformers  # pyright: ignore[reportMissingImports]

    model = sentence_transformers.SentenceTransformer(
        str(made(folder)), model_kwargs={"dtype": "float32"}, device="cpu"
    )
    ids = torch.from_numpy(prompt).long()[None]
    with torch.no_grad():
        found = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"][0]
    return found.float().numpy()


def save_sentence_layout(folder: Path, vocab_size: int) -> None:
    """A WordPiece tokenizer that truncates and pads, and the files of sentence-transformers: mean, normalised."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    names = [*SPECIAL, *WORDS, *"bcefghijlmnpqrstuvwxyz"]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    assert len(vocab) <= vocab_size
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.enable_truncation(48)
    tokenizer.enable_padding(length=48)
    tokenizer.save(str(folder / "tokenizer.json"))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling = {
        "word_embedding_dimension": 48,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": False,
        "include_prompt": True,
    }
    prompts = {"prompts": {"query": "query: ", "document": "document: "}, "default_prompt_name": None}
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts, indent=2) + "\n")
    sentence = {"max_seq_length": 48, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(sentence, indent=2) + "\n")
    settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    run(__doc__, GOLDENS, "tests/goldens/encoders", make)
