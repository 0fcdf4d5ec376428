"""Bodies to what they ask for (`asked.py`), whatever the door, checked before anything is queued.

How something is asked for is read apart from what it is about. Every error names its field.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ferrum_jax.core.request import FLEX
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import VECTOR_ARGUMENTS, Content, Prompt, joined_text, named_text, take_apart
from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai import asked
from ferrum_jax.openai.body_fields import CLASSES, PAIRS, RESPONSE_FORMATS, SOUNDS, given
from ferrum_jax.openai.body_rules import Rules, rules_of
from ferrum_jax.openai.contents import prompts_of
from ferrum_jax.openai.errors import FieldError, naming_fields
from ferrum_jax.openai.sampling_fields import prompt_options, sampling_values
from ferrum_jax.sampling_params import WHOLE_VOCABULARY, SamplingParams

_TIMED = ("srt", "vtt", "verbose_json")  # formats that show times
_STREAMED = ("json", "verbose_json")
_STREAM_OPTIONS = ("continuous_usage_stats", "include_usage")


def sound_of(body: Mapping[str, Any], *, kind: str) -> asked.AskedSound:
    """How a body asks, without its file. kind: "transcription" or "translation".

    Raises ValueError for the first thing that is wrong.
    """
    answer = body.get("response_format")
    answer = "json" if answer is None else answer
    if answer not in RESPONSE_FORMATS:
        raise ValueError(
            f"response_format is {quoted(answer)}; it must be one of {', '.join(map(repr, RESPONSE_FORMATS))}"
        )
    _check_times(body.get("timestamp_granularities"), answer)
    streams = body.get("stream") is True
    if body.get("stream") not in (None, True, False):
        raise ValueError(f"stream is {quoted(body['stream'])}; it must be true or false")
    if streams and answer not in _STREAMED:
        raise ValueError(
            f"response_format is {answer!r} beside stream, which is one of {' and '.join(map(repr, _STREAMED))}; leave "
            "one of them out"
        )
    temperature = 0.0 if body.get("temperature") is None else body["temperature"]
    params = TranscriptionParams(
        language=body.get("language"),
        task="translate" if kind == "translation" else "transcribe",
        timestamps="segment" if answer in _TIMED else False,
        prompt=body.get("prompt") or None,
        temperature=temperature,
        seed=body.get("seed"),
        max_tokens=body.get("max_tokens"),
        logprobs=answer == "verbose_json",
    )
    return asked.AskedSound(
        params=SamplingParams(temperature=temperature, seed=params.seed, max_tokens=params.max_tokens),
        how=params,
        response_format=answer,
        streams=streams,
        model=given(body, "model"),
        priority=given(body, "priority") or 0,
        timeout_s=given(body, "timeout"),
    )


def _check_times(wanted: object, answer: str) -> None:
    """Raises ValueError for times that are not made, or that the answer does not show."""
    if wanted in (None, []):
        return
    if not isinstance(wanted, list) or not all(isinstance(each, str) for each in wanted):
        raise ValueError(f"timestamp_granularities is {quoted(wanted)}; it must be a list such as ['segment']")
    if "word" in wanted:
        raise ValueError("timestamp_granularities has 'word'; times of words are not made here: give ['segment']")
    if set(wanted) != {"segment"}:
        raise ValueError(f"timestamp_granularities is {quoted(wanted)}; it must be ['segment']")
    if answer != "verbose_json":
        raise ValueError(
            f"timestamp_granularities is given, and response_format is {answer!r}; set that to 'verbose_json'"
        )


# -- over HTTP -------------------------------------------------------------------------------------------


def asked_text(body: Mapping[str, Any], limits: asked.BodyLimits, *, is_chat: bool) -> asked.AskedText:
    """The request of a completion's or a chat's body. Raises FieldError for the first thing that is wrong."""
    body, warnings = known_fields(body, rules_of("chat" if is_chat else "completion", "http"), limits)
    with naming_fields(body):
        how = text_of(body, is_chat=is_chat)
        params, name = how["params"], "messages" if is_chat else "prompt"
        if how["streams"] and params.scores_prompt:
            raise ValueError(
                "stream is true beside log-probabilities of the prompt, which come with the whole; leave it out"
            )
        if params.prompt_logprobs == WHOLE_VOCABULARY:
            raise ValueError("prompt_logprobs is -1, the whole vocabulary of each token, which is not sent over HTTP")
        contents = prompts_of(name, _required(body, name), limits.max_prompts)
        _check_choices(len(contents), params.n, limits)
        how |= {
            "prompts": tuple([take_apart(with_options(content, how["options"])) for content in contents]),
            "returns_token_ids": how["returns_token_ids"] is True or not params.detokenize,
            "echoed": _continued(contents[0]) if how["echo"] and is_chat else "",
            "warnings": (*warnings, *(params.structured_outputs.warnings if params.structured_outputs else ())),
        }
        return asked.AskedText(**how)


def asked_reading(body: Mapping[str, Any], limits: asked.BodyLimits, *, kind: str) -> Any:
    """The request of a body whose texts are read. kind: of READING. Raises FieldError for the first wrong field."""
    body, warnings = known_fields(body, rules_of(kind, "http"), limits)
    with naming_fields(body):
        how = dataclasses.replace(how_of(kind, body), warnings=warnings)
        if kind in PAIRS:
            left, right = sides_of(body, ranks=kind == "rerank", most=limits.max_prompts)
            return dataclasses.replace(how, left=left, right=right)
        contents = prompts_of("input", _required(body, "input"), limits.max_prompts)
        prompts = tuple(each if isinstance(each, str) else list(each) for each in contents)
        return dataclasses.replace(how, prompts=prompts)


def asked_sound(body: Mapping[str, Any], limits: asked.BodyLimits, *, kind: str) -> asked.AskedSound:
    """The request of a form. kind: "transcription" or "translation". Raises FieldError for the first wrong field."""
    body, warnings = known_fields(body, rules_of(kind, "http"), limits)
    with naming_fields(body):
        if not isinstance(body.get("file"), bytes):
            raise FieldError(f"file is {quoted(body.get('file'))}; it must be a file of the form", "file")
        return dataclasses.replace(sound_of(body, kind=kind), prompts=(body["file"],), warnings=warnings)


def known_fields(
    body: Mapping[str, Any], rules: Rules, limits: asked.BodyLimits
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The body without what is to be ignored, and a warning for each field of that."""
    if not limits.ignores_unknown:
        rules.refuse(body)
        return body, ()
    problems = dict.fromkeys(rules.problems(body))
    return {name: value for name, value in body.items() if name not in problems}, tuple(
        f"{name} was ignored" for name in problems
    )


def _required(body: Mapping[str, Any], name: str) -> Any:
    if body.get(name) is None:
        raise FieldError(f"{name} is missing; the body must have it", name)
    return body[name]


def _check_choices(count: int, n: int, limits: asked.BodyLimits) -> None:
    if n > limits.max_n:
        raise FieldError(f"n is {n}; at most {limits.max_n} choices are made of a prompt here", "n")
    if n * count > limits.max_prompts:
        raise FieldError(f"n is {n} of {count} prompts; at most {limits.max_prompts} choices are made at once", "n")


def _continued(messages: Any) -> str:
    """The beginning of a chat's echo: the assistant's message that goes on."""
    return (joined_text(messages[-1]["content"]) or "") if messages[-1]["role"] == "assistant" else ""


# -- how it is asked for, through any door ---------------------------------------------------------------


def how_of(kind: str, body: Mapping[str, Any]) -> Any:
    """How a body of a kind asks, without what it asks about; its fields are known. Raises ValueError."""
    if kind in SOUNDS:
        return sound_of(body, kind=kind)
    if kind in PAIRS:
        return scores_of(body, ranks=kind == "rerank")
    if kind in CLASSES:
        options = _cut_of(body) | _salt_of(body)
        return (asked.AskedRewards if kind == "reward" else asked.AskedClasses)(options=options, **_of_all(body))
    return vectors_of(body) if kind == "embedding" else asked.AskedText(**text_of(body, is_chat=kind == "chat"))


def text_of(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """The fields of an AskedText."""
    params = SamplingParams.from_dict(sampling_values(body, is_chat=is_chat))
    streams = given(body, "stream") is True
    of_stream = _stream_options(body, streams=streams)
    return dict(
        params=params,
        options=prompt_options(body, is_chat=is_chat),
        is_chat=is_chat,
        streams=streams,
        includes_usage=of_stream.get("include_usage", False),
        usage_in_every_chunk=of_stream.get("continuous_usage_stats", False),
        returns_token_ids=given(body, "return_token_ids"),
        form=asked.AnswerOptions(
            ids_as_names=given(body, "return_tokens_as_token_ids") is True,
            shows_reasoning=given(body, "include_reasoning") is not False,
            num_tops=params.logprobs,
        ),
        echo=given(body, "echo") is True,
        generates=not (params.echo and body.get("max_tokens") == 0),
        request_id=given(body, "request_id"),
        **_of_all(body),
    )


def vectors_of(body: Mapping[str, Any]) -> asked.AskedVectors:
    form = asked.ReadingForm(
        as_base64=given(body, "encoding_format") == "base64",
        dimensions=given(body, "dimensions"),
    )
    options = {name: value for name in VECTOR_ARGUMENTS if (value := given(body, name)) is not None}
    return asked.AskedVectors(options=options | _salt_of(body), form=form, **_of_all(body))


def scores_of(body: Mapping[str, Any], *, ranks: bool) -> asked.AskedScores:
    form = asked.ReadingForm(top_n=given(body, "top_n"), shows_documents=given(body, "return_documents") is not False)
    options: dict[str, Any] = _cut_of(body)
    if given(body, "instruction") is not None:
        options["instruction"] = body["instruction"]
    return asked.AskedScores(options=options | _salt_of(body), form=form, ranks=ranks, **_of_all(body))


def sides_of(
    body: Mapping[str, Any], *, ranks: bool, most: int | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The texts that are compared. most: that are taken of each side; None for any number. Raises FieldError."""
    if not ranks:
        left, right = (_texts(name, body.get(name), most) for name in ("text_1", "text_2"))
        if len(left) not in (1, len(right)):
            message = f"text_1 has {len(left)} texts and text_2 has {len(right)}; give one, or as many as text_2 has"
            raise FieldError(message, "text_1")
        return left, right
    query, documents = body.get("query"), body.get("documents")
    if not isinstance(query, str) or not query:
        raise FieldError(f"query is {quoted(query)}; it must be a text that is not empty", "query")
    if not isinstance(documents, list):
        raise FieldError(f"documents is {quoted(documents)}; it must be a list of texts", "documents")
    return (query,), _texts("documents", documents, most)


def _texts(name: str, given: object, most: int | None) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise FieldError(f"{name} is {quoted(given)}; it must be a text or a list of texts, none of them empty", name)
    if most is not None and len(texts) > most:
        raise FieldError(f"{name} has {len(texts)} texts; at most {most} are taken at once", name)
    found: list[Any] = [each["text"] if isinstance(each, dict) and set(each) == {"text"} else each for each in texts]
    for index, text in enumerate(found):
        if not isinstance(text, str) or not text:
            place = name if isinstance(given, str) else f"{name}[{index}]"
            raise FieldError(f"{place} is {quoted(text)}; it must be a text that is not empty", place)
    return tuple(found)


def with_options(content: Content, options: Mapping[str, Any]) -> Prompt:
    """The content together with the options that a body gives for it. Raises ValueError for an option."""
    return take_apart({**named_content(content), **options}) if options else content


def named_content(content: Content) -> dict[str, Any]:
    """The content under its name in mappings of `ferrum_jax.inputs.prompt`."""
    is_text = isinstance(content, str)
    return {"prompt" if is_text else "messages" if isinstance(content[0], dict) else "prompt_token_ids": content}


def _of_all(body: Mapping[str, Any]) -> dict[str, Any]:
    """Which model is asked, and when it is to run."""
    return {
        "model": given(body, "model"),
        "priority": FLEX if body.get("service_tier") == "flex" else given(body, "priority") or 0,
        "timeout_s": given(body, "timeout"),
    }


def _cut_of(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"truncate": True} if given(body, "truncate") is True else {}


def _salt_of(body: Mapping[str, Any]) -> dict[str, Any]:
    salt = named_text("cache_salt", body.get("cache_salt"))
    return {"cache_salt": salt} if salt else {}


def _stream_options(body: Mapping[str, Any], *, streams: bool) -> Mapping[str, bool]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not streams:
        raise FieldError("stream_options is given without stream; set stream to true", "stream_options")
    if not isinstance(options, dict):
        raise FieldError(f"stream_options is {quoted(options)}; it must be an object", "stream_options")
    unknown = sorted(set(options) - {*_STREAM_OPTIONS})
    if unknown:
        known = ", ".join(_STREAM_OPTIONS)
        raise FieldError(f"stream_options has {quoted(unknown)}; known are {known}", f"stream_options.{unknown[0]}")
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            place = f"stream_options.{name}"
            raise FieldError(f"{place} is {quoted(value)}; it must be true or false", place)
    return {name: value is True for name, value in options.items()}
