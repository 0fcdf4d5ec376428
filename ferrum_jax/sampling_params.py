"""SamplingParams: how the tokens of a request are drawn and when it ends, checked when it is made.

Names and defaults are vLLM's, so that programs need few changes. A parameter is one entry: see `Parameter`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from ferrum_jax.inputs.params.parameter import TEXTS, Parameter, parameter, parameters_of
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.transcript import Transcript
from ferrum_jax.io.error_text import Elsewhere, named, quoted, require_harmless
from ferrum_jax.io.ints import as_plain, as_whole

MAX_LOGPROBS = 20

WHOLE_VOCABULARY = -1  # in place of a number of log-probabilities

MAX_NAMED_IDS, MAX_NAMED_SCORES = 128, 1 << 22  # tokens that are scored at one token of a prompt, and at all of them

MAX_LOGIT_BIAS = 300

MAX_STOP_IDS = 16

MAX_STOPS, MAX_STOP_CHARACTERS = 64, 256  # 16,384 states of their automaton, which takes 20 ms to make

MAX_BAD_WORDS, MAX_WORD_CHARACTERS = 300, 256

MAX_TOKEN_IDS = 1 << 18  # in a list; no fewer than the tokens of the largest vocabularies

GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")  # of a model's own file

PACE = frozenset({"speculative", "priority"})  # how soon an answer comes: no part of what identifies a row or a job

_MOST = sys.float_info.max  # the bound of parameters that have no other: they must be finite
_AT_LEAST_1, _NOT_NEGATIVE, _PENALTY = (
    (1, None, "be at least 1"),
    (0, None, "be 0 or more"),
    (-2.0, 2.0, "be between -2 and 2"),
)
_KEPT = "be at least 1, or -1 for as many as fit"

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

    min_p is applied first, then top_k, then top_p, as in vLLM. Log-probabilities are taken from the model's own
    distribution, before bias, penalties and temperature; with structured_outputs, allowed_token_ids or bad_words they
    are those of the tokens that these allow.

    Raises ValueError with the field, its value and what is allowed.
    """

    n: int = parameter(1, "completions of each prompt", (1, 4096, "be between 1 and 4096"), bodies=TEXTS)
    max_tokens: int | None = parameter(
        16,
        "most tokens to generate",
        _AT_LEAST_1,
        more="None means up to `max_model_len`",
        bodies=TEXTS,
    )
    max_new_tokens: int | None = parameter(
        None, "where `max_tokens` is None, at most this many, and as many as there is room for", _AT_LEAST_1, bodies=()
    )
    min_tokens: int = parameter(0, "fewest tokens before an end token may come or a stop string counts", _NOT_NEGATIVE)
    temperature: float = parameter(1.0, "0 is greedy", (0.0, None, "be 0 (greedy) or more"))
    top_k: int = parameter(0, "keep the k most likely tokens; 0 is off", (-1, None, "be -1 or 0 (off) or more"))
    top_p: float = parameter(
        1.0, "keep the most likely tokens up to this probability", (math.ulp(0), 1.0, "be more than 0 and at most 1")
    )
    min_p: float = parameter(
        0.0, "keep tokens at least this likely, relative to the most likely one", (0.0, 1.0, "be between 0 and 1")
    )
    repetition_penalty: float = parameter(
        1.0, "above 1 discourages tokens of prompt and output", (math.ulp(0), None, "be more than 0")
    )
    presence_penalty: float = parameter(0.0, "above 0 discourages tokens of the output", _PENALTY)
    frequency_penalty: float = parameter(0.0, "above 0 discourages tokens of the output by their count", _PENALTY)
    logit_bias: Mapping[int, float] | None = parameter(
        None,
        "added to a token's logit; minus infinity: never",
        more="at most 300, from -100 to 100",
        help="add to a token's logit, -inf: never",
        flag=("--logit-bias", "ID=VALUE"),
    )
    seed: int | None = parameter(
        None,
        "the same seed draws the same tokens",
        (-(2**63), 2**64 - 1, "fit in 64 bits"),
        more="None takes one from the engine's seed and the request's content",
        has_flag=False,
    )
    stop: str | Sequence[str] = parameter(
        (),
        "end before any of these texts",
        more="at most 64 strings, each of at most 256 characters",
        help="end before this text",
        flag=("--stop", "TEXT"),
    )
    stop_token_ids: Sequence[int] = parameter(
        (), "end at any of these tokens", help="end at this token", flag=("--stop-token-id", "ID")
    )
    include_stop_str_in_output: bool = parameter(False, "keep the stop string in the text")
    skip_special_tokens: bool = parameter(
        True, "false shows special tokens in the text", help="show special tokens in the text"
    )
    ignore_eos: bool = parameter(False, "continue past end tokens")
    logprobs: int | None = parameter(
        None,
        "log-probabilities of this many alternatives; of a chat, whether there are any",
        (0, MAX_LOGPROBS, f"be between 0 and {MAX_LOGPROBS}"),
        more="0 reports only the chosen token",
        bodies=TEXTS,
        help="log-probabilities of this many alternatives (needs --json)",
    )
    prompt_logprobs: int | None = parameter(
        None,
        "the same for each prompt token",
        (WHOLE_VOCABULARY, MAX_LOGPROBS, f"be between 0 and {MAX_LOGPROBS}, or -1 for the whole vocabulary"),
        bodies=TEXTS,
        help="the same for each prompt token (needs --json)",
    )
    prompt_logprob_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = parameter(
        None,
        "log-probabilities of these tokens at each prompt token: a list of ids for all, or a list for each",
        more="at most 128 at a token",
        bodies=TEXTS,
    )
    prompt_logprob_start: int = parameter(
        0,
        "the prompt token behind which these are reported",
        _NOT_NEGATIVE,
        more="tokens up to it may come from the prefix cache",
        bodies=TEXTS,
        has_flag=False,
    )
    truncate_prompt_tokens: int | None = parameter(
        None,
        "keep only this many tokens at the end of the prompt; -1: as many as fit",
        (-1, None, _KEPT),
        more="beside max_tokens",
    )
    detokenize: bool = parameter(
        True,
        "false gives token ids and no text",
        bodies=TEXTS,
        help="print no text, but token ids (needs --json)",
    )
    echo: bool = parameter(
        False, "begin the text with the prompt", bodies=TEXTS, help="print the prompt before its completion"
    )
    structured_outputs: StructuredOutputsParams | None = parameter(  # noqa: RUF009
        None, "the structure of the text: json, regex, choice or grammar"
    )
    allowed_token_ids: Sequence[int] | None = parameter(
        None,
        "draw no other token",
        more="end tokens are among them",
        flag=("--allowed-token-id", "ID"),
    )
    bad_words: Sequence[str] = parameter(
        (),
        "never write these texts",
        help="never write this text",
        flag=("--bad-word", "TEXT"),
    )
    speculative: bool = parameter(
        True,
        "false drafts no tokens for it; the answer is the same",
        help="draft no tokens, whatever --speculative-config says",
    )
    transcript: Transcript | None = parameter(  # noqa: RUF009
        None, "the rules under which a sound is written down, as `LLM.transcribe` makes them", bodies=()
    )

    def __post_init__(self) -> None:
        for field, value in self._plain_values():
            object.__setattr__(self, field, value)
        for field, said in PARAMETERS.items():
            _check_one(field, said, getattr(self, field))
        self._check_together()
        self._check_lists()

    def _plain_values(self) -> Iterator[tuple[str, Any]]:
        """Fields with numbers of other libraries, or None for an empty list as in vLLM, as what they are here."""
        for field, said in PARAMETERS.items():
            if said.bounds is not None:
                yield field, (as_whole if said.kind == "int" else as_plain)(getattr(self, field))
        for field in ("stop_token_ids", "allowed_token_ids", "prompt_logprob_token_ids"):
            yield field, _whole_ids(getattr(self, field))
        if isinstance(self.stop, str):
            yield "stop", (self.stop,)
        for field in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, field) is None:
                yield field, ()
        if isinstance(self.logit_bias, Mapping):
            yield "logit_bias", {as_whole(token): as_plain(value) for token, value in self.logit_bias.items()}
        if isinstance(self.structured_outputs, Mapping):
            yield "structured_outputs", StructuredOutputsParams.from_dict(self.structured_outputs)

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.truncate_prompt_tokens == 0:
            raise ValueError(f"truncate_prompt_tokens is 0; it must {_KEPT}")
        if not self.detokenize and (self.stop or self.echo):
            raise ValueError(f"detokenize is False beside {'stop' if self.stop else 'echo'}, which needs the text")
        for field, kind in (("structured_outputs", StructuredOutputsParams), ("transcript", Transcript)):
            if (given := getattr(self, field)) is not None and not isinstance(given, kind):
                raise ValueError(f"{field} is {quoted(given)}; it must be a {kind.__name__}")
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError("ignore_eos is True beside structured_outputs, whose text ends with an end token")

    def _check_lists(self) -> None:
        for field, kinds, what in _COLLECTIONS:
            if not isinstance(getattr(self, field), kinds):
                raise ValueError(f"{field} is {quoted(getattr(self, field))}; it must be {what}")
        _check_texts("stop", self.stop, MAX_STOPS, MAX_STOP_CHARACTERS, "string that is not empty")
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_WORD_CHARACTERS, "text that is not blank")
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
                _check_number(
                    f"logit_bias[{token}]", value, -100.0, 100.0, "be between -100 and 100, or minus infinity"
                )

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
        """These parameters with this seed. Only the seed is checked again."""
        seed = as_whole(seed)
        _check_one("seed", PARAMETERS["seed"], seed)
        found = object.__new__(SamplingParams)
        found.__dict__.update(self.__dict__, seed=seed, _given=self.__dict__["_given"] | {"seed"})
        return found

    def without_min_tokens(self) -> SamplingParams:
        """These parameters with min_tokens 0, for requests whose masks see to min_tokens."""
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


_COLLECTIONS = (
    ("stop", Sequence | Set, "a string or a list of strings"),
    ("stop_token_ids", Sequence | Set, "a list of token ids"),
    ("logit_bias", Mapping | None, "a mapping of token id to bias"),
    ("allowed_token_ids", Sequence | Set | None, "a list of token ids"),
    ("bad_words", list | tuple | Set, "a list of texts"),
)

PARAMETERS = parameters_of(SamplingParams)
_FIELDS = frozenset(PARAMETERS)
_SAID = "\n".join(f"    {name}: {said.sentences()}" for name, said in PARAMETERS.items())
SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n{_SAID}\n"


def _check_one(field: str, said: Parameter, value: object) -> None:
    """Raises ValueError for a flag that is none, and for a number beyond its bounds."""
    if said.kind == "bool" and not isinstance(value, bool):
        raise ValueError(f"{field} is {quoted(value)}; it must be true or false")
    if said.bounds is None or (value is None and said.is_optional):
        return
    if said.is_optional:
        _check_int(field, value)
    _check_number(field, value, *said.bounds)
    if said.kind == "int":
        _check_int(field, value)


def _check_number(field: str, value: Any, low: float, high: float | None, what: str) -> None:
    if isinstance(value, int) and abs(value) > _MOST:
        raise ValueError(f"{field} is a whole number of {value.bit_length()} bits, too large; it must {what}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= (_MOST if high is None else high):  # NaN is refused too
        raise ValueError(f"{field} is {quoted(value)}; it must {what}")


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
    if (count := sum(map(len, rows))) > MAX_NAMED_SCORES:
        raise ValueError(f"{field} holds {count:,} ids; at most {MAX_NAMED_SCORES:,} are scored")


def _check_texts(field: str, texts: Collection[object], most: int, longest: int, what: str) -> None:
    if len(texts) > most:
        raise ValueError(f"{field} holds {len(texts):,} texts; at most {most} are allowed")
    for text in texts:
        if not isinstance(text, str) or not (text if field == "stop" else text.strip()):
            raise ValueError(f"{field} holds {quoted(text)}; each must be a {what}")
        if len(text) > longest:
            raise ValueError(f"{field} holds a text of {len(text):,} characters; at most {longest} are allowed")


def _check_int(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field} is {quoted(value)}; it must be a whole number")
