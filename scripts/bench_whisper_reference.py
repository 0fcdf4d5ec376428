"""The other side of scripts/bench_whisper.py, in a Python with faster-whisper, torch and transformers.

    PYTHON bench_whisper_reference.py FOLDER TOKENS

Draws the weights of the folder's config, converts them, and then answers each line with one of JSON: seconds, of the
CPU too, and tokens of the folder's clips.npy.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
import time

import ctranslate2  # pyright: ignore[reportMissingImports]
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from faster_whisper import WhisperModel  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Answers until the input ends."""
    folder, num_tokens = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    asked = json.loads((folder / "generation_config.json").read_text())
    draw(folder)
    (folder / "generation_config.json").write_text(json.dumps(asked))
    converter = ctranslate2.converters.TransformersConverter(
        str(folder), copy_files=["tokenizer.json", "preprocessor_config.json"]
    )
    model = WhisperModel(converter.convert(str(folder / "converted"), force=True), "cpu", compute_type="float32")
    print("weights", flush=True)
    prompt = [asked["decoder_start_token_id"], asked["lang_to_id"]["<|l0|>"], asked["task_to_id"]["transcribe"]]
    prompt.append(asked["no_timestamps_token_id"])
    for _ in sys.stdin:
        clips = np.load(folder / "clips.npy")
        begun, cpu = time.perf_counter(), time.process_time()
        features = np.stack([model.feature_extractor(clip, padding=0)[:, :3000] for clip in clips])
        found = model.model.generate(
            model.encode(features),
            [prompt] * len(clips),
            beam_size=1,
            max_length=2 * num_tokens,  # which the library halves
            suppress_blank=False,
            suppress_tokens=asked["suppress_tokens"],
        )
        took = {"s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
        print(json.dumps(took | {"tokens": [each.sequences_ids[0] for each in found]}), flush=True)


def draw(folder: pathlib.Path) -> None:
    """Weights under which tokens vary."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig.from_pretrained(folder)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                scale = (
                    0.05 if "embed" in name else (4 if "encoder_attn" in name else 1.2) / math.sqrt(weight[0].numel())
                )
                weight.copy_(torch.randn_like(weight) * scale)
            elif name == "model.decoder.layer_norm.weight":
                weight.copy_(torch.randn_like(weight))
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
