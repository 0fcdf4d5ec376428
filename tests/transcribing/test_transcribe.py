"""LLM.transcribe: what transformers writes down of the same sounds, and errors that say what is wrong.

The model that is shipped reads the sound that is shipped.
"""

import dataclasses
import types

import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.tasks.transcription.transcriber import SoundWindow
from scripts.goldens.sounds import wav
from tests.rows import rows_beside
from tests.support import COMPILED, ROOT, SMALL, small_llm
from tests.transcribing.heard import CASES, RATE, how_of, name_of, sound_of, text_of


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_sound_is_written_down_as_the_reference_does(llm, case):
    (found,) = llm.transcribe(sound_of(case), **how_of(case))
    assert list(found.token_ids) == [token for window in case["windows"] for token in window["token_ids"]]
    assert found.text == text_of(case)
    assert found.duration_s == pytest.approx(case["seconds"])
    codes = {token: code for code, token in llm.model.transcriber.tokens.languages.items()}
    assert found.language in {codes[window["language_id"]] for window in case["windows"]}


@pytest.mark.parametrize("case", [case for case in CASES if case.get("timestamps")], ids=name_of)
def test_segments_are_the_offsets_of_the_reference_behind_their_windows_start(llm, case):
    (found,) = llm.transcribe(sound_of(case), **how_of(case))
    wanted = [
        (*(min(round(30 * place + time, 2), found.duration_s) for time in offset["timestamp"]), offset["text"])
        for place, window in enumerate(case["windows"])
        for offset in window["offsets"]
    ]
    first = llm.model.transcriber.tokens.times_from
    closed = [each for each in found.segments if each.token_ids[-1] >= first]
    assert [(each.start_s, each.end_s, each.text) for each in closed] == wanted
    assert [each.id for each in found.segments] == list(range(len(found.segments)))
    assert "".join(each.text for each in found.segments).strip() == found.text, "no text is without its time"


def test_many_sounds_run_side_by_side_and_answers_stay_in_order(llm):
    plain = [case for case in CASES if not {"language", "prompt", "timestamps"} & set(case)]
    found = llm.transcribe([sound_of(case) for case in plain] * 2)
    assert [each.text for each in found] == [text_of(case) for case in plain] * 2


def test_files_and_arrays_give_the_same_text(llm, tmp_path):
    content = wav(7, RATE, 1)
    samples = np.frombuffer(content[44:], np.int16)
    path = tmp_path / "talk.wav"
    path.write_bytes(content)
    found = llm.transcribe([content, path, (samples, RATE)], language="en")
    assert len({each.text for each in found}) == 1 and found[0].text


def test_log_probabilities_are_the_mean_of_tokens(llm):
    (plain,) = llm.transcribe(sound_of(CASES[2]), **how_of(CASES[2]))
    (found,) = llm.transcribe(sound_of(CASES[2]), **how_of(CASES[2]), logprobs=True)
    assert plain.avg_logprob is None and found.avg_logprob is not None and found.avg_logprob < 0
    assert dataclasses.replace(found.segments[0], avg_logprob=None) == plain.segments[0]
    assert all(each.avg_logprob is not None for each in found.segments)


def test_drawn_text_is_the_same_under_one_seed(llm):
    how = {"language": "en", "temperature": 1.0, "seed": 5}
    one, other = llm.transcribe([sound_of(CASES[1])] * 2, **how)
    assert one == other and one.text != text_of(CASES[1])


def test_a_window_that_ends_at_its_most_tokens_says_so(llm):
    (found,) = llm.transcribe(sound_of(CASES[0]), language="en", max_tokens=3)
    assert found.is_cut and len(found.token_ids) == 3
    (found,) = llm.transcribe(sound_of(CASES[0]), max_tokens=3)
    assert found.is_cut and len(found.token_ids) == 3, "tokens of the language do not count"


def test_a_part_ends_with_the_sound_though_the_model_counts_on_into_its_padding(llm):
    transcriber, params = llm.model.transcriber, TranscriptionParams(language="en", timestamps="segment")
    window = SoundWindow(clip=types.SimpleNamespace(seconds=1.456), start_s=30.0)
    tokens, times = transcriber.tokens, transcriber.tokens.times_from
    word = transcriber.tokenizer.encode(" a", add_special_tokens=False)
    ids = [times, *word, times + 90, times + 100, *word, times + 120, tokens.end]
    found = transcriber.answer(window, types.SimpleNamespace(token_ids=tuple(ids), logprobs=None), params).segments
    assert [(each.start_s, each.end_s) for each in found] == [(30.0, 31.456), (31.456, 31.456)]


def test_the_likeliest_language_is_taken_at_any_temperature(llm):
    wanted = llm.transcribe([sound_of(case) for case in CASES[:3]])
    for seed in range(6):
        found = llm.transcribe([sound_of(case) for case in CASES[:3]], temperature=50.0, seed=seed, max_tokens=2)
        assert [each.language for each in found] == [each.language for each in wanted]


@pytest.mark.parametrize(("how", "said"), rows_beside(__file__)["what the model cannot do is refused by name"])
def test_what_the_model_cannot_do_is_refused_by_name(llm, how, said):
    with pytest.raises(ValueError, match=said.replace("|", r"\|")):
        llm.transcribe(sound_of(CASES[0]), **how)


@pytest.mark.parametrize(
    ("sounds", "said"),
    [
        ([b"no sound at all"], "sound 0: the sound is not a file of a kind"),
        ([wav(1, RATE, 1), "talk.wav"], "sound 1: the sound's URL is 'talk.wav'"),
        ([7], "sound 0: the sound is a int"),
        (7, "sounds is a int"),
    ],
)
def test_what_is_no_sound_is_refused_by_its_number(llm, sounds, said):
    with pytest.raises(ValueError, match=said):
        llm.transcribe(sounds)


def test_a_model_that_hears_nothing_says_so():
    other = small_llm("qwen3", SMALL)
    with pytest.raises(ValueError, match="writes down no sounds here"):
        other.transcribe(wav(1, RATE, 1))
    with pytest.raises(ValueError, match="this model hears none"):
        other.generate({"prompt_token_ids": [1], "sounds": [_Window()]})


class _Window:
    patches = np.zeros((2, 2), np.float32)


SOUND = ROOT / "scripts/demo_sounds/call.flac"
SAID = "Please call 020 7946 0958."


def test_the_shipped_model_reads_the_shipped_sound_and_again_from_what_it_keeps():
    config = EngineConfig(
        dtype="float32", max_num_batched_tokens=64, invariant=True, compilation_cache_dir=str(COMPILED)
    )
    llm = LLM(str(ROOT / "checkpoints/demo_digits"), config)
    for _ in range(2):
        (found,) = llm.transcribe(SOUND)
        assert (found.text, found.language) == (SAID, "en")
    (timed,) = llm.transcribe(SOUND, timestamps="segment")
    (segment,) = timed.segments
    assert segment.text.strip() == SAID
    assert 0 <= segment.start_s < segment.end_s <= timed.duration_s + 0.1
    (told,) = llm.transcribe(SOUND, language="en", prompt="seven " * 200)
    assert told.duration_s == timed.duration_s, "of a long text before, half of what the decoder reads is left"
