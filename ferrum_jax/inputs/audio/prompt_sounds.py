"""PromptSounds: sounds that a user gives, as a model takes them that hears, and the prompt with their tokens.

    Qwen      <|audio_start|> <|audio_pad|> <|audio_end|>      one pad becomes as many as the sound has
    Voxtral   [BEGIN_AUDIO] [AUDIO]                            likewise
    Gemma 4   <|audio|>                                        becomes <|audio>, as many <|audio|> and <audio|>

Sounds are read one by one. Before the features of one are made, its tokens are counted, with those of all before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ferrum_jax.inputs.audio.clip import ProcessedClip
from ferrum_jax.inputs.audio.features import Gemma4Sounds, QwenSounds, VoxtralSounds
from ferrum_jax.inputs.audio.sound_processor_files import read_sound_processor
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.identity import digest_of
from ferrum_jax.inputs.media.kinds import Look, do_not_look, naming
from ferrum_jax.inputs.prompt import MediaSpan

_PLACEHOLDERS = {
    "qwen": "<|audio_pad|>",
    "voxtral": "[AUDIO]",
    "gemma4": "<|audio|>",
}  # by the processor's kind: what stands for each token of a sound
_AROUND = {"gemma4": ("<|audio>", "<audio|>")}  # tokens that a sound gets before and behind its own
Encode = Callable[[str, bool], Sequence[int]]  # a text to ids, with special tokens or without


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSounds:
    """How prompts of a model have sounds.

    folder: of the processor's file. sources: where sounds may come from. max_frames: of a sound; longer ones are
    refused before all of them is decoded.
    """

    processor: QwenSounds | VoxtralSounds | Gemma4Sounds
    folder: Path
    sources: SoundSources
    max_frames: int

    @classmethod
    def of_folder(cls, folder: str | Path, sources: SoundSources, max_frames: int) -> PromptSounds | None:
        """The processor that a checkpoint's folder names; None without one whose sounds have tokens.

        Raises ValueError for unknown settings.
        """
        processor = read_sound_processor(folder)
        if not isinstance(processor, QwenSounds | VoxtralSounds | Gemma4Sounds):
            return None
        return cls(processor=processor, folder=Path(folder), sources=sources, max_frames=max_frames)

    @property
    def digest(self) -> str:
        """Digest of everything that turns a waveform into features, in hexadecimal."""
        return digest_of(self.processor.kind, dataclasses.asdict(self.processor))

    @property
    def placeholder(self) -> str:
        """The text of a sound in a prompt, and of each of its tokens."""
        return _PLACEHOLDERS[self.processor.kind]

    def filled(
        self,
        content: str | Sequence[int],
        sounds: Sequence[Any],
        encode: Encode,
        *,
        most: int | None = None,
        look: Look = do_not_look,
    ) -> tuple[str | Sequence[int], tuple[ProcessedClip, ...]]:
        """The text or the ids with all tokens of each sound in the place of its placeholder.

        most: tokens that sounds may have together, None for any number. look: called between steps; what it raises ends
        the work. Raises ValueError for sounds that cannot be read, for more than a prompt may have, and for others than
        the prompt has places for.
        """
        name = self.placeholder
        pad = self._id(name, encode)
        places = content.count(name) if isinstance(content, str) else sum(each == pad for each in content)
        if places != len(sounds):
            raise ValueError(
                f"the prompt has {places} placeholder{'s' * (places != 1)} {name} and {len(sounds)} "
                f"sound{'s' * (len(sounds) != 1)}; write one for each sound, and keep the word out of texts"
            )
        clips = self._clips(sounds, most, look)
        around = _AROUND.get(self.processor.kind)
        if isinstance(content, str):
            before, behind = around or ("", "")
            first, *others = content.split(name)
            runs = [f"{before}{name * clip.num_tokens}{behind}" for clip in clips]
            return "".join((first, *(run + text for run, text in zip(runs, others, strict=True)))), clips
        ends = [[self._id(token, encode)] for token in around] if around else [[], []]
        full = iter([[*ends[0], *[pad] * clip.num_tokens, *ends[1]] for clip in clips])
        return [each for one in content for each in (next(full) if one == pad else [one])], clips

    def _clips(self, sounds: Sequence[Any], most: int | None, look: Look) -> tuple[ProcessedClip, ...]:
        clips, total = [], 0
        for number, sound in enumerate(sounds):
            look()
            with naming("sound", number):
                heard = sound if isinstance(sound, ProcessedClip) else self._waveform(sound, look)
                total += self.processor.num_tokens(len(heard)) if isinstance(heard, np.ndarray) else heard.num_tokens
            if most is not None and total > most:
                raise ValueError(
                    f"the first {number + 1} sounds of the prompt have {total:,} tokens, and {most:,} fit, the model's "
                    "max_model_len; give fewer sounds or shorter ones"
                )
            with naming("sound", number):
                clips.append(self.processor.process(heard, look) if isinstance(heard, np.ndarray) else heard)
        return tuple(clips)

    def _waveform(self, sound: Any, look: Look) -> np.ndarray:
        """The waveform of a sound. Raises ValueError for one that no tower takes, before all of it is decoded."""
        most = self.max_frames * self.processor.hop_length / self.processor.sampling_rate
        bounds = dataclasses.replace(self.sources.bounds, max_seconds=min(self.sources.bounds.max_seconds, most))
        return dataclasses.replace(self.sources, bounds=bounds).waveform(sound, self.processor.sampling_rate, look)

    def spans(self, ids: Sequence[int], clips: Sequence[ProcessedClip], encode: Encode) -> tuple[MediaSpan, ...]:
        """Where the runs of tokens stand. Raises ValueError where two sounds have nothing between them."""
        pad = self._id(self.placeholder, encode)
        found = np.flatnonzero(np.asarray(ids, np.int64) == pad)
        runs = np.split(found, np.flatnonzero(np.diff(found) != 1) + 1) if len(found) else []
        lengths, expected = [len(run) for run in runs], [clip.num_tokens for clip in clips]
        if lengths != expected:
            raise ValueError(
                f"the prompt has runs of {lengths} tokens {self.placeholder}, and its sounds have {expected}; write it "
                "once for each sound, with a text or token between two"
            )
        return tuple(
            MediaSpan(kind="audio", digest=clip.digest, start=int(run[0]), length=clip.num_tokens)
            for run, clip in zip(runs, clips, strict=True)
        )

    def _id(self, token: str, encode: Encode) -> int:
        ids = encode(token, False)
        if len(ids) != 1:
            raise ValueError(f"the tokenizer has no token {token}, which stands for sounds of this model")
        return ids[0]
