"""WhisperTokens: what a checkpoint's generation_config.json says of the tokens by which Whisper is asked."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ferrum_jax.inputs.params.transcript import Transcript
from ferrum_jax.inputs.params.transcription_params import TASKS, TranscriptionParams
from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.error_text.known_fields import TRUTH, FieldKind, require, whole
from ferrum_jax.io.files.json_files import read_optional_json
from ferrum_jax.tasks.transcription.languages import code_of

FILE = "generation_config.json"
_TOKEN = whole(0)
_TOKENS = FieldKind(
    lambda value: isinstance(value, list) and all(map(_TOKEN.holds, value)), "a list of token ids, 0 or more"
)
_BY_NAME = FieldKind(
    lambda value: isinstance(value, dict) and len(value) > 0 and all(map(_TOKEN.holds, value.values())),
    "an object of names and token ids",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperTokens:
    """Tokens of a checkpoint.

    start: begins what the decoder writes. end: ends it. before: begins the text that stood before; None where there is
    no such token. languages: by code, and tasks: by name; both empty of a model of English alone. no_times: says that
    no times are written; the time 0 is the next id. suppressed: never drawn. suppressed_first: not drawn as the first
    of a text. most_first_time: steps that the first time is at most; None for any.
    """

    start: int
    end: int
    no_times: int
    before: int | None = None
    languages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    most_first_time: int | None = None

    @property
    def times_from(self) -> int:
        """The id of the time 0."""
        return self.no_times + 1

    def language_code(self, language: str) -> str:
        """The code of a language that the model has. Raises ValueError for another."""
        code = code_of(language)
        if not self.languages and code != "en":
            raise ValueError(f"language is {quoted(language)}, and this model hears English alone; leave it out")
        if self.languages and code not in self.languages:
            raise ValueError(f"language is {quoted(language)}; this model has {', '.join(sorted(self.languages))}")
        return code

    def asked(self, params: TranscriptionParams) -> tuple[list[int], Transcript]:
        """The prompt's tokens from `start` on, and the rules of what is drawn behind them.

        Raises ValueError for a language or a task that the model has not.
        """
        code = None if params.language is None else self.language_code(params.language)
        if not self.tasks and params.task != "transcribe":
            raise ValueError(
                f"task is {params.task!r}, and this model hears English alone, which it transcribes; leave it out"
            )
        has_times = params.timestamps is not False
        then = [self.tasks[params.task]] if self.tasks else []
        then += [] if has_times else [self.no_times]
        finds_language = code is None and bool(self.languages)
        prompt = [self.start] if finds_language or not self.languages else [self.start, self.languages[code or ""]]
        rules = Transcript(
            end_id=self.end,
            languages=tuple(sorted(self.languages.values())) if finds_language else (),
            then=tuple(then) if finds_language else (),
            suppressed=(*self.suppressed, self.no_times) if has_times else self.suppressed,
            suppressed_first=self.suppressed_first,
            stamps_from=self.times_from if has_times else None,
            most_first_stamp=self.most_first_time if has_times else None,
        )
        return prompt if finds_language else prompt + then, rules


def read_whisper_tokens(folder: str | Path) -> WhisperTokens | None:
    """The tokens that a checkpoint's folder names; None where its file says nothing of transcriptions.

    Raises ValueError naming the file and what is wrong with it.
    """
    path = Path(folder) / FILE
    given = read_optional_json(path)
    if given.get("no_timestamps_token_id") is None:
        return None
    try:
        return whisper_tokens_of(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; copy the file from the model's publisher") from error


def whisper_tokens_of(given: Mapping[str, Any]) -> WhisperTokens:
    """The tokens that a file's object names. Raises ValueError for a value that cannot be, and for one that lacks."""
    is_multilingual = require("is_multilingual", given.get("is_multilingual"), TRUTH)
    end = given.get("eos_token_id")
    optional = {name: given.get(name) for name in ("prev_sot_token_id", "max_initial_timestamp_index")}
    for name, value in optional.items():
        if value is not None:
            require(name, value, _TOKEN)
    lists = {
        name: tuple(require(name, [] if given.get(name) is None else given[name], _TOKENS))
        for name in ("suppress_tokens", "begin_suppress_tokens")
    }
    return WhisperTokens(
        start=require("decoder_start_token_id", given.get("decoder_start_token_id"), _TOKEN),
        end=require("eos_token_id", end[0] if isinstance(end, list) and len(end) == 1 else end, _TOKEN),
        no_times=require("no_timestamps_token_id", given["no_timestamps_token_id"], _TOKEN),
        before=optional["prev_sot_token_id"],
        languages=_languages(given) if is_multilingual else {},
        tasks=_tasks(given) if is_multilingual else {},
        suppressed=lists["suppress_tokens"],
        suppressed_first=lists["begin_suppress_tokens"],
        most_first_time=optional["max_initial_timestamp_index"],
    )


def _languages(given: Mapping[str, Any]) -> dict[str, int]:
    """Ids by code, of a file that has them as <|en|>."""
    found = require("lang_to_id", given.get("lang_to_id"), _BY_NAME)
    wrong = [name for name in found if not (name.startswith("<|") and name.endswith("|>") and len(name) > 4)]
    if wrong:
        raise ValueError(f"lang_to_id has {quoted(wrong[0])}; its names must be like '<|en|>'")
    return {name[2:-2]: token for name, token in found.items()}


def _tasks(given: Mapping[str, Any]) -> dict[str, int]:
    found = require("task_to_id", given.get("task_to_id"), _BY_NAME)
    missing = [name for name in TASKS if name not in found]
    if missing:
        raise ValueError(f"task_to_id has no {' and no '.join(missing)}")
    return {name: found[name] for name in TASKS}
