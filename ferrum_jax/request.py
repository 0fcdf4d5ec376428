"""What a user asks for and what comes back.

`SamplingParams` is what one request asks for, checked when it is made. `Request` is the engine's book about
one choice of one prompt: the token ids known so far and two integers of progress. `RequestOutput` is
what the user gets. Names and defaults are vLLM's, so that programs need few changes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from ferrum_jax.prompt import EncodableImage, MediaSpan, PlacedImage
from ferrum_jax.quoting import Elsewhere, named, quoted, require_harmless
from ferrum_jax.structured.asked.message import AssistantMessage
from ferrum_jax.structured.asked.params import StructuredOutputsParams
from ferrum_jax.structured.asked.tools import Tool

MAX_LOGPROBS = 20
WHOLE_VOCABULARY = -1  # in place of a number of log-probabilities
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 16
MAX_STOPS, MOST_STOP_CHARACTERS = 64, 256  # 16,384 states of their automaton, which takes 20 ms to make
MAX_BAD_WORDS, MOST_WORD_CHARACTERS = 300, 256
MAX_TOKEN_IDS = 1 << 18  # in a list; no fewer than the tokens of the largest vocabularies
NOT_FINITE = -1  # in place of a token: the row's logits hold NaN or infinity
NO_STRUCTURE = "structured output needs llguidance, which is not installed"  # then how to install it
ADAPTER_FAILED = "the adapter could not be brought to the devices"  # then its name and why
NOT_FINITE_REASON = (
    "the model's own logits hold NaN or infinity where finite numbers are expected, so no token can be drawn; what was "
    "cached of this request is forgotten: send it again, and if it ends so once more, check the weights and run "
    "`ferrum-jax check`"
)

Made = TypeVar("Made")
_SMALLEST_NORM = 1e-12  # of a vector


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

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_with_other_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    max_tokens: most tokens to generate; None means up to `max_model_len`. min_tokens: how many are generated before an
    end token, one of stop_token_ids or a stop string may end the text.
    temperature: 0 is greedy. min_p is applied first, then top_k, then top_p, as in vLLM. top_k: 0 or -1 is off.
    repetition_penalty counts prompt and output; presence and frequency penalties count output only.
    seed: any 64-bit integer; None takes one from the engine's seed and the request's content.
    logprobs / prompt_logprobs: how many alternatives to report; 0 reports only the chosen token, and of the prompt -1
    reports every token of the vocabulary. They are taken from the model's own distribution, before bias, penalties and
    temperature.
    truncate_prompt_tokens: keep only this many prompt tokens, the last ones; -1 keeps as many as leave room for
    max_tokens (or for one token if that is None) in max_model_len.
    stop: at most 64 strings, each of at most 256 characters.
    logit_bias: of at most 300 tokens, from -100 to 100, or minus infinity, which forbids the token.
    allowed_token_ids: only these may be drawn, end tokens among them; None allows all. bad_words: texts that may not be
    written; the last token of one is forbidden where those before it have come.
    detokenize: False gives no text and needs no tokenizer. echo: the text begins with the prompt's.
    structured_outputs: the structure that the text must have. Log-probabilities are those of the tokens that it,
    allowed_token_ids and bad_words allow.

    Raises ValueError with the field, its value and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = 16
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
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    echo: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, field) is None:  # vLLM allows None for an empty list
                object.__setattr__(self, field, ())
        for field, low, high, what in _RANGES:
            _check_number(field, getattr(self, field), low, high, what)
        for field in ("n", "min_tokens", "top_k"):
            _check_int(field, getattr(self, field))
        for field in ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field))
        for field in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "detokenize", "echo"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} is {quoted(getattr(self, field))}; it must be true or false")
        self._check_optional()
        self._check_lists()

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
        kept = self.truncate_prompt_tokens
        if kept is not None and kept < 1 and kept != -1:
            raise ValueError(f"truncate_prompt_tokens is {kept}; it must be at least 1, or -1 for as many as fit")
        if not self.detokenize and (self.stop or self.echo):
            raise ValueError(f"detokenize is False beside {'stop' if self.stop else 'echo'}, which needs the text")
        if self.seed is not None:
            _check_seed(self.seed)
        if self.structured_outputs is not None:
            self._check_structure(self.structured_outputs)

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
        return self.structured_outputs is not None or self.allowed_token_ids is not None or bool(self.bad_words)

    def most_prompt_tokens(self, max_model_len: int) -> int | None:
        """How many tokens are kept at the end of a longer prompt; None keeps all."""
        if self.truncate_prompt_tokens == -1:
            return max(1, max_model_len - (self.max_tokens or 1))
        return self.truncate_prompt_tokens

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with this seed. Only the seed is checked again."""
        _check_int("seed", seed)
        _check_seed(seed)
        found = object.__new__(SamplingParams)
        found.__dict__.update(self.__dict__, seed=seed)
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
_RANGES = (
    ("n", 1, 4096, "between 1 and 4096"),
    ("min_tokens", 0, _MOST, "0 or more"),
    ("temperature", 0.0, _MOST, "0 (greedy) or more"),
    ("top_k", -1, _MOST, "-1 or 0 (off) or more"),
    ("top_p", 5e-324, 1.0, "more than 0 and at most 1"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("repetition_penalty", 5e-324, _MOST, "more than 0"),
    ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
)
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


def _check_ints(field: str, values: Collection[object] | None) -> None:
    if values is not None and len(values) > MAX_TOKEN_IDS:
        raise ValueError(f"{field} holds {len(values):,} ids; at most {MAX_TOKEN_IDS:,} are allowed")
    if values and set(map(type, values)) != {int}:
        for value in values:
            _check_int(field, value)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log-probability (natural log, float32) and rank (1 is the most likely; 0 is unknown)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One choice of one request. `logprobs[i]` maps token id to Logprob for the i-th generated token.

    image_digests: of its prompt's images, in hexadecimal; a choice is continued only where they are the same.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None  # "stop", "length", "abort", "error"; None while it runs
    # The entry of stop_token_ids or stop that ended it, or what the error was; None if another cause did.
    stop_reason: int | str | None
    message: AssistantMessage | None = None  # the text taken apart, of a chat's answer that has ended or is streamed
    weights_versions: tuple[int, ...] | None = None  # of each token, where the weights changed while it ran
    image_digests: tuple[str, ...] = ()
    # [n, layers with experts, X] uint8, uint16 of more than 256 experts; best first, n = prompt + generated tokens - 1.
    routed_experts: np.ndarray | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoresAsked:
    """Log-probabilities of a sequence's tokens from position `start` on.

    processed: of what a token would be drawn from, after bias, penalties, temperature and filters, with the tokens
    before `start` as the prompt; else of the model's own distribution.
    """

    start: int
    processed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a user may ask of a request besides its tokens and how they are drawn.

    adapter: the name of a loaded adapter, "" for none. prompt: the text that its token ids were made of. key: tells
    equal prompts apart where no seed is given.
    priority: lower runs first. streams: outputs are given as they grow. deltas: each output given has one choice, and
    of it only what is new; an echo is not in it, and nothing is resumed. cache_salt, media: see `ferrum_jax.prompt`;
    spans count tokens of the prompt as it is given. images: those of the media spans of kind "image", in their order.
    embeds: the output has the prompt's embedding.
    resume: choices that `Engine.peek` gave in an earlier process; they continue after their tokens, to the same end as
    if they had never stopped. With prompt_logprobs they begin anew, and where the prompt's images are others.
    scores: which of the prompt's tokens are scored; what is drawn beside them is of no use.
    is_chat: the text is a whole message of an assistant, and is taken apart by the forms of the model's chat template.
    tools: that the template was given; None leaves calls in the text.
    """

    prompt: str | None = None
    adapter: str = ""
    key: str = ""
    priority: int = 0
    streams: bool = False
    deltas: bool = False
    cache_salt: str = ""
    media: Sequence[MediaSpan] = ()
    images: Sequence[EncodableImage] = ()
    resume: Sequence[CompletionOutput] = ()
    embeds: bool = False
    scores: ScoresAsked | None = None
    is_chat: bool = False
    tools: Sequence[Tool] | None = None


NO_OPTIONS = RequestOptions()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SequenceLogprobs:
    """Log-probabilities of n tokens of a sequence, each given all tokens before it; from `LLM.compute_logprobs`.

    k: the alternatives that were asked for, most likely first, the lowest id first among equals.
    """

    token_ids: tuple[int, ...]
    logprobs: np.ndarray  # [n] float32
    ranks: np.ndarray  # [n] int32, 1 is the most likely
    top_ids: np.ndarray  # [n, k] int32
    top_logprobs: np.ndarray  # [n, k] float32
    all_logprobs: np.ndarray | None = None  # [n, V] float32 by token id, where the whole vocabulary was asked for
    num_cached_tokens: int = 0  # tokens before them whose KV came from the prefix cache
    weights_version: int = 0  # updates of the weights before them

    @property
    def cumulative_logprob(self) -> float:
        """That of all n tokens together."""
        return math.fsum(self.logprobs.tolist())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All choices of one prompt. `text`, `token_ids`, `finish_reason` are those of the first choice."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int  # prompt tokens whose KV came from the prefix cache (first choice)
    num_cached_media: int = 0  # media items that lie wholly within them
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None  # the first entry is None
    finished: bool = True
    weights_version: int = 0  # updates of the weights before its last token
    embedding: np.ndarray | None = dataclasses.field(default=None, compare=False)  # [D], from `LLM.embed` only
    scores: SequenceLogprobs | None = dataclasses.field(default=None, compare=False)  # `LLM.compute_logprobs` only
    first_token_s: float | None = dataclasses.field(default=None, compare=False)  # of time.monotonic(), at the host

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """The vector of one text."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    embedding: np.ndarray  # [D] float32
    num_cached_tokens: int = 0  # of prompt_token_ids, those whose KV came from the prefix cache
    normalized: bool = False  # it has length 1

    def cut(self, dimensions: int | None) -> np.ndarray:
        """[dimensions] float32: the vector's beginning, made longer to length 1 where the whole has that; None: all.

        Raises ValueError for more than it has.
        """
        if dimensions is None:
            return self.embedding
        if dimensions > len(self.embedding):
            raise ValueError(f"dimensions is {dimensions}; the model's vectors have {len(self.embedding)}")
        return unit_length(self.embedding[:dimensions]) if self.normalized else self.embedding[:dimensions]


def unit_length(vector: np.ndarray) -> np.ndarray:  # [D] -> [D] float32
    """The vector with length 1; one shorter than 1e-12 is not made longer than that allows."""
    norm = np.linalg.norm(vector.astype(np.float64))
    return (vector / max(norm, _SMALLEST_NORM)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOutput:
    """How well the two texts of a pair fit, as the model says it."""

    prompt_token_ids: tuple[int, ...]
    score: float
    num_cached_tokens: int = 0  # of prompt_token_ids, those whose KV came from the prefix cache


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """The engine's book about one choice of one prompt; mutable, owned by the scheduler once added.

    `token_ids` is prompt then generated tokens, as far as the host has seen them. `num_computed` counts
    tokens whose KV has been dispatched (it runs ahead of the host by the step in flight).
    """

    id: int  # unique in an engine, by arrival
    token_ids: array[int]  # int32, its own
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + most generated tokens, within max_model_len
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()  # tokens that end it: end tokens and stop_token_ids
    end_ids: frozenset[int] = frozenset()  # of these, the model's end tokens, which give no stop_reason
    priority: int = 0  # lower runs first
    choice: int = 0
    num_choices: int = 1  # of its prompt, which arrive together
    takes_hits: bool = True  # False where all of its tokens must be computed, as for prompt_logprobs
    most_hit_tokens: int | None = None  # of one whose tokens behind these are scored; None for as many as there are
    is_constrained: bool = False  # its next token is drawn under a mask, which the tokens before it decide
    adapter_id: int = 0  # slot of its adapter, held from before it is queued to its end
    adapter: str = ""  # the digest of its adapter; requests share blocks only where adapter and cache_salt are equal
    cache_salt: bytes = b""
    media: tuple[MediaSpan, ...] = ()  # what tokens stand for beyond their ids
    images: tuple[PlacedImage, ...] = ()  # in order; the model is given their embeddings
    # progress, written by the scheduler only
    has_old_kv: bool = False  # of weights before an update, over which it goes on: nothing of it is shared
    num_computed: int = 0
    num_cached_tokens: int = 0  # of the first admission
    junction: int = 0  # of a recurrent model: where the cached blocks of its prefix ended when it was admitted
    num_preemptions: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of its full blocks, as far as they were asked for
    image_runs: dict[int, list[int]] = dataclasses.field(default_factory=dict)  # by image: where its embeddings are
    shard: int = 0  # data shard whose row it is, or was last
    slot: int = 0  # row slot while running, 0 when not
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def hit_limit(self) -> int:
        """The most tokens whose KV may come from blocks of the cache: the last token is always computed."""
        limit = len(self.token_ids) - 1
        return limit if self.most_hit_tokens is None else min(limit, self.most_hit_tokens)
