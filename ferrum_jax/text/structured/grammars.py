"""Grammars: compiled in a thread, once for all rows that ask for the same, the least recently used ones dropped."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.text.structured.forms.tool_forms import ToolForm
from ferrum_jax.text.structured.grammar_text import grammar_text, json_options, limits, place_of_fault
from ferrum_jax.text.structured.matcher import Matcher, all_forced, tried, without_state
from ferrum_jax.text.structured.trial_process import STACK_BYTES
from ferrum_jax.text.structured.vocabulary import Vocabulary, require_llguidance

if TYPE_CHECKING:
    import llguidance

_log = logging.getLogger("ferrum_jax.text.structured")  # a warning could be an error, on the engine's thread

MOST_GRAMMARS = 512
_THREADS = 2
_TRIALS, _TRIED_TOKENS = 4, 24  # texts that are begun when a grammar was compiled


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

    def __init__(self, vocabulary: Vocabulary, form: ToolForm | None = None, *, most: int = MOST_GRAMMARS) -> None:
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
