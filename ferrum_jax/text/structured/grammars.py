"""Grammars: compiled in a thread, once for all rows that ask for the same, the least recently used ones dropped.

Limits are counts (bytes, states, fuel), never times, so that the same requests fail everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ferrum_jax.inputs.params.schema import number_of, subschemas
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams, with_schemas
from ferrum_jax.text.structured.compiled_schema import NO_NUMBERS, compiled_schema
from ferrum_jax.text.structured.forms.tool_forms import ToolForm
from ferrum_jax.text.structured.matcher import Matcher, all_forced, tried, without_state
from ferrum_jax.text.structured.tool_grammar import tool_calls_grammar
from ferrum_jax.text.structured.trial_process import STACK_BYTES
from ferrum_jax.text.structured.vocabulary import Vocabulary, require_llguidance

if TYPE_CHECKING:
    import llguidance

_log = logging.getLogger("ferrum_jax.text.structured")  # a warning could be an error, on the engine's thread

MAX_GRAMMARS = 512
_THREADS = 2
_TRIALS, _TRIED_TOKENS = 4, 24  # texts that are begun when a grammar was compiled
MAX_STATES = 250_000
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": MAX_STATES,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# \u is not among them: a name that is written with it would pass for another than it is.
_ESCAPES = '"\\bfnrt'
_WHITE_SPACE = r"[ \n\r\t]{0,40}"  # bounded: a model that is unsure writes white space without end
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~]")  # of regular expressions
_MAX_COMPILED = 1 << 21  # bytes of parts of a schema that are compiled alone to say which one is at fault
ANY_OBJECT = '{"type":"object"}'


class Grammar:
    """A grammar that is being compiled, or is ready."""

    def __init__(self, vocabulary: Vocabulary, compiled: Future[llguidance.LLMatcher]) -> None:
        self._vocabulary = vocabulary
        self._compiled = compiled

    @property
    def is_ready(self) -> bool:
        return self._compiled.done()

    def fault(self) -> ValueError | None:
        """The compile's error, or None. Waits for the compile."""
        error = self._compiled.exception()
        if error is not None and not isinstance(error, ValueError):
            raise error
        return error

    def matcher(self, tokens: Sequence[int] = (), *, begins_after: Sequence[int] = (), forces: bool = True) -> Matcher:
        """A row's own matcher after the tokens that it has. Waits for the compile; raises its ValueError.

        forces: as of `Matcher.replay`.
        """
        matcher = Matcher(self._vocabulary, self._compiled.result().deep_copy(), begins_after=begins_after)
        matcher.replay(tokens, forces=forces)
        return matcher

    @functools.cached_property
    def beginning(self) -> list[int]:
        """The tokens with which every text begins, as the tokenizer writes them. Waits for the compile."""
        return all_forced(self.matcher())


class Grammars:
    """The grammars of one model. One thread asks; others compile."""

    def __init__(self, vocabulary: Vocabulary, form: ToolForm | None = None, *, most: int = MAX_GRAMMARS) -> None:
        """form: of the model's tool calls. most: compiled grammars that are kept."""
        self.vocabulary = vocabulary
        self._form = form
        self._most = most
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self.num_compiled = 0
        self.num_hits = 0

    def get(self, asked: StructuredOutputsParams) -> Grammar:
        """The grammar of a wish; its compile begins now, unless it is known. Raises ValueError for what has no text."""
        text = grammar_text(asked, self._form, self.vocabulary.specials)
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        grammar = self._kept.get(key)
        if grammar is None:
            self.num_compiled += 1
            for each in asked.warnings:
                _log.warning("structured_outputs: %s", each)
            before = threading.stack_size(2 * STACK_BYTES)  # of a thread that begins now
            grammar = Grammar(self.vocabulary, self._threads.submit(_compile, self.vocabulary, asked, text))
            threading.stack_size(before)
            self._kept[key] = grammar
        else:
            self.num_hits += 1
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return grammar


def _compile(vocabulary: Vocabulary, asked: StructuredOutputsParams, text: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of the grammar. Raises ValueError for one that a trial finds at fault."""
    fault = vocabulary.trials.fault(_trial, asked, text)
    if fault is not None:
        raise ValueError(fault)
    return _matcher(vocabulary, asked, text)


def _matcher(vocabulary: Vocabulary, asked: StructuredOutputsParams, text: str) -> llguidance.LLMatcher:
    matcher = require_llguidance().LLMatcher(vocabulary.tokens, text, log_level=0, limits=limits())
    if matcher.is_error():
        raise ValueError(_fault(asked, matcher.get_error()))
    return matcher


def _trial(vocabulary: Vocabulary, asked: StructuredOutputsParams, text: str) -> str | None:
    """Why a grammar cannot be used: it does not compile, allows nothing, or its texts soon meet a limit; else None."""
    try:
        matcher = _matcher(vocabulary, asked, text)
    except ValueError as error:
        return str(error)
    first = Matcher(vocabulary, matcher.deep_copy())
    if not first.fill(vocabulary.blank_masks(1)[0]):
        return f"structured_outputs.{asked.kind} cannot be met by any text: {first.error}"
    for seed in range(_TRIALS):
        error = tried(Matcher(vocabulary, matcher.deep_copy()), seed, most=_TRIED_TOKENS)
        if error is not None:
            return (
                f"structured_outputs.{asked.kind} compiles, and its texts soon meet a limit: {error}; say less with "
                "one pattern, or a smaller maxLength beside it"
            )
    return None


def _fault(asked: StructuredOutputsParams, error: str) -> str:
    message = without_state(error)
    shown = " ".join(message[:400].split())
    if asked.kind != "json":
        return f"structured_outputs.{asked.kind} does not compile: {shown}"
    place = place_of_fault(str(asked.json), json_options(asked), message)
    return f"the JSON schema does not compile{f', at {place}' if place else ''}: {shown}"


def limits() -> Any:
    """llguidance's limits for one grammar and each of its steps."""
    return require_llguidance().LLParserLimits(**_LIMITS)


def grammar_text(
    asked: StructuredOutputsParams, form: ToolForm | None = None, specials: Mapping[str, int] = MappingProxyType({})
) -> str:
    """The grammar. form: of the model's tool calls. specials: ids of special tokens. Raises ValueError without one."""
    library = require_llguidance()
    kind = asked.kind
    if kind == "json":
        return _schema_grammar(str(asked.json), json_options(asked))
    if kind == "json_object":
        return library.LLMatcher.grammar_from_json_schema(ANY_OBJECT, overrides=json_options(asked))
    if kind == "regex":
        return library.LLMatcher.grammar_from_regex(asked.regex)
    if kind == "choice":
        # one expression, since alternatives of a grammar would count as so many items of a step
        return library.LLMatcher.grammar_from_regex("|".join(map(escaped, asked.choice or ())))
    if kind == "structural_tag":
        return _structural_tag(str(asked.structural_tag))
    if kind == "tools":
        assert asked.tools is not None
        return library.LLMatcher.grammar_from_lark(tool_calls_grammar(asked.tools, form, json_options(asked), specials))
    try:
        return library.grammar_from("grammar", with_schemas(str(asked.grammar), compiled_schema))
    except Exception as error:  # of the conversion from GBNF
        raise ValueError(f"structured_outputs.grammar does not parse: {error}") from error


def json_options(asked: StructuredOutputsParams) -> dict[str, Any]:
    """How JSON is written, as the compiler's options."""
    options: dict[str, Any] = {"json_allowed_escapes": _ESCAPES}
    if asked.disable_any_whitespace:
        return options | {"whitespace_flexible": False}
    if asked.whitespace_pattern is not None:
        return options | {"whitespace_pattern": asked.whitespace_pattern}
    if asked.tools is not None:  # as templates show calls that came before
        return options | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return options | {"whitespace_pattern": _WHITE_SPACE}


def _schema_grammar(text: str, options: dict[str, Any]) -> str:
    """The grammar of a JSON schema. Raises ValueError for numbers that the compiler cannot read."""
    text = compiled_schema(text)
    schema = text if text.startswith("{") else f'{{"allOf":[{text}]}}'  # true and false take no options
    try:
        return require_llguidance().LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        raise ValueError(f"the JSON schema cannot be read: {error}; {NO_NUMBERS}") from error


def escaped(text: str) -> str:
    """A regular expression that matches this text alone."""
    return _META.sub(r"\\\g<0>", text)


def _structural_tag(text: str) -> str:
    """vLLM's structures and triggers. Raises ValueError naming what is wrong."""
    from llguidance import StructTag

    try:
        tag = json.loads(text, parse_float=number_of)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.structural_tag is not JSON: {error}") from error
    tag = tag if isinstance(tag, dict) else {}
    structures, triggers = tag.get("structures", []), tag.get("triggers", [])
    if not _are(structures, dict) or not _are(triggers, str):
        raise ValueError(
            "structured_outputs.structural_tag must have structures, a list of {begin, schema, end}, and triggers, a "
            f"list of texts, not {text[:200]}"
        )
    tags = [_tag(f"structural_tag.structures[{i}]", each, triggers) for i, each in enumerate(structures)]
    return StructTag.to_grammar(tags)


def _tag(place: str, structure: dict[str, Any], triggers: Sequence[str]) -> Any:
    from llguidance import StructTag

    begin, end, schema = structure.get("begin"), structure.get("end"), structure.get("schema")
    if not isinstance(begin, str) or not begin or not isinstance(end, str) or not isinstance(schema, dict):
        raise ValueError(f"{place} is {structure!r}; it must have begin and end, texts, and schema, an object")
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"{place}.begin is {begin!r}, and no trigger begins it; triggers are {list(triggers)}")
    checked = StructuredOutputsParams(json=schema)  # refuses keywords that are not enforced
    return StructTag(trigger=trigger, begin=begin, grammar=json.loads(compiled_schema(str(checked.json))), end=end)


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, kind) for value in values)


def place_of_fault(schema_text: str, options: dict[str, Any], message: str) -> str | None:
    """The place of the deepest part of a schema that alone has the fault; None where no part has it."""
    library = require_llguidance()
    schema = json.loads(schema_text)
    defined = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    found, left = None, _MAX_COMPILED
    for place, part in subschemas(schema):
        if not isinstance(part, dict):
            continue
        try:
            text = compiled_schema(json.dumps({**defined, **part}, ensure_ascii=False))
        except ValueError:  # what it refers to is elsewhere
            continue
        left -= len(text)
        if left < 0:
            break
        grammar = library.LLMatcher.grammar_from_json_schema(text, overrides=options)
        is_error, problems = library.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
        if is_error and problems[0].splitlines()[0] == message.splitlines()[0]:
            found = place
    return found
