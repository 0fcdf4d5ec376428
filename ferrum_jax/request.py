"""What a user asks for and what comes back.

`SamplingParams` is one request's wishes, checked when it is made. `Request` is the engine's book about
one choice of one prompt: the token ids known so far and two integers of progress. `RequestOutput` is
what the user gets. Names and defaults are vLLM's, so that moving over costs nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from ferrum_jax.prompt import MediaSpan

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_IDS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    max_tokens: most tokens to generate; None means up to `max_model_len`. min_tokens: so many come before an end token
    or one of stop_token_ids may, and no stop string among them ends the text.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p, min_p: as in the literature.
    repetition_penalty counts prompt and output; presence and frequency penalties count output only.
    seed: any 64-bit integer; None takes one from the engine's seed and the request's content.
    logprobs / prompt_logprobs: how many alternatives to report, 0 is the chosen token alone. They are
    taken from the model's own distribution, before bias, penalties and temperature.
    truncate_prompt_tokens: keep only the last so many prompt tokens.

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

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids"):
            if getattr(self, field) is None:  # vLLM's spelling of none
                object.__setattr__(self, field, ())
        for field, low, high, what in _RANGES:
            _check_number(field, getattr(self, field), low, high, what)
        for field in ("n", "min_tokens", "top_k"):
            _check_int(field, getattr(self, field))
        for field in ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field))
        for field in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be true or false")
        self._check_optional()
        self._check_lists()

    def _check_optional(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(f"{field} is {value}; it must be between 0 and {MAX_LOGPROBS}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens is {self.truncate_prompt_tokens}; it must be at least 1")
        if self.seed is not None:
            _check_seed(self.seed)

    def _check_lists(self) -> None:
        for field, kinds, what in _COLLECTIONS:
            if not isinstance(getattr(self, field), kinds):
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be {what}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; each stop must be a string that is not empty")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token)
        if len(set(self.stop_token_ids)) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids holds {len(set(self.stop_token_ids))} ids; at most {MAX_STOP_IDS} are allowed"
            )
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias holds {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
        for token, value in bias.items():
            _check_int("logit_bias key", token)
            _check_number(f"logit_bias[{token}]", value, -100.0, 100.0, "between -100 and 100")

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with this seed, and only it is checked."""
        _check_int("seed", seed)
        _check_seed(seed)
        found = object.__new__(SamplingParams)
        found.__dict__.update(self.__dict__, seed=seed)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a JSON object. Raises ValueError naming every key that is not known."""
        unknown = sorted(set(values) - _FIELDS)
        if unknown:
            raise ValueError(f"unknown sampling parameters {unknown}; known are {sorted(_FIELDS)}")
        return cls(**values)


_MOST = sys.float_info.max  # what is unbounded must still be a finite float
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
)
_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams))


def _check_number(field: str, value: object, low: float, high: float, what: str) -> None:
    if isinstance(value, int) and abs(value) > _MOST:
        raise ValueError(f"{field} is a whole number of {value.bit_length()} bits, too large; it must be {what}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # NaN is refused too
        raise ValueError(f"{field} is {value!r}; it must be {what}")


def _check_seed(seed: int) -> None:
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must fit in 64 bits")


def _check_int(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field} is {value!r}; it must be a whole number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log-probability (natural log, float32) and rank (1 is the most likely; 0 is unknown)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One choice of one request. `logprobs[i]` maps token id to Logprob for the i-th generated token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: str | None  # "stop", "length", "abort"; None while it runs
    stop_reason: int | str | None  # the stop id or the stop string that ended it


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
    embedding: np.ndarray | None = dataclasses.field(default=None, compare=False)  # [D], of `LLM.embed` alone

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
    priority: int = 0  # lower runs first
    choice: int = 0
    num_choices: int = 1  # of its prompt, which arrive together
    takes_hits: bool = True  # False for prompt_logprobs: its tokens must all be computed
    adapter: str = ""  # requests share blocks only where adapter and cache_salt are equal
    cache_salt: bytes = b""
    media: tuple[MediaSpan, ...] = ()  # what tokens stand for beyond their ids
    # progress, written by the scheduler only
    num_computed: int = 0
    num_cached_tokens: int = 0  # of the first admission
    num_preemptions: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of its full blocks, as far as they were asked for
    shard: int = 0  # data shard whose row it is, or was last
    slot: int = 0  # row slot while running, 0 when not
    finish_reason: str | None = None
    stop_reason: int | str | None = None
