"""SamplingParams: how the tokens of a request are drawn and when it ends, checked when it is made.

Names and defaults are vLLM's, so that programs need few changes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.transcript import Transcript
from ferrum_jax.io.error_text import Elsewhere, named, quoted, require_harmless
from ferrum_jax.io.ints import as_plain, as_whole

MAX_LOGPROBS = 20

WHOLE_VOCABULARY = -1  # in place of a number of log-probabilities

MAX_NAMED_IDS, MOST_NAMED_SCORES = 128, 1 << 22  # tokens that are scored at one token of a prompt, and at all of them

MAX_LOGIT_BIAS = 300

MAX_STOP_IDS = 16

MAX_STOPS, MOST_STOP_CHARACTERS = 64, 256  # 16,384 states of their automaton, which takes 20 ms to make

MAX_BAD_WORDS, MOST_WORD_CHARACTERS = 300, 256

MAX_TOKEN_IDS = 1 << 18  # in a list; no fewer than the tokens of the largest vocabularies

GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")  # of a model's own file

PACE = frozenset({"speculative", "priority"})  # how soon an answer comes: no part of what identifies a row or a job

Made = TypeVar("Made")

SAMPLING_ELSEWHERE: Mapping[str, Elsewhere] = {
    "best_of": Elsewhere((None, 1), "ask for n choices with logprobs and keep the best"),
    "use_beam_search": Elsewhere((None, False), "ask for n choices with logprobs and keep the best"),
    "logits_processors": Elsewhere(
        (None, [], ()), "logit_bias, allowed_token_ids, bad_words and structured_outputs change what may be drawn"
    ),
    "guided_decoding": Elsewhere((None,), "structured_outputs=StructuredOutputsParams(...) has its fields"),
    "spaces_between_special_tokens": Elsewhere((None, True), "texts are as the tokenizer writes them: leave it out"),
    "output_kind": Elsewhere((None,), "LLM.generate gives whole outputs, AsyncLLM.stream what is new: leave it out"),
    "extra_args": Elsewhere((None, {}), "each parameter has a field of its own: leave it out"),
}


def _with_other_names(cls: type[Made]) -> type[Made]:
    """The class, which takes names of SAMPLING_ELSEWHERE with harmless values, and says which names it has."""
    make = cls.__init__

    @functools.wraps(make)
    def init(self: Made, *args: Any, **given: Any) -> None:
        for name in given.keys() & SAMPLING_ELSEWHERE.keys():
            require_harmless(name, given.pop(name), SAMPLING_ELSEWHERE)
        unknown = [name for name in given if name not in _FIELDS]
        if unknown:
            raise TypeError(f"SamplingParams has no {named(unknown)}; it has {', '.join(sorted(_FIELDS))}")
        make(self, *args, **given)
        object.__setattr__(self, "_given", frozenset(given))

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_with_other_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    max_tokens: most tokens to generate; None means up to `max_model_len`, and at most max_new_tokens if that is given.
    min_tokens: how many are generated before an end token, one of stop_token_ids or a stop string may end the text.
    temperature: 0 is greedy. min_p is applied first, then top_k, then top_p, as in vLLM. top_k: 0 or -1 is off.
    repetition_penalty counts prompt and output; presence and frequency penalties count output only.
    seed: any 64-bit integer; None takes one from the engine's seed and the request's content.
    logprobs / prompt_logprobs: how many alternatives to report; 0 reports only the chosen token, and of the prompt -1
    reports every token of the vocabulary. They are taken from the model's own distribution, before bias, penalties and
    temperature.
    prompt_logprob_token_ids: tokens whose log-probabilities are reported at each token of the prompt behind
    prompt_logprob_start, at most 128: one list for all of them, or a list for each, such as those that another model
    holds likely there. Tokens up to prompt_logprob_start may come from the prefix cache.
    truncate_prompt_tokens: keep only this many prompt tokens, the last ones; -1 keeps as many as leave room for
    max_tokens (or for one token if that is None) in max_model_len.
    stop: at most 64 strings, each of at most 256 characters.
    logit_bias: of at most 300 tokens, from -100 to 100, or minus infinity, which forbids the token.
    allowed_token_ids: only these may be drawn, end tokens among them; None allows all. bad_words: texts that may not be
    written; the last token of one is forbidden where those before it have come.
    detokenize: False gives no text and needs no tokenizer. echo: the text begins with the prompt's.
    speculative: False drafts no tokens for it where the engine's speculative_config does; the answer is the same.
    structured_outputs: the structure that the text must have. Log-probabilities are those of the tokens that it,
    allowed_token_ids and bad_words allow. transcript: the rules under which a sound is written down; see
    `LLM.transcribe`, which makes them.

    Raises ValueError with the field, its value and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = 16
    max_new_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
    prompt_logprob_start: int = 0
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    echo: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    speculative: bool = True
    transcript: Transcript | None = None

    def __post_init__(self) -> None:
        for field, value in self._plain_values():
            object.__setattr__(self, field, value)
        for field, low, high, what in RANGES:
            _check_number(field, getattr(self, field), low, high, what)
        for field in _WHOLE:
            if getattr(self, field) is not None or field in _NEEDED:
                _check_int(field, getattr(self, field))
        for field in _FLAGS:
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} is {quoted(getattr(self, field))}; it must be true or false")
        self._check_optional()
        self._check_lists()

    def _plain_values(self) -> Iterator[tuple[str, Any]]:
        """Fields with numbers of other libraries, or None for an empty list as in vLLM, as what they are here."""
        for field in {*_WHOLE, *(name for name, *_ in RANGES)}:
            yield field, (as_whole if field in _WHOLE else as_plain)(getattr(self, field))
        for field in ("stop_token_ids", "allowed_token_ids", "prompt_logprob_token_ids"):
            yield field, _whole_ids(getattr(self, field))
        if isinstance(self.stop, str):
            yield "stop", (self.stop,)
        for field in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, field) is None:
                yield field, ()
        if isinstance(self.logit_bias, Mapping):
            yield "logit_bias", {as_whole(token): as_plain(value) for token, value in self.logit_bias.items()}

    def _check_optional(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        for field in ("logprobs", "prompt_logprobs"):
            value, lowest = getattr(self, field), WHOLE_VOCABULARY if field == "prompt_logprobs" else 0
            if value is not None and not lowest <= value <= MAX_LOGPROBS:
                every = ", or -1 for the whole vocabulary" if lowest else ""
                raise ValueError(f"{field} is {value}; it must be between 0 and {MAX_LOGPROBS}{every}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        kept = self.truncate_prompt_tokens
        if kept is not None and kept < 1 and kept != -1:
            raise ValueError(f"truncate_prompt_tokens is {kept}; it must be at least 1, or -1 for as many as fit")
        if not self.detokenize and (self.stop or self.echo):
            raise ValueError(f"detokenize is False beside {'stop' if self.stop else 'echo'}, which needs the text")
        if self.seed is not None:
            _check_seed(self.seed)
        if self.structured_outputs is not None:
            self._check_structure(self.structured_outputs)
        if self.transcript is not None and not isinstance(self.transcript, Transcript):
            raise ValueError(f"transcript is {quoted(self.transcript)}; it must be a Transcript")

    def _check_structure(self, asked: object) -> None:
        if isinstance(asked, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.from_dict(asked))
        elif not isinstance(asked, StructuredOutputsParams):
            raise ValueError(f"structured_outputs is {quoted(asked)}; it must be a StructuredOutputsParams")
        if self.ignore_eos:
            raise ValueError("ignore_eos is True beside structured_outputs, whose text ends with an end token")

    def _check_lists(self) -> None:
        for field, kinds, what in _COLLECTIONS:
            if not isinstance(getattr(self, field), kinds):
                raise ValueError(f"{field} is {quoted(getattr(self, field))}; it must be {what}")
        _check_texts("stop", self.stop, MAX_STOPS, MOST_STOP_CHARACTERS, "string that is not empty")
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MOST_WORD_CHARACTERS, "text that is not blank")
        _check_named_ids(self.prompt_logprob_token_ids, self.prompt_logprob_start)
        for field in ("stop_token_ids", "allowed_token_ids"):
            _check_ints(field, getattr(self, field))
        if len(set(self.stop_token_ids)) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids holds {len(set(self.stop_token_ids))} ids; at most {MAX_STOP_IDS} are allowed"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty; give at least one token id, or leave it out")
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias holds {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
        for token, value in bias.items():
            _check_int("logit_bias key", token)
            if value != -math.inf:
                _check_number(f"logit_bias[{token}]", value, -100.0, 100.0, "between -100 and 100, or minus infinity")

    @property
    def needs_mask(self) -> bool:
        """Whether its tokens are drawn under masks that the host makes."""
        asks = (self.structured_outputs, self.allowed_token_ids, self.transcript)
        return any(each is not None for each in asks) or bool(self.bad_words)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities are reported at tokens of its prompt."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    @property
    def named_rows(self) -> Sequence[Sequence[int]]:
        """The lists of prompt_logprob_token_ids; one that is for all tokens stands alone."""
        asked: Any = self.prompt_logprob_token_ids or ()
        return asked if not asked or isinstance(asked[0], Sequence) else (asked,)

    def most_prompt_tokens(self, max_model_len: int) -> int | None:
        """How many tokens are kept at the end of a longer prompt; None keeps all."""
        if self.truncate_prompt_tokens == -1:
            return max(1, max_model_len - (self.max_tokens or 1))
        return self.truncate_prompt_tokens

    def over(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """These parameters, and for those that were not given a model's own defaults; further ones add nothing.

        defaults: of GENERATION. A max_tokens of None takes max_new_tokens, which bounds a text that has less room too.
        """
        own = {name: getattr(self, name) for name in self.__dict__["_given"]}
        if "max_new_tokens" in defaults and own.get("max_tokens") is None:
            own["max_tokens"] = None
        found = SamplingParams(**{**defaults, **own})
        object.__setattr__(found, "_given", _FIELDS)
        return found

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with this seed. Only the seed is checked again."""
        seed = as_whole(seed)
        _check_int("seed", seed)
        _check_seed(seed)
        found = object.__new__(SamplingParams)
        found.__dict__.update(self.__dict__, seed=seed, _given=self.__dict__["_given"] | {"seed"})
        return found

    def without_min_tokens(self) -> SamplingParams:
        """The same parameters but for min_tokens, which masks see to where there are some."""
        found = object.__new__(SamplingParams)
        found.__dict__.update(self.__dict__, min_tokens=0)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a JSON object. Raises ValueError naming every key that is not known."""
        unknown = sorted(set(values) - _FIELDS - set(SAMPLING_ELSEWHERE))
        if unknown:
            raise ValueError(f"unknown sampling parameters {quoted(unknown)}; known are {sorted(_FIELDS)}")
        return cls(**values)


_MOST = sys.float_info.max  # the bound of parameters that have no other: they must be finite

RANGES = (
    ("n", 1, 4096, "between 1 and 4096"),
    ("min_tokens", 0, _MOST, "0 or more"),
    ("prompt_logprob_start", 0, _MOST, "0 or more"),
    ("temperature", 0.0, _MOST, "0 (greedy) or more"),
    ("top_k", -1, _MOST, "-1 or 0 (off) or more"),
    ("top_p", 5e-324, 1.0, "more than 0 and at most 1"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("repetition_penalty", 5e-324, _MOST, "more than 0"),
    ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
)

_NEEDED = ("n", "min_tokens", "top_k", "prompt_logprob_start")
_WHOLE = (*_NEEDED, "max_tokens", "max_new_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_FLAGS = ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "detokenize", "echo", "speculative")

_COLLECTIONS = (
    ("stop", Sequence | Set, "a string or a list of strings"),
    ("stop_token_ids", Sequence | Set, "a list of token ids"),
    ("logit_bias", Mapping | None, "a mapping of token id to bias"),
    ("allowed_token_ids", Sequence | Set | None, "a list of token ids"),
    ("bad_words", list | tuple | Set, "a list of texts"),
)

_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams))


def _check_number(field: str, value: object, low: float, high: float, what: str) -> None:
    if isinstance(value, int) and abs(value) > _MOST:
        raise ValueError(f"{field} is a whole number of {value.bit_length()} bits, too large; it must be {what}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # NaN is refused too
        raise ValueError(f"{field} is {quoted(value)}; it must be {what}")


def _whole_ids(ids: Any) -> Any:
    """Token ids, or lists of them, as ints of Python where they are whole numbers of another kind."""
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, list | tuple | Set) or set(map(type, ids)) <= {int}:
        return as_whole(ids)
    return type(ids)(map(_whole_ids, ids))  # type: ignore[call-arg]


def _check_ints(field: str, values: Collection[object] | None) -> None:
    if values is not None and len(values) > MAX_TOKEN_IDS:
        raise ValueError(f"{field} holds {len(values):,} ids; at most {MAX_TOKEN_IDS:,} are allowed")
    if values and set(map(type, values)) != {int}:
        for value in values:
            _check_int(field, value)


def _check_named_ids(asked: object, start: int) -> None:
    field = "prompt_logprob_token_ids"
    if asked is None:
        if start:
            raise ValueError(f"prompt_logprob_start is {start} without {field}, whose tokens it says; leave it out")
        return
    if not isinstance(asked, list | tuple) or not asked:
        raise ValueError(f"{field} is {quoted(asked)}; it must be a list of token ids, or a list of such lists")
    rows = asked if all(isinstance(row, list | tuple) for row in asked) else (asked,)
    for row in rows:
        if len(row) > MAX_NAMED_IDS:
            raise ValueError(f"{field} holds a list of {len(row):,} ids; at most {MAX_NAMED_IDS} are scored at a token")
        _check_ints(field, row)
    if (count := sum(map(len, rows))) > MOST_NAMED_SCORES:
        raise ValueError(f"{field} holds {count:,} ids; at most {MOST_NAMED_SCORES:,} are scored")


def _check_texts(field: str, texts: Collection[object], most: int, longest: int, what: str) -> None:
    if len(texts) > most:
        raise ValueError(f"{field} holds {len(texts):,} texts; at most {most} are allowed")
    for text in texts:
        if not isinstance(text, str) or not (text if field == "stop" else text.strip()):
            raise ValueError(f"{field} holds {quoted(text)}; each must be a {what}")
        if len(text) > longest:
            raise ValueError(f"{field} holds a text of {len(text):,} characters; at most {longest} are allowed")


def _check_seed(seed: int) -> None:
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must fit in 64 bits")


def _check_int(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field} is {quoted(value)}; it must be a whole number")
