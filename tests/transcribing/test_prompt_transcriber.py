"""Sounds written down by models whose prompts have tokens for them: Qwen3-ASR and Voxtral."""

import dataclasses

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.core.outputs import CompletionOutput
from ferrum_jax.inputs.audio.features import VoxtralSounds
from ferrum_jax.inputs.audio.prompt_sounds import PromptSounds
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.tasks.transcription.prompt_transcriber import PromptTranscriber
from ferrum_jax.tasks.transcription.transcription import GrowingText, gap_between, transcription_of
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.tokenizer import Tokenizer as OwnTokenizer
from scripts.goldens.sound_folder import PLACE, write_folder
from scripts.goldens.sounds import sound
from tests.engine.golden_media import FAMILIES, QWEN
from tests.support import GOLDENS

RATE, FEW = 16_000, 12


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(write_folder(GOLDENS, tmp_path_factory.mktemp("qwen3_asr") / "model")), FAMILIES[QWEN].config)


@pytest.fixture(scope="module")
def transcriber(llm):
    """One whose tokenizer puts nothing between characters."""
    library = Tokenizer.from_str(llm.tokenizer.to_json())
    library.decoder = decoders.Fuse()
    return dataclasses.replace(llm.model.transcriber, tokenizer=OwnTokenizer(library))


def said(transcriber, *texts: str) -> list[CompletionOutput]:
    """Answers of a model that writes these texts."""
    encode = transcriber.tokenizer.encode
    nothing = {"index": 0, "text": "", "cumulative_logprob": None, "logprobs": None, "stop_reason": None}
    return [CompletionOutput(token_ids=tuple(encode(each)), finish_reason="stop", **nothing) for each in texts]


def windows(transcriber, count: int):
    samples = sound(1.0, 1)
    return transcriber.windows(samples)[:1] * count


def test_a_sound_is_asked_for_as_the_makers_do(llm):
    heard = (sound(3, 1), RATE)
    (found,) = llm.transcribe(heard, language="de", prompt="Names: Ida.", max_tokens=FEW)
    prompt = f"Names: Ida.{PLACE}language German<asr_text>"
    (wanted,) = llm.generate([{"prompt": prompt, "sounds": [heard]}], SamplingParams(max_tokens=FEW, temperature=0))
    assert found.token_ids == wanted.outputs[0].token_ids and found.text == wanted.text.strip()
    assert (found.language, found.duration_s, found.is_cut) == ("de", 3.0, True)


def test_windows_of_a_long_sound_are_as_each_alone(llm, transcriber):
    whole = sound(12, 2)
    (found,) = llm.transcribe((whole, RATE), language="en", max_tokens=FEW)
    parts = [(samples, RATE) for _, samples in transcriber.cut(whole)]
    alone = llm.transcribe(parts, language="en", max_tokens=FEW)
    assert len(parts) > 1 and found.token_ids == sum((each.token_ids for each in alone), ())
    assert found.duration_s == pytest.approx(12) and found.text == " ".join(each.text for each in alone)


def test_the_model_says_the_language_in_front_of_the_mark(transcriber):
    answers = said(
        transcriber, "language German<asr_text>So ist es.", "language None<asr_text>", "language German<asr_text> Ja."
    )
    found = transcription_of(transcriber, windows(transcriber, 3), answers, TranscriptionParams())
    assert (found.text, found.language) == ("So ist es. Ja.", "de")
    assert len(found.token_ids) == len("So ist es. Ja.")


def test_a_text_without_the_mark_is_all_text(transcriber):
    answers = said(transcriber, "Yes.", "A text that is longer than what is waited for<asr_text>!")
    found = transcription_of(transcriber, windows(transcriber, 2), answers, TranscriptionParams())
    assert found.text == "Yes. A text that is longer than what is waited for!" and found.language is None


@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_stream_gives_the_same_text_in_any_pieces(transcriber, size):
    answers = said(transcriber, "language German<asr_text> a b ", "No mark", "language None<asr_text>", "<asr_text>c ")
    text, found = GrowingText(transcriber, TranscriptionParams()), ""
    for answer in answers:
        for start in range(0, len(answer.token_ids), size):
            found += text.push(answer.token_ids[start : start + size])
        found += text.end_window()
    assert found == "a b No mark c"


def test_windows_are_joined_as_their_script_is_written():
    assert gap_between("one", "two") == gap_between("\uc548\ub155", "\uc548") == " "
    assert gap_between("\u4f60\u597d", "\u4f60") == gap_between("\u0e01", "\u0e01") == gap_between("", "a") == ""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"timestamps": "segment"}, "times are asked for, and Qwen3-ASR writes none: give the response_format"),
        ({"task": "translate"}, "task is 'translate'; Qwen3-ASR writes down what is said"),
        ({"language": "klingon"}, "language is 'klingon'; Qwen3-ASR has ar, cs, "),
        ({"prompt": "a<|audio_pad|>"}, r"prompt has the token '<\|audio_pad\|>', which is no text"),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_the_sound_is_read(llm, how, message):
    with pytest.raises(ValueError, match=message):
        llm.transcribe(b"no sound", **how)


def voxtral(tmp_path, most: int | None = None) -> PromptTranscriber | None:
    """most: max_model_len; None for a tokenizer that knows no transcriptions."""
    words = ["<s>", "[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]"] + (["[TRANSCRIBE]"] if most else [])
    library = Tokenizer(
        models.WordLevel({"<unk>": 9, **{each: 10 + i for i, each in enumerate(words)}}, unk_token="<unk>")
    )
    library.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in words])
    processor = VoxtralSounds(feature_size=8, sampling_rate=RATE, hop_length=160, n_fft=400, chunk_length=30)
    sounds = PromptSounds(processor=processor, folder=tmp_path, sources=SoundSources(), max_frames=16_384)
    tokenizer = OwnTokenizer(library, {"bos_token": "<s>"})
    prompts = PromptEncoder(tokenizer=tokenizer, chat=None, sounds=sounds, max_model_len=most)
    return PromptTranscriber.of_prompts(prompts)


def test_voxtral_is_asked_by_its_tokens(tmp_path):
    found = voxtral(tmp_path, 8192)
    assert found.prompt(TranscriptionParams()) == [10, 11, 13, 14, 12, 15]
    assert found.prompt(TranscriptionParams(language="German"))[5:] == [9, 15]
    assert [len(samples) / RATE for _, samples in found.cut(np.zeros(130 * RATE, np.float32))] == [63.0, 67.0]
    with pytest.raises(ValueError, match="prompt is given, and Voxtral takes no text before"):
        found.check(TranscriptionParams(prompt="so"))
    with pytest.raises(ValueError, match="language is 'xx'; give its code or its English name"):
        found.check(TranscriptionParams(language="xx"))


def test_windows_take_at_most_half_of_what_the_model_reads(tmp_path):
    found = voxtral(tmp_path, 1600)
    assert found.most_samples == 60 * RATE
    with pytest.raises(ValueError, match="max_model_len is 700 and max_image_patches 16,384; a window of 30 s has 375"):
        voxtral(tmp_path, 700).cut(np.zeros(RATE, np.float32))
    assert voxtral(tmp_path) is None, "its tokenizer has no [TRANSCRIBE]"
