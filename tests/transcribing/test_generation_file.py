"""generation_config.json of a Whisper: the tokens that it names, and what is refused."""

import json

import pytest

from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.tasks.transcription.generation_file import read_whisper_tokens, whisper_tokens_of
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

MANY = ROWS["many"]
ENGLISH = {
    name: value for name, value in MANY.items() if name not in ("lang_to_id", "task_to_id", "is_multilingual")
} | {"is_multilingual": False, "begin_suppress_tokens": None}


def asked(given: dict, **how: object):
    return whisper_tokens_of(given).asked(TranscriptionParams(**how))  # type: ignore[arg-type]


def test_a_language_that_is_given_stands_in_the_prompt():
    for language in ("de", "German", " DE "):
        prompt, rules = asked(MANY, language=language)
        assert prompt == [101, 103, 106, 110] and rules.num_leading == 0
    prompt, rules = asked(MANY, language="en", task="translate", timestamps="segment")
    assert prompt == [101, 102, 105]
    assert (rules.stamps_from, rules.most_first_stamp) == (111, 50) and 110 in rules.suppressed


def test_a_language_that_is_not_given_is_drawn_first_and_the_task_follows():
    prompt, rules = asked(MANY)
    assert prompt == [101] and rules.languages == (102, 103) and rules.then == (106, 110)
    assert rules.stamps_from is None and rules.suppressed == (1, 2) and rules.suppressed_first == (3, 100)


def test_a_model_of_english_has_neither_language_nor_task():
    assert asked(ENGLISH)[0] == asked(ENGLISH, language="english")[0] == [101, 110]
    assert asked(ENGLISH, timestamps="segment")[0] == [101]
    with pytest.raises(ValueError, match="hears English alone; leave it out"):
        asked(ENGLISH, language="de")
    with pytest.raises(ValueError, match="task is 'translate', and this model hears English alone"):
        asked(ENGLISH, task="translate")


@pytest.mark.parametrize(("change", "said"), ROWS["a file that cannot be is refused by its name"])
def test_a_file_that_cannot_be_is_refused_by_its_name(tmp_path, change, said):
    (tmp_path / "generation_config.json").write_text(json.dumps(MANY | change))
    with pytest.raises(ValueError, match=r"generation_config\.json: ") as error:
        read_whisper_tokens(tmp_path)
    assert said in str(error.value)


def test_a_folder_that_says_nothing_of_transcriptions_has_no_tokens(tmp_path):
    assert read_whisper_tokens(tmp_path) is None
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert read_whisper_tokens(tmp_path) is None
