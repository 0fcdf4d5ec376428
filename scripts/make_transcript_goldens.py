"""Makes tests/goldens/whisper_words/: a tiny Whisper, and what transformers writes down of sounds with it.

    python -m scripts.make_transcript_goldens [--out tests/goldens/whisper_words]

Needs torch and transformers (made with transformers 5.24). `cases.json` has for each case the seconds and the seed of
its sound, how it is asked for, and of each window of 30 s the tokens, the text and the offsets of the reference.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoTokenizer,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTimeStampLogitsProcessor,
)

from scripts.goldens.recipe import normal, replace_weights
from scripts.goldens.sounds import sound
from scripts.goldens.weights import made
from scripts.goldens.whisper_folder import MOST_TOKENS, write_files

_RATE, _WINDOW = 16_000, 480_000
CASES: list[dict[str, Any]] = [
    {"seconds": 1, "seed": 1, "language": "en"},
    {"seconds": 7, "seed": 2},
    {"seconds": 7, "seed": 2, "timestamps": True},
    {"seconds": 7, "seed": 3, "language": "de", "task": "translate", "timestamps": True},
    {"seconds": 7, "seed": 2, "language": "en", "prompt": "we go home by night"},
    {"seconds": 31, "seed": 4, "timestamps": True},
    {"seconds": 95, "seed": 5, "language": "en", "timestamps": True},
    {"seconds": 95, "seed": 5},
]


def law(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Norms near one, positions that are heard, and attention to sounds that is sharp."""
    if "layer_norm" in name and name.endswith("weight"):
        return normal(1.0, 0.2)
    if name.endswith("bias"):
        return normal(0.0, 0.1)
    if "embed_tokens" in name:
        return normal(0.0, 1.0)
    if "embed_positions" in name:
        return normal(0.0, 1.2)
    fan_in = shape[1] * (shape[2] if len(shape) > 2 else 1)
    sharp = 4.0 if "encoder_attn" in name else 1.5
    return normal(0.0, sharp / fan_in**0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/goldens/whisper_words"))
    out = parser.parse_args().out
    write_files(out)
    with tempfile.TemporaryDirectory() as saved:
        WhisperForConditionalGeneration(WhisperConfig.from_pretrained(out)).save_pretrained(saved)
        shutil.move(f"{saved}/model.safetensors", out)
    replace_weights(out, 11, law)
    reference = Reference(made(out))
    (out / "cases.json").write_text(json.dumps([reference.answered(case) for case in CASES], indent=1) + "\n")


class Reference:
    """The model of transformers, and its own parts of the rules."""

    def __init__(self, folder: Path) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self.words = AutoTokenizer.from_pretrained(folder)

    def answered(self, case: dict[str, Any]) -> dict[str, Any]:
        """The case with what each window gives."""
        waveform = sound(case["seconds"], case["seed"])
        windows = [waveform[start : start + _WINDOW] for start in range(0, len(waveform), _WINDOW)]
        features = self.extractor(windows, sampling_rate=_RATE, return_tensors="pt").input_features
        return case | {"windows": [self._window(case, each[None]) for each in features]}

    @torch.no_grad()
    def _window(self, case: dict[str, Any], features: torch.Tensor) -> dict[str, Any]:
        settings, has_times = self.model.generation_config, case.get("timestamps", False)
        language = case.get("language")
        language_id = (
            self.model.detect_language(input_features=features).item()
            if language is None
            else settings.lang_to_id[f"<|{language}|>"]
        )
        begun = list(self.words.get_prompt_ids(case["prompt"])) if "prompt" in case else []
        begun += [settings.decoder_start_token_id, language_id, settings.task_to_id[case.get("task", "transcribe")]]
        begun += [] if has_times else [settings.no_timestamps_token_id]
        rules = [
            SuppressTokensLogitsProcessor(settings.suppress_tokens),
            SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, len(begun)),
        ]
        if has_times:
            rules.append(WhisperTimeStampLogitsProcessor(settings, begin_index=len(begun)))
        ids = list(map(int, begun))
        while len(ids) < MOST_TOKENS and ids[-1] != settings.eos_token_id:
            given = torch.tensor([ids])
            scores = self.model(input_features=features, decoder_input_ids=given).logits[:, -1]
            for rule in rules:
                scores = rule(given, scores)
            ids.append(int(scores.argmax()))
        found = ids[len(begun) :]
        text = self.words.decode(found, skip_special_tokens=True)
        offsets = self.words.decode(found, output_offsets=True)["offsets"] if has_times else []
        return {"language_id": language_id, "token_ids": found, "text": text, "offsets": offsets}


if __name__ == "__main__":
    main()
