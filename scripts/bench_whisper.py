"""Measures transcription by Whisper-base's shape on the CPU, beside `faster-whisper`, in the same run.

    python -m scripts.bench_whisper --reference-python PYTHON [--clips 16] [--tokens 64] [--rounds 3]

PYTHON has faster-whisper, torch and transformers. Weights are random and float32, the same on both sides, so no text
means anything and each clip of 30 s gets the same number of tokens: no end is drawn. A round is a batch of clips of
noise that were not there before, from samples to tokens, features on the host among it; sides take turns. Greedy
tokens of the first round are compared. Prints one line of JSON: medians of seconds of sound a second, by the clock and
of the CPU, the share of equal tokens, the load.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

import numpy as np

from ferrum_jax import LLM, EngineConfig
from scripts.git_state import git_state
from scripts.published import config_of as published_config

_REFERENCE = pathlib.Path(__file__).with_name("bench_whisper_reference.py")
_RATE, _SECONDS = 16000, 30
_SUPPRESSED = (1, 2, 7, 8, 9, *range(50257, 50364))  # the end too, so that each clip takes as many tokens


def main() -> None:
    """Prints the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", required=True, help="that has faster-whisper, torch and transformers")
    parser.add_argument("--clips", type=int, default=16, help="of 30 s, in a batch")
    parser.add_argument("--tokens", type=int, default=64, help="of each clip")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        write_files(folder)
        command = [given.reference_python, str(_REFERENCE), made, str(given.tokens)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reference:
            print(json.dumps(measured(folder, reference, given)))


def write_files(folder: pathlib.Path) -> None:
    """All files of a checkpoint but its weights, which the reference draws."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    codes = [f"l{i}" for i in range(99)]
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in codes)]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    special += ["<|notimestamps|>", *(f"<|{i * 0.02:.2f}|>" for i in range(1501))]
    ids = {name: 50257 + i for i, name in enumerate(special)}
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50257)} | ids, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = {
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in codes},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": list(_SUPPRESSED),
        "task_to_id": {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
    }
    processor = {
        "chunk_length": _SECONDS,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": _RATE,
    }
    config = published_config("Whisper-base")
    for name, content in (("generation", generation), ("preprocessor", processor), ("", config)):
        (folder / f"{name}{'_' * bool(name)}config.json").write_text(json.dumps(content))


def measured(folder: pathlib.Path, reference: subprocess.Popen[str], given: argparse.Namespace) -> dict[str, Any]:
    """The line."""
    assert reference.stdin is not None and reference.stdout is not None
    assert reference.stdout.readline() == "weights\n", "the reference failed; see above"
    llm = LLM(str(folder), EngineConfig(max_num_seqs=given.clips))
    rates: dict[str, list[float]] = {f"{side}{unit}": [] for side in ("ours", "reference") for unit in ("", "_cpu")}
    equal = 0.0
    for number in range(-1, given.rounds):  # the first warms up
        clips = np.random.default_rng(number + 1).normal(0, 0.1, (given.clips, _RATE * _SECONDS)).astype(np.float32)
        begun, cpu = time.perf_counter(), time.process_time()
        found = llm.transcribe(
            [(clip, _RATE) for clip in clips], language="l0", max_tokens=given.tokens, progress=False
        )
        took = {"ours": time.perf_counter() - begun, "ours_cpu": time.process_time() - cpu}
        np.save(folder / "clips.npy", clips)
        reference.stdin.write("go\n")
        reference.stdin.flush()
        theirs = json.loads(reference.stdout.readline())
        took |= {"reference": theirs["s"], "reference_cpu": theirs["cpu_s"]}
        if number < 0:
            pairs = zip(found, theirs["tokens"], strict=True)
            equal = float(np.mean([list(ours.token_ids) == tokens for ours, tokens in pairs]))
            continue
        for side, seconds in took.items():
            rates[side].append(given.clips * _SECONDS / seconds)
    reference.stdin.close()
    medians = {f"{side}_sound_s_per_s": round(statistics.median(each), 2) for side, each in rates.items()}
    return {
        **medians,
        "ratio": round(statistics.median(rates["ours"]) / statistics.median(rates["reference"]), 2),
        "ratio_cpu": round(statistics.median(rates["ours_cpu"]) / statistics.median(rates["reference_cpu"]), 2),
        "equal_clips": round(equal, 3),
        "clips": given.clips,
        "tokens": given.tokens,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        **git_state(),
    }


if __name__ == "__main__":
    main()
