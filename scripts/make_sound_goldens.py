"""Makes tests/goldens/sounds/: what the feature extractors of transformers make of sounds, and its decoder of a file.

    python -m scripts.make_sound_goldens [--out tests/goldens/sounds]

Needs torch, transformers, soundfile and soxr (made with transformers 5.24, soxr 1.1); the tests need the last two.
`cases.json` has for each case the processor's file, the seconds of sound, and what the reference says of its size;
`features.npz` has what `sampled` takes of its values, float32 [frames, mels].

Whisper's extractor has two paths. The goldens are of the one in float64; `apart` is how far that in float32, which is
taken where torch is installed, is from it: rounding, at bands that are quiet beside loud ones.
"""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.goldens.pictures import sampled
from scripts.goldens.sounds import PROCESSORS, WHISPER, sound, wav

OMNI, QWEN, GEMMA4 = (PROCESSORS[name] for name in ("omni", "qwen", "gemma4"))
SMALL = {**WHISPER, "feature_size": 80}
VOXTRAL = {**WHISPER, "processor_class": "VoxtralProcessor"}
CASES = {
    **{f"whisper_{seconds}": (WHISPER, seconds) for seconds in (1, 7, 30)},
    **{f"whisper_small_{seconds}": (SMALL, seconds) for seconds in (1, 7)},
    **{f"whole_{seconds}": (WHISPER, seconds) for seconds in (1, 7, 31, 95)},  # longer than a window, for log_mel
    **{f"voxtral_{seconds}": (VOXTRAL, seconds) for seconds in (1, 7, 31, 95)},
    **{f"qwen_{seconds}": (QWEN, seconds) for seconds in (0.3, 1, 1.234, 31, 95.003)},
    **{f"omni_{seconds}": (OMNI, seconds) for seconds in (0.3, 7.77)},
    **{f"gemma4_{seconds}": (GEMMA4, seconds) for seconds in (0.0101, 0.03, 1, 7.77, 30)},
}
FILES = {"mono": (44_100, 1), "stereo": (48_000, 2), "telephone": (8000, 1), "six": (22_050, 6), "same": (16_000, 2)}


def processed(name: str) -> tuple[np.ndarray, dict[str, Any]]:
    """What the reference makes of a case: float32 [frames, mels], and its sizes."""
    settings, seconds = CASES[name]
    waveform = sound(seconds, seed=3)
    kind = name.split("_")[0]
    if kind == "gemma4":
        return _gemma4(settings, waveform)
    if kind == "qwen":
        return _qwen(settings, waveform)
    how: dict[str, Any] = {"truncation": False, "padding": True}
    if kind in ("whisper", "voxtral"):
        how |= {"pad_to_multiple_of": 480_000}
    values, apart = _whisper(settings, waveform, how)
    sizes: dict[str, Any] = {"apart": apart}
    if kind == "voxtral":  # as its processor cuts them
        mels = settings["feature_size"]
        values = values.T.reshape(mels, -1, 3000).transpose(1, 2, 0).reshape(-1, mels)
        sizes["windows"] = len(values) // 3000
    if kind == "omni":
        from transformers.models.qwen3_omni_moe import (  # pyright: ignore[reportMissingImports]
            processing_qwen3_omni_moe as omni,
        )

        sizes["num_tokens"] = int(omni._get_feat_extract_output_lengths(np.array(len(values))))
    return values, sizes


def _whisper(settings: dict[str, Any], waveform: np.ndarray, how: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Features of the path in float64, and how far they are from the one in float32."""
    from transformers import WhisperFeatureExtractor  # pyright: ignore[reportMissingImports]

    extractor = WhisperFeatureExtractor(**settings)
    given = {"sampling_rate": 16_000, "return_tensors": "np", **how}
    in_32 = extractor(waveform, **given)["input_features"][0].T
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    in_64 = extractor(waveform, **given)["input_features"][0].T
    return in_64, float(np.abs(in_64 - in_32).max())


def _qwen(settings: dict[str, Any], waveform: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Qwen3-ASR's extractor has only the path in float32, which is Whisper's; Whisper's in float64 takes its place."""
    from transformers import WhisperFeatureExtractor  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3_asr import feature_extraction_qwen3_asr, processing_qwen3_asr  # pyright: ignore

    extractor = feature_extraction_qwen3_asr.Qwen3ASRFeatureExtractor(**settings)
    given = {"sampling_rate": 16_000, "padding": True, "truncation": False, "return_attention_mask": True}
    in_32 = extractor(waveform, **given)
    extractor._torch_extract_fbank_features = WhisperFeatureExtractor(feature_size=128)._np_extract_fbank_features
    in_64 = np.asarray(extractor(waveform, **given)["input_features"])[0].T
    frames = in_32["attention_mask"].sum(-1)
    tokens = processing_qwen3_asr.Qwen3ASRProcessor._get_audio_token_length(None, frames)  # type: ignore[arg-type]
    apart = float(np.abs(in_64 - np.asarray(in_32["input_features"])[0].T).max())
    return in_64, {"apart": apart, "num_frames": int(frames[0]), "num_tokens": int(tokens[0])}


def _gemma4(settings: dict[str, Any], waveform: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    import types

    from transformers.models.gemma4 import feature_extraction_gemma4, processing_gemma4  # pyright: ignore

    extractor = feature_extraction_gemma4.Gemma4AudioFeatureExtractor(**settings)
    found = extractor([waveform], return_tensors="np")
    given = {"input_features_mask": found["input_features_mask"]}
    names = types.SimpleNamespace(boa_token="", audio_token="x", eoa_token="")  # a whole one wants a tokenizer
    tokens = len(processing_gemma4.Gemma4Processor.replace_audio_token(names, given, 0))  # type: ignore[arg-type]
    return found["input_features"][0], {"num_frames": int(given["input_features_mask"].sum()), "num_tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/goldens/sounds"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    from transformers.audio_utils import _load_audio_soundfile  # pyright: ignore[reportMissingImports]

    cases: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, (settings, seconds) in CASES.items():
        values, sizes = processed(name)
        cases[name] = {"settings": settings, "seconds": seconds, "shape": values.shape, **sizes}
        arrays[name] = sampled(values.astype(np.float32))
    files = {}
    for name, (rate, channels) in FILES.items():
        waveform = _load_audio_soundfile(io.BytesIO(wav(2.1, rate, channels)).getvalue(), 16_000)
        files[name] = {"rate": rate, "channels": channels, "samples": len(waveform)}
        arrays[f"file_{name}"] = sampled(waveform)
    (folder / "cases.json").write_text(json.dumps({"features": cases, "files": files}, indent=1) + "\n")
    np.savez_compressed(folder / "features.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
