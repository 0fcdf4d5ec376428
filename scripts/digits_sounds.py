"""The data of the model of spoken digits: sentences with numbers, spoken by espeak-ng, and clips made of them.

A *voice* is an accent and a variant of espeak-ng; those whose variant or accent is held out are never trained on. A
*spoken* sentence is one run of espeak-ng, without the silence around it. A *clip* is up to two of them with pauses,
noise and a gain, and the tokens of what Whisper's decoder reads and writes. Sentence i and clip i follow from the seed
and i alone. Needs espeak-ng (made with 1.51).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import pickle
import subprocess
from collections.abc import Sequence

import numpy as np
import tokenizers

from ferrum_jax.sound.features import WhisperSounds
from ferrum_jax.sound.sound_decoding import waveform_of_array
from scripts.goldens.whisper_folder import special_ids, tokenizer

RATE = 16_000
WINDOW_S = 10
LANGUAGES = ("en", "de")
# What is said, in both languages; {} is a number.
_PHRASES = (
    ("{}.", "{}."),
    ("{}.", "{}."),
    ("Please call {}.", "Bitte {} anrufen."),
    ("My number is {}.", "Meine Nummer ist {}."),
    ("The code is {}.", "Der Code ist {}."),
    ("Room {}.", "Zimmer {}."),
    ("Flight {}.", "Flug {}."),
    ("Dial {} or {}.", "Wählen Sie {} oder {}."),
    ("The answer is {}.", "Die Antwort ist {}."),
    ("Thank you.", "Danke."),
)
_ACCENTS = {
    "en": ["en", "en-US", "en-GB-scotland", "en-GB-x-rp", "en-GB-x-gbclan", "en-GB-x-gbcwmd", "en-029", "en-US-nyc"],
    "de": ["de"],
}
_VARIANTS = """
    m1 m2 m3 m4 m5 m6 m7 m8 f1 f2 f3 f4 f5 Alex Alicia Andrea Andy Annie Denis Diogo Gene Henrique Hugo Jacky Lee Marco
    Michael Mike Nguyen adam anika aunty belinda benjamin boris david ed edward
    grandma grandpa iven john klatt klatt2 klatt3 linda marcelo max michel miguel norbert pablo paul pedro quincy rob
    robert sandro shelby steph steph2 steph3 zac travis victor
""".split()  # noqa: SIM905
HELD_OUT_VARIANTS = frozenset({"m3", "m7", "f2", "f5", "Andrea", "Michael", "klatt3", "linda", "paul", "victor"})
HELD_OUT_ACCENTS = frozenset({"en-029"})
_EDGE = 200  # of 32,768: what is quieter is silence around a sentence
_FRAME_STEPS = 5  # times are in whole tenths of a second, a token being two hundredths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Voice:
    """How espeak-ng speaks. speed: words a minute. gap: between words, in hundredths of a second."""

    accent: str
    variant: str
    speed: int = 160
    pitch: int = 50
    gap: int = 0

    @property
    def is_held_out(self) -> bool:
        return self.variant in HELD_OUT_VARIANTS or self.accent in HELD_OUT_ACCENTS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Spoken:
    """A sentence as text in its language and in English, and its samples, int16 at RATE."""

    language: str
    text: str
    english: str
    voice: Voice
    samples: np.ndarray

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Clip:
    """What the model is trained on.

    waveform: float32 [samples]. given, wanted: the decoder's tokens and the one that is to follow each, or IGNORED.
    said: the tokens of the text in the language that is spoken.
    """

    waveform: np.ndarray
    given: list[int]
    wanted: list[int]
    said: list[int]


IGNORED = -100


def digits_tokenizer() -> tokenizers.Tokenizer:
    """Whisper's kind of tokenizer, with a token for each word of the phrases and for each digit behind a space."""
    words = {word.strip(".") for both in _PHRASES for phrase in both for word in phrase.split() if word[0] != "{"}
    return tokenizer([*"0123456789", *sorted(words)], LANGUAGES, last_time_s=WINDOW_S)


def processor() -> WhisperSounds:
    """Features of one window."""
    return WhisperSounds(feature_size=80, sampling_rate=RATE, hop_length=160, n_fft=400, chunk_length=WINDOW_S)


def say(text: str, voice: Voice) -> np.ndarray:
    """int16 [samples] at RATE: what espeak-ng says, without the silence around it. Raises OSError where it fails."""
    command = ["espeak-ng", "-v", f"gmw/{voice.accent}+{voice.variant}", "-s", str(voice.speed)]
    command += ["-p", str(voice.pitch), "-g", str(voice.gap), "--stdout", "--", text]
    wav = subprocess.run(command, capture_output=True, check=True).stdout
    rate = int.from_bytes(wav[24:28], "little")
    samples = np.frombuffer(wav[44 : len(wav) // 2 * 2], "<i2")
    loud = np.flatnonzero(np.abs(samples.astype(np.int32)) > _EDGE)
    if not len(loud):
        raise OSError(f"espeak-ng said nothing: {' '.join(command)}")
    waveform = waveform_of_array(samples[loud[0] : loud[-1] + 1], rate, RATE)
    return np.clip(waveform * 32768, -32768, 32767).astype(np.int16)


def sentence(seed: int, i: int, held_out: bool) -> Spoken:
    """Sentence i of those that are held out, or of those that are not."""
    random = np.random.default_rng([seed, i, held_out])
    language = "en" if random.random() < 0.7 else "de"
    phrases = _PHRASES[random.integers(len(_PHRASES))]
    numbers = [_number(random) for _ in range(phrases[0].count("{}"))]
    german = language == "de"
    spoken = phrases[german].format(*(_spoken_number(each, language, random) for each in numbers))
    while (voice := _voice(random, language)).is_held_out is not held_out:
        pass
    text, english = (phrase.format(*numbers) for phrase in (phrases[german], phrases[0]))
    return Spoken(language=language, text=text, english=english, voice=voice, samples=say(spoken, voice))


def _number(random: np.random.Generator) -> str:
    """Groups of digits, as those of telephone numbers."""
    groups = random.choice([1, 2, 3], p=[0.45, 0.35, 0.2])
    digits = random.integers(10, size=(groups, 4))
    lengths = random.integers(1 if groups == 1 else 2, 5, size=groups)
    return " ".join("".join(map(str, row[:length])) for row, length in zip(digits, lengths, strict=True))


def _spoken_number(number: str, language: str, random: np.random.Generator) -> str:
    """As espeak-ng is to read it: digit by digit, with a pause between groups; now and then "oh" for a zero."""
    zero = "oh" if language == "en" and random.random() < 0.15 else "0"
    return ", ".join(" ".join(zero if digit == "0" else digit for digit in group) for group in number.split())


def _voice(random: np.random.Generator, language: str) -> Voice:
    return Voice(
        accent=str(random.choice(_ACCENTS[language])),
        variant=str(random.choice(_VARIANTS)),
        speed=int(random.integers(120, 220)),
        pitch=int(random.integers(15, 85)),
        gap=int(random.choice([0, 0, 1, 3, 6])),
    )


def spoken_sentences(folder: pathlib.Path, count: int, seed: int, held_out: bool = False) -> list[Spoken]:
    """The first `count` sentences, made once and kept in `folder`."""
    path = folder / f"{'held_out' if held_out else 'sentences'}_{seed}_{count}.pickle"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda i: sentence(seed, i, held_out), range(count)))
        path.write_bytes(pickle.dumps(found))
    return pickle.loads(path.read_bytes())


class Clips:
    """Clips of sentences, by number. seconds: of the longest, after which the encoder's window ends."""

    def __init__(self, sentences: Sequence[Spoken], seconds: float, seed: int) -> None:
        self._sentences = [each for each in sentences if each.seconds < seconds - 0.3]
        self._seconds, self._seed = seconds, seed
        self._tokenizer = digits_tokenizer()
        self._ids = special_ids(self._tokenizer)

    def clip(self, i: int) -> Clip:
        """Clip i: silence, a sentence, and perhaps another one; 3 % of them have no speech."""
        random = np.random.default_rng([self._seed, i])
        waveform = np.zeros(int(self._seconds * RATE), np.float32)
        parts: list[tuple[float, Spoken, float]] = []
        begin = random.uniform(0.0, 1.0)
        for _ in range(random.choice([0, 1, 2], p=[0.03, 0.57, 0.4])):
            one = self._sentences[random.integers(len(self._sentences))]
            if parts and (begin + one.seconds >= self._seconds or one.language != parts[0][1].language):
                break
            begin = min(begin, self._seconds - one.seconds)
            at = int(begin * RATE)
            waveform[at : at + len(one.samples)] = one.samples[: len(waveform) - at] / np.float32(32768)
            parts.append((begin, one, begin + one.seconds))
            begin += one.seconds + random.uniform(0.4, 1.5)
        end = int(random.uniform(parts[-1][2] if parts else 0.1, self._seconds) * RATE)
        return Clip(waveform=_worn(waveform[: max(end, RATE // 10)], random), **self._tokens(parts, random))

    def _tokens(
        self, parts: Sequence[tuple[float, Spoken, float]], random: np.random.Generator
    ) -> dict[str, list[int]]:
        ids, language = self._ids, parts[0][1].language if parts else "en"
        task = "translate" if random.random() < 0.25 else "transcribe"
        has_times = random.random() < 0.4
        texts = [f" {one.english if task == 'translate' else one.text}" for _, one, _ in parts]
        before = self._before(random)
        prompt = [*before, ids["startoftranscript"], ids[language], ids[task]]
        answer: list[int] = [] if has_times else self._encode("".join(texts))
        for text, (begin, _, end) in zip(texts, parts, strict=True) if has_times else ():
            answer += [self._time(begin), *self._encode(text), self._time(end)]
        if has_times and not parts:
            answer = [self._time(0.0)]
        prompt += [] if has_times else [ids["notimestamps"]]
        tokens = [*prompt, *answer, ids["endoftext"]]
        wanted = [IGNORED] * (len(prompt) - 1) + tokens[len(prompt) :]
        wanted[len(before)] = ids[language] if parts else IGNORED
        said = self._encode("".join(f" {one.text}" for _, one, _ in parts))
        return {"given": tokens[:-1], "wanted": wanted, "said": said}

    def _before(self, random: np.random.Generator) -> list[int]:
        """Now and then a text that is taken to stand before."""
        if random.random() > 0.05:
            return []
        one = self._sentences[random.integers(len(self._sentences))]
        return [self._ids["startofprev"], *self._encode(f" {one.text}")]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _time(self, seconds: float) -> int:
        return self._ids["0.00"] + round(seconds * 50 / _FRAME_STEPS) * _FRAME_STEPS


def _worn(waveform: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """As a bad microphone hears it: darker or brighter, with noise of some colour, and louder or quieter."""
    tilt = np.float32(random.uniform(-0.6, 0.6))
    waveform = waveform + tilt * np.concatenate([waveform[:1], waveform[:-1]])
    loudness = float(np.sqrt(np.mean(waveform**2))) or 0.05
    if random.random() < 0.7:
        noise = random.standard_normal(len(waveform), np.float32)
        noise += np.float32(random.uniform(-0.9, 0.9)) * np.concatenate([noise[:1], noise[:-1]])
        waveform = waveform + noise * np.float32(loudness * 10 ** -random.uniform(0.4, 2.5))
    loudest = float(np.abs(waveform).max()) or 1.0
    return (waveform * np.float32(10 ** random.uniform(-1.5, 0.0) / loudest)).astype(np.float32)
