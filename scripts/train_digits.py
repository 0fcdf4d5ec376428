"""Trains the model that ships beside the demo model: a Whisper that writes down spoken digits.

    python -m scripts.train_digits --out build/digits --steps 3600
    python -m scripts.train_digits --measure checkpoints/demo_digits --out build/digits

Needs espeak-ng, which speaks all that it learns from, and torch and transformers, whose Whisper is trained; features
are the engine's own. Clips are of 5 s at first, which is cheap, and of the window's 10 s in the last part. Beside the
decoder's loss the encoder has one of its own (CTC) at first, through which attention learns soon where each word is.
OUT keeps the sentences and `state.pt`, from which --resume goes on, and at the end has `hf/`, a Hugging Face folder in
bfloat16. --measure counts the wrong words of a checkpoint, with the engine, in sentences of voices that are held out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ferrum_jax import LLM, EngineConfig
from scripts import digits_sounds
from scripts.digits_sounds import IGNORED, RATE, Clips, Spoken, spoken_sentences
from scripts.goldens import whisper_folder

SENTENCES, HELD_OUT = 16_000, 400
_SAVE_S = 120.0
_PEAK_RATE = 2e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps with clips of one length. share: of all steps. ctc: weight of the encoder's own loss."""

    share: float
    seconds: int
    clips: int
    ctc: float


STAGES = (Stage(share=0.8, seconds=5, clips=32, ctc=0.5), Stage(share=0.2, seconds=10, clips=24, ctc=0.2))


def shape() -> dict[str, Any]:
    """The sizes in which it differs from the tiny Whisper of the goldens."""
    return {
        "d_model": 128,
        "encoder_layers": 3,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 512,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 512,
        "num_mel_bins": digits_sounds.processor().feature_size,
        "max_source_positions": digits_sounds.WINDOW_S * 50,
        "max_target_positions": 128,
        "activation_function": "gelu",
        "torch_dtype": "bfloat16",
    }


def rate(step: int, steps: int) -> float:
    """The learning rate's fraction of its peak."""
    return min(1.0, (step + 1) / 150, (steps - step) / (0.4 * steps))


class Batches:
    """The clips of each step, as arrays; the next ones are made while the model learns from these."""

    def __init__(self, sentences: list[Spoken], stage: Stage, seed: int) -> None:
        self._stage, self._seed = stage, seed
        self._clips = Clips(sentences, stage.seconds, seed)
        self._processor = dataclasses.replace(digits_sounds.processor(), chunk_length=stage.seconds)
        encode = digits_sounds.digits_tokenizer().encode
        texts = {token for each in sentences for token in encode(f" {each.text}", add_special_tokens=False).ids}
        self.classes = {token: i + 1 for i, token in enumerate(sorted(texts))}

    def between(self, start: int, end: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Steps [start, end) and their batches."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            ahead = [pool.submit(self._batch, step) for step in range(start, min(end, start + 3))]
            for step in range(start, end):
                if step + 3 < end:
                    ahead.append(pool.submit(self._batch, step + 3))
                yield step, ahead.pop(0).result()

    def _batch(self, step: int) -> dict[str, np.ndarray]:
        count = self._stage.clips
        clips = [self._clips.clip(step * count + i) for i in range(count)]
        random = np.random.default_rng([self._seed, step])
        features = np.stack([self._processor.process(each.waveform).features for each in clips])
        for row, low in zip(features, random.integers(0, 2 * features.shape[2], size=count), strict=True):
            row[:, low : low + random.integers(1, 12)] = row.mean()  # a band that is not heard, in every second clip
        return {
            "features": features,
            "given": _rows([each.given for each in clips], 0),
            "wanted": _rows([each.wanted for each in clips], IGNORED),
            "said": _rows([[self.classes[token] for token in each.said] for each in clips], 0),
            "num_said": np.array([len(each.said) for each in clips]),
        }


def _rows(lists: list[list[int]], fill: int) -> np.ndarray:
    """int64 [rows, the longest]."""
    longest = max(1, *map(len, lists))
    return np.array([each + [fill] * (longest - len(each)) for each in lists])


class Learner:
    """A Whisper whose window is a stage's, its encoder's own classifier, and their optimiser."""

    def __init__(self, files: dict[str, dict[str, Any]], num_classes: int, seed: int) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        torch.manual_seed(seed)
        self._files, self._torch = files, torch
        self.model = self._whisper(STAGES[0].seconds)
        self._classifier = torch.nn.Linear(self.model.config.d_model, num_classes + 1)
        self._optimise()

    def _whisper(self, seconds: int) -> Any:
        from transformers import WhisperConfig, WhisperForConditionalGeneration  # pyright: ignore

        return WhisperForConditionalGeneration(
            WhisperConfig(
                **{**self._files["config.json"], "torch_dtype": "float32", "max_source_positions": seconds * 50}
            )
        )

    def _optimise(self) -> None:
        learned = [each for each in self.model.parameters() if each.requires_grad]
        groups = [
            {"params": [each for each in learned if each.ndim > 1], "weight_decay": 0.05},
            {"params": [each for each in learned if each.ndim == 1], "weight_decay": 0.0},
            {"params": list(self._classifier.parameters()), "weight_decay": 0.0},
        ]
        self._optimiser = self._torch.optim.AdamW(groups, lr=_PEAK_RATE, betas=(0.9, 0.98))

    def widen(self, seconds: int) -> None:
        """Makes the window longer; positions of the encoder are not learned."""
        if self.model.config.max_source_positions == seconds * 50:
            return
        weights, optimiser = self.model.state_dict(), self._optimiser.state_dict()
        self.model = self._whisper(seconds)
        weights["model.encoder.embed_positions.weight"] = self.model.model.encoder.embed_positions.weight
        self.model.load_state_dict(weights)
        self._optimise()
        self._optimiser.load_state_dict(optimiser)

    def step(self, batch: dict[str, np.ndarray], ctc: float, rate: float) -> tuple[float, float]:
        """Learns from a batch. Returns the decoder's loss in nats a token, and the encoder's in nats a clip."""
        torch, given = self._torch, {name: self._torch.from_numpy(array) for name, array in batch.items()}
        functional = torch.nn.functional
        with torch.autocast("cpu", dtype=torch.bfloat16):
            features = given["features"].transpose(1, 2)
            out = self.model(input_features=features, decoder_input_ids=given["given"], use_cache=False)
        loss = functional.cross_entropy(out.logits.float().transpose(1, 2), given["wanted"], ignore_index=IGNORED)
        states = out.encoder_last_hidden_state.float()
        classes = functional.log_softmax(self._classifier(states), -1).transpose(0, 1)
        lengths = torch.full((len(states),), states.shape[1])
        own = functional.ctc_loss(classes, given["said"], lengths, given["num_said"], reduction="none").mean()
        for group in self._optimiser.param_groups:
            group["lr"] = _PEAK_RATE * rate
        self._optimiser.zero_grad()
        (loss + ctc * own / 10).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimiser.step()
        return float(loss.detach()), float(own.detach())

    def save(self, path: pathlib.Path, step: int) -> None:
        """Writes the step and everything that is learned, whole or not at all."""
        seconds = self.model.config.max_source_positions // 50
        state = [each.state_dict() for each in (self.model, self._classifier, self._optimiser)]
        partial = path.with_suffix(".partial")
        self._torch.save({"step": step, "seconds": seconds, "state": state}, partial)
        partial.replace(path)

    def load(self, path: pathlib.Path) -> int:
        """The step that `save` was given, after which everything is as it was."""
        stored = self._torch.load(path)
        self.widen(stored["seconds"])
        for each, state in zip((self.model, self._classifier, self._optimiser), stored["state"], strict=True):
            each.load_state_dict(state)
        return stored["step"]

    def export(self, folder: pathlib.Path) -> None:
        """Writes a Hugging Face folder with weights in bfloat16."""
        from safetensors.torch import save_file  # pyright: ignore

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: each.detach().to(self._torch.bfloat16).contiguous()
            for name, each in self.model.state_dict().items()
            if name != "proj_out.weight"
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for name, content in self._files.items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")
        digits_sounds.digits_tokenizer().save(str(folder / "tokenizer.json"))


def folder_files(shown: set[int]) -> dict[str, dict[str, Any]]:
    """The folder's files but weights and tokenizer. shown: the tokens that texts have."""
    tokenizer, processor = digits_sounds.digits_tokenizer(), digits_sounds.processor()
    files, ids = whisper_folder.files(tokenizer), whisper_folder.special_ids(tokenizer)
    files["config.json"] |= shape()
    files["generation_config.json"] |= {
        "suppress_tokens": [
            token for token in range(ids["0.00"]) if token not in shown | {ids["endoftext"], ids["notimestamps"]}
        ],
        "begin_suppress_tokens": [],  # where nobody speaks the text ends at once
        "max_initial_timestamp_index": None,
        "max_length": shape()["max_target_positions"],
    }
    files["preprocessor_config.json"] |= {
        "chunk_length": processor.chunk_length,
        "feature_size": processor.feature_size,
        "n_samples": processor.window_samples,
        "nb_max_frames": processor.window_frames,
    }
    return files


def train(out: pathlib.Path, steps: int, seed: int, resume: bool) -> None:
    """Trains and writes `out/hf`, with the progress on standard output."""
    sentences = spoken_sentences(out / "sentences", SENTENCES, seed)
    batches = [Batches(sentences, stage, seed) for stage in STAGES]
    learner = Learner(folder_files(set(batches[0].classes)), len(batches[0].classes), seed)
    begun = learner.load(out / "state.pt") if resume else 0
    print(f"{sum(each.numel() for each in learner.model.parameters())} parameters, from step {begun}", flush=True)
    saved, losses, end = time.monotonic(), [], 0
    for stage, made in zip(STAGES, batches, strict=True):
        first, end = max(begun, end), end + round(stage.share * steps)
        if first < end:
            learner.widen(stage.seconds)
        for step, batch in made.between(first, end):
            losses.append(learner.step(batch, stage.ctc, rate(step, steps)))
            if (step + 1) % 20 == 0:
                both = np.mean(losses, axis=0)
                print(f"step {step + 1}/{steps} loss {both[0]:.3f} ctc {both[1]:.2f} {time.strftime('%X')}", flush=True)
                losses.clear()
            if time.monotonic() - saved > _SAVE_S or step + 1 == steps:
                learner.save(out / "state.pt", step + 1)
                saved = time.monotonic()
    learner.export(out / "hf")


def measure(folder: str, out: pathlib.Path, count: int, seed: int) -> None:
    """Prints how many words of held-out sentences the engine writes down wrongly, digits being words, and some."""
    spoken = spoken_sentences(out / "sentences", count, seed, held_out=True)
    found = LLM(folder, EngineConfig(dtype="float32")).transcribe([(each.samples, RATE) for each in spoken])
    for name, rows in _kinds_of_voice(spoken).items():
        pairs = [(words_of(spoken[i].text), words_of(found[i].text)) for i in rows]
        wrong, words = sum(distance(*pair) for pair in pairs), sum(len(text) for text, _ in pairs)
        whole = sum(spoken[i].text == found[i].text for i in rows)
        heard = sum(spoken[i].language == found[i].language for i in rows)
        print(
            f"{name}: {wrong} of {words} words wrong ({wrong / words:.2%}), {whole} of {len(rows)} sentences ", end=""
        )
        print(f"letter by letter, language of {heard}", flush=True)


def _kinds_of_voice(spoken: list[Spoken]) -> dict[str, list[int]]:
    kinds: dict[str, list[int]] = {"all": list(range(len(spoken)))}
    for i, each in enumerate(spoken):
        is_accent = each.voice.accent in digits_sounds.HELD_OUT_ACCENTS
        kinds.setdefault(f"{each.language}, held-out {'accent' if is_accent else 'variants'}", []).append(i)
    return kinds


def words_of(text: str) -> list[str]:
    """Words without the full stop, each digit being one."""
    return re.findall(r"\d|[^\W\d]+", text)


def distance(wanted: list[str], found: list[str]) -> int:
    """The least number of words that are put in, left out or replaced."""
    row = list(range(len(found) + 1))
    for i, word in enumerate(wanted):
        before, row = row, [i + 1]
        for j, other in enumerate(found):
            row.append(min(before[j] + (word != other), before[j + 1] + 1, row[j] + 1))
    return row[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for sentences, state and result")
    parser.add_argument("--steps", type=int, default=3600, help="steps of the whole run (default: 3600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sentences, weights and clips (default: 0)")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--measure", metavar="DIR", help="train nothing; count the wrong words of this checkpoint")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.out, HELD_OUT, arguments.seed)
        return
    train(arguments.out, arguments.steps, arguments.seed, arguments.resume)


if __name__ == "__main__":
    main()
