"""The folder of a tiny Whisper: its config, its processor's file, its tokenizer, and weights by formula."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from scripts.goldens.sounds import WHISPER

WORDS = "the sea and sun we go home rain wind far away then by night on a road of stone with nine birds".split()  # noqa: SIM905
WORDS += "Zeit Meer und wir gehen heim bei Nacht la mer où vent 水 да".split()  # noqa: SIM905
LANGUAGES = ("en", "de", "fr")
MOST_TOKENS = 64


def tokenizer(
    words: Sequence[str] = WORDS, languages: Sequence[str] = LANGUAGES, last_time_s: int = 30
) -> tokenizers.Tokenizer:
    """Bytes, a few words with a space before them, and the special tokens of Whisper behind those."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(alphabet)}
    merges = []
    for word in words:
        whole, *letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(f" {word}")[0][0]
        for letter in letters:
            if whole + letter not in vocab:
                merges.append((whole, letter))
                vocab[whole + letter] = len(vocab)
            whole += letter
    found = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    names = ["endoftext", "startoftranscript", *languages, "translate", "transcribe"]
    names += ["startoflm", "startofprev", "nospeech", "notimestamps"]
    found.add_special_tokens([f"<|{name}|>" for name in names])
    times = [f"<|{step * 0.02:.2f}|>" for step in range(last_time_s * 50 + 1)]
    found.add_tokens([tokenizers.AddedToken(time, normalized=False) for time in times])
    ids = {name: found.token_to_id(f"<|{name}|>") for name in names}
    start, end = "<|startoftranscript|>", "<|endoftext|>"
    found.post_processor = processors.TemplateProcessing(
        single=f"{start} <|notimestamps|> $A {end}",
        special_tokens=[(f"<|{name}|>", ids[name]) for name in ("startoftranscript", "notimestamps", "endoftext")],
    )
    return found


def special_ids(made: tokenizers.Tokenizer) -> dict[str, int]:
    """The special tokens and times by name, as "endoftext" and "0.00"."""
    return {text.strip("<|>"): number for text, number in made.get_vocab(True).items() if text.startswith("<|")}


def files(made: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    """The folder's other files. No text has tokens but words, full stops and times of whole seconds."""
    ids = special_ids(made)
    end, first = ids["endoftext"], ids["0.00"]
    shown = {made.encode(f" {word}", add_special_tokens=False).ids[0] for word in WORDS} | {made.token_to_id(".")}
    suppressed = [number for number in range(end) if number not in shown]
    suppressed += [number for number in range(end + 1, first) if number != ids["notimestamps"]]
    suppressed += [first + step for step in range(1501) if step % 50]
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 16,
        "max_source_positions": 1500,
        "max_target_positions": MOST_TOKENS,
        "vocab_size": made.get_vocab_size(True),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["startoftranscript"],
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "scale_embedding": False,
        "torch_dtype": "float32",
    }
    generation = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["startoftranscript"],
        "prev_sot_token_id": ids["startofprev"],
        "no_timestamps_token_id": ids["notimestamps"],
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[code] for code in LANGUAGES if code in ids},
        "task_to_id": {name: ids[name] for name in ("transcribe", "translate")},
        "suppress_tokens": suppressed,
        "begin_suppress_tokens": [made.token_to_id("."), end],
        "max_initial_timestamp_index": 50,
        "max_length": MOST_TOKENS,
        "return_timestamps": False,
    }
    own = [str(made.id_to_token(number)) for number in range(end, first)]
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    return {
        "config.json": config,
        "generation_config.json": generation,
        "preprocessor_config.json": {**WHISPER, "feature_size": 16},
        "tokenizer_config.json": {"tokenizer_class": "WhisperTokenizer", "additional_special_tokens": own, **named},
    }


def write_files(folder: Path) -> None:
    """All files but weights."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer()
    for name, content in files(made).items():
        (folder / name).write_text(json.dumps(content) + "\n")
    made.save(str(folder / "tokenizer.json"), pretty=False)
