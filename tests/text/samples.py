"""Small tokenizers of the two kinds in the field, trained here, and the folders they come in."""

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ferrum_jax.text.tokenizer import Tokenizer

CORPUS = [
    "def find(self, key):\n    return self.items[key]  # naïve\n",
    "héllo wörld, 你好 мир 🙂",
    "the end of the line",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen; the post-processor adds no BOS."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    library.add_tokens(["é b", "<tool>"])
    return library


@functools.cache
def sentencepiece() -> tokenizers.Tokenizer:
    """BPE with metaspace and byte fallback as in Llama 2 and Gemma; the post-processor adds BOS."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL))
    model = json.loads(trained.to_str())["model"]
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [token for token in sorted(model["vocab"], key=model["vocab"].get) if token not in SPECIAL]
    merges = [tuple(merge) for merge in model["merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), CONFIG)


def folder(path: Path, kind: str = "byte_level", **config: object) -> Path:
    """A checkpoint folder with a tokenizer and its configuration."""
    KINDS[kind]().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    return path
