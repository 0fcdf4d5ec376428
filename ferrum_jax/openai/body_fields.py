"""The fields of every body: which bodies take each and through which door, what it may be, and what it says.

Readers of bodies, their refusals (`body_rules.py`), the published schemas and the documentation's tables are made from
`FIELDS`. A null is a field that was not given. Doors are "row" (of a batch job) and "http".
"""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ferrum_jax.inputs.params.parameter import SAMPLED, TEXTS, Parameter
from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.ints import as_whole
from ferrum_jax.openai import value_schemas as of
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.sampling_params import MAX_LOGPROBS, MAX_NAMED_IDS, PARAMETERS

PAIRS = ("score", "rerank")
CLASSES = ("classification", "reward")
READING = ("embedding", *PAIRS, *CLASSES)  # bodies that read texts and generate none
_CHATS = ("chat", "response")
SOUNDS = ("transcription", "translation")
_OF_TEXTS = (*SAMPLED, *READING)
BODIES = (*_OF_TEXTS, *SOUNDS)
RESPONSE_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")  # of a sound's text
ROW_BODIES = {  # by their url
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embedding",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
    "/classify": "classification",
    "/pooling": "reward",
}
_TOKENIZED, _LOADED = ("tokenize",), ("load_adapter", "unload_adapter")  # of a server's other paths


class BodyField(NamedTuple):
    """on: the bodies that take it. schema: of its values.

    what: its values must be, as an error says it; "" where its reader does. door: the only one that takes it, "" for
    both.
    """

    on: tuple[str, ...]
    says: str
    schema: of.Schema = MappingProxyType({})
    what: str = ""
    door: str = ""


_FLAG: Any = (of.BOOLEAN, "true or false")
_COUNT: Any = (of.whole(1), "a whole number, 1 or more")
_PRIORITY: Any = (
    of.whole(1 - 2**31, 2**31 - 1),
    "a whole number from -2147483647 to 2147483647, and lower runs first",
)
_TIMEOUT: Any = ({"type": "number", "exclusiveMinimum": 0}, "a number of seconds, more than 0", "http")
REQUEST_ID = r"^[A-Za-z0-9_.:-]{1,128}$"
_REQUEST_ID: Any = ({"type": "string", "pattern": REQUEST_ID}, "1 to 128 letters, digits or any of _ . : -", "http")

_SCHEMAS: Mapping[str, of.Schema] = {  # of parameters that are no plain numbers in a body
    "max_tokens": of.whole(0),
    "logit_bias": of.BIASES,
    "stop": {"anyOf": [of.STRING, of.list_of(of.FILLED)]},
    "stop_token_ids": of.list_of({"type": "integer"}),
    "logprobs": {"anyOf": [of.whole(0, MAX_LOGPROBS), of.BOOLEAN]},
    "prompt_logprob_token_ids": of.one_of(
        of.IDS, of.list_of(of.list_of({"type": "integer"}, maxItems=MAX_NAMED_IDS), minItems=1)
    ),
    "truncate_prompt_tokens": of.one_of({"const": -1}, of.whole(1)),
    "structured_outputs": of.STRUCTURE,
    "allowed_token_ids": of.list_of({"type": "integer"}, minItems=1),
    "bad_words": of.list_of({"type": "string", "pattern": r"\S"}),
}


def _of_parameter(name: str, said: Parameter) -> BodyField:
    schema = _SCHEMAS.get(name, said.schema)
    assert schema is not None, f"{name} has parts: give _SCHEMAS its schema"
    return BodyField(said.bodies, said.text, schema, "true or false" if said.kind == "bool" else "")


FIELDS: Mapping[str, BodyField] = {
    # what is asked
    "prompt": BodyField(("completion", *_TOKENIZED), "a text, token ids, or a list of them", of.PROMPTS),
    "messages": BodyField(("chat", *_TOKENIZED), "the conversation", of.MESSAGES),
    "input": BodyField(("embedding", *CLASSES), "a text, token ids, or a list of them", of.PROMPTS),
    "tokens": BodyField(("detokenize",), "token ids", of.IDS),
    "text_1": BodyField(("score",), "one text, or as many as text_2 has", of.one_of(of.FILLED, of.DOCUMENTS)),
    "text_2": BodyField(("score",), "the texts that are compared with it", of.one_of(of.FILLED, of.DOCUMENTS)),
    "query": BodyField(("rerank",), "what documents are ranked for", of.FILLED, "a text that is not empty"),
    "documents": BodyField(("rerank",), "texts that are ranked", of.DOCUMENTS),
    # how much is generated, and how tokens are drawn
    **{name: _of_parameter(name, said) for name, said in PARAMETERS.items() if said.bodies},
    "max_completion_tokens": BodyField(("chat",), "another name of max_tokens", of.whole(1)),
    # its structure, its tools, its thoughts
    "response_format": BodyField(TEXTS, "the structure of the text, as OpenAI names it", of.FORMAT),
    "tools": BodyField((*_CHATS, *_TOKENIZED), "functions that may be called", of.TOOLS),
    "tool_choice": BodyField(_CHATS, "none, auto, required, or the function to call", of.TOOL_CHOICE),
    "parallel_tool_calls": BodyField(_CHATS, "whether several calls may come", of.BOOLEAN),
    "reasoning_effort": BodyField(("chat",), "how much the model thinks, for templates that read it", of.STRING),
    "include_reasoning": BodyField(("chat",), "whether the message has what the model thought", *_FLAG),
    # how the prompt is read
    "add_special_tokens": BodyField((*SAMPLED, *_TOKENIZED), "whether the tokenizer adds BOS and EOS", of.BOOLEAN),
    "chat_template_kwargs": BodyField((*_CHATS, *_TOKENIZED), "variables of the chat template", of.OBJECT),
    "add_generation_prompt": BodyField(("chat", *_TOKENIZED), "whether the template begins an answer", of.BOOLEAN),
    "continue_final_message": BodyField(("chat", *_TOKENIZED), "whether the last message goes on", of.BOOLEAN),
    "prompt_name": BodyField(
        ("embedding",), "which of the checkpoint's prompts stands before each text", of.STRING, "a string"
    ),
    "instruction": BodyField(PAIRS, "what makes a document fit, for models that are told", of.STRING, "a text"),
    "truncate": BodyField(READING, "cut texts that are too long", *_FLAG),
    # what the answer has
    "top_logprobs": BodyField(_CHATS, "how many alternatives at each token", of.whole(0, MAX_LOGPROBS)),
    "return_token_ids": BodyField(TEXTS, "give token ids too", *_FLAG),
    "return_tokens_as_token_ids": BodyField(TEXTS, 'log-probabilities name a token as "token_id:5"', *_FLAG),
    "encoding_format": BodyField(
        ("embedding",), "how vectors are written", {"enum": ["float", "base64"]}, "'float' or 'base64'"
    ),
    "dimensions": BodyField(("embedding",), "keep the beginning of each vector", *_COUNT),
    "pooling": BodyField(("embedding",), "mean, cls or last, as far as the model can", of.STRING, "a string"),
    "normalize": BodyField(("embedding",), "whether vectors have length 1", *_FLAG),
    "top_n": BodyField(("rerank",), "how many documents the answer has", *_COUNT),
    "return_documents": BodyField(("rerank",), "whether the answer has their texts", *_FLAG),
    # who asks, and how and when it runs
    "model": BodyField(
        (*BODIES, *_TOKENIZED, "detokenize"),
        "the model's name, or an adapter's",
        of.FILLED,
        "the name of a model, or be left out",
    ),
    "adapter": BodyField(TEXTS, "an adapter's name", of.FILLED, "the name of an adapter, or be left out", "row"),
    "cache_salt": BodyField(_OF_TEXTS, "prompts share cached blocks only under one salt", of.FILLED),
    "stream": BodyField(SAMPLED, "send the text as it comes", *_FLAG, door="http"),
    "stream_options": BodyField(SAMPLED, "include_usage, continuous_usage_stats", of.OBJECT, door="http"),
    "priority": BodyField(BODIES, "lower runs first", *_PRIORITY),
    "timeout": BodyField(BODIES, "seconds after which the request is given up", *_TIMEOUT),
    "request_id": BodyField(TEXTS, "the answer's name", *_REQUEST_ID),
    # of a server's other paths
    "return_token_strs": BodyField(_TOKENIZED, "give each token's text too", *_FLAG),
    "lora_name": BodyField(_LOADED, "the adapter's name", of.FILLED),
    "lora_path": BodyField(("load_adapter",), "its folder, below the adapter root", of.FILLED),
    "load_inplace": BodyField(("load_adapter",), "whether it may replace one of that name", *_FLAG),
    "base_model_name": BodyField(("load_adapter",), "the model's name", of.FILLED),
    "lora_int_id": BodyField(("unload_adapter",), "changes nothing"),
    "path": BodyField(("update_weights",), "the folder of the weights, below the weights root", of.FILLED),
    "requests": BodyField(
        ("update_weights",),
        "what becomes of those that run; without it the server refuses while any do",
        {"enum": ["abort", "wait", "keep"]},
        "'abort', 'wait' or 'keep'",
    ),
    "input_file_id": BodyField(("batch",), "the file that holds its rows", of.FILLED, "the id of a file"),
    "endpoint": BodyField(("batch",), "the path that answers its rows", of.FILLED, "a path, as /v1/chat/completions"),
    "completion_window": BodyField(("batch",), "in which it must end, as 24h", of.FILLED, "a time, as 24h"),
    # what changes nothing
    **{
        name: BodyField(_OF_TEXTS, "changes nothing") for name in ("user", "prompt_cache_key", "prompt_cache_retention")
    },
    "verbosity": BodyField(("chat",), "changes nothing", of.STRING),
    "metadata": BodyField((*_OF_TEXTS, "batch"), "changes nothing; a batch tells it again"),
    "safety_identifier": BodyField(_OF_TEXTS, "changes nothing", door="http"),
    "service_tier": BodyField(_OF_TEXTS, "flex takes only what others leave; others change nothing", door="http"),
}
OF_RESPONSES: Mapping[str, BodyField] = {  # what /v1/responses names otherwise
    name: BodyField(("response",), says, schema)
    for name, (says, schema) in {
        "input": ("a text, or the items so far", {"anyOf": [of.FILLED, of.list_of(of.OBJECT, minItems=1)]}),
        "instructions": ("a system message before them", of.STRING),
        "tools": ("functions that may be called", of.list_of(of.OBJECT)),
        "tool_choice": ("none, auto, required, or the function to call", of.one_of(of.STRING, of.OBJECT)),
        "max_output_tokens": ("most tokens to generate", of.whole(1)),
        "text": ("format: the structure of the text", of.OBJECT),
        "reasoning": ("effort: how much the model thinks; what it thought comes whole, with any summary", of.OBJECT),
        "include": ("message.output_text.logprobs; OpenAI's other names change nothing", of.list_of(of.STRING)),
        "truncation": ("auto keeps the end of what is too long; disabled refuses it", {"enum": ["auto", "disabled"]}),
    }.items()
}
OF_SOUNDS: Mapping[str, BodyField] = {  # what transcriptions and translations have of their own
    "file": BodyField(SOUNDS, "the sound: a file of the form; of a row a URL, or a path below the root", of.FILLED),
    "language": BodyField(SOUNDS, "that is spoken, as de or german; found out where it is not given", of.FILLED),
    "prompt": BodyField(SOUNDS, "a text that is taken to stand before", of.STRING),
    "response_format": BodyField(SOUNDS, "how the answer is written", {"enum": list(RESPONSE_FORMATS)}),
    "timestamp_granularities": BodyField(
        SOUNDS, "segment, for verbose_json", of.list_of({"enum": ["segment"]}), "['segment']"
    ),
    "temperature": BodyField(SOUNDS, "0 is greedy, the default", PARAMETERS["temperature"].schema or {}),
    "seed": BodyField(SOUNDS, "the same seed draws the same tokens", PARAMETERS["seed"].schema or {}),
    "max_tokens": BodyField(SOUNDS, "most tokens of each window", of.whole(1)),
    "stream": BodyField(SOUNDS, "send the text as it comes", *_FLAG, door="http"),
}
LABELS = frozenset(
    {"model", "user", "metadata", "prompt_cache_key", "prompt_cache_retention", "verbosity"}
)  # by definition without effect on the answer


def fields_of(body: str, door: str) -> dict[str, BodyField]:
    """The fields that a body, one of those above, may have when it comes through a door."""
    found = {name: field for name, field in FIELDS.items() if body in field.on and field.door in ("", door)}
    if body in SOUNDS:
        found |= {name: field for name, field in OF_SOUNDS.items() if field.door in ("", door)}
    return found | (OF_RESPONSES if body == "response" else {})  # type: ignore[operator]


def given(body: Mapping[str, Any], name: str) -> Any:
    """The value of a field; None where it is not given. Raises FieldError for one that it may not have."""
    value = body.get(name)
    value = as_whole(value) if FIELDS[name].schema.get("type") == "integer" else value
    if value is not None and not _fits(value, FIELDS[name].schema):
        raise FieldError(f"{name} is {quoted(value)}; it must be {FIELDS[name].what}", name)
    return value


_TYPES = {"boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,)}


def _fits(value: Any, schema: of.Schema) -> bool:
    """Whether a plain value is one of the schema's, which has no parts."""
    if "enum" in schema:
        return value in schema["enum"]
    if type(value) not in _TYPES[schema["type"]]:
        return False
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and (
            "pattern" not in schema or is_like(value, schema["pattern"])
        )
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return least <= value <= most and value > schema.get("exclusiveMinimum", -math.inf)


def is_like(text: str, pattern: str) -> bool:
    """Whether the pattern of a schema is that of the whole text."""
    return re.fullmatch(pattern, text) is not None
