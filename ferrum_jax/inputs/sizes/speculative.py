"""SpeculativeConfig: how tokens are drafted, so that one step verifies several tokens of a row.

Keys and defaults are vLLM's, so that programs need few changes. No draft changes an answer.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from ferrum_jax.io.error_text import Elsewhere, named, quoted, require_harmless
from ferrum_jax.io.error_text.known_fields import FieldKind, require

METHODS = ("ngram", "suffix", "mtp")
MAX_DRAFTED = 64  # tokens of a draft
MAX_LOOKED_UP, _MAX_DEPTH = 64, 1024  # tokens of a match: each of the former is a table for each row

_NO_SECOND_MODEL = "no second model drafts here: 'ngram' and 'suffix' need none, and 'mtp' is in the checkpoint"
_METHODS_ELSEWHERE = frozenset({"eagle", "eagle3", "dflash", "draft_model", "medusa", "mlp_speculator"})
_NO_DRAFT_MODEL = Elsewhere((None,), f"{_NO_SECOND_MODEL}; leave it out, and give one of them as method")

SPECULATIVE_ELSEWHERE: Mapping[str, Elsewhere] = {
    **dict.fromkeys(("model", "revision", "code_revision", "quantization", "max_model_len"), _NO_DRAFT_MODEL),
    **dict.fromkeys(("draft_tensor_parallel_size", "tensor_parallel_size", "draft_load_config"), _NO_DRAFT_MODEL),
    **dict.fromkeys(("parallel_drafting", "disable_padded_drafter_batch"), _NO_DRAFT_MODEL),
    "speculative_token_tree": Elsewhere((None,), "a draft is one line of tokens: leave it out"),
    "disable_by_batch_size": Elsewhere((None,), "SamplingParams(speculative=False) has no drafts for a request"),
    "disable_logprobs": Elsewhere((None, False), "log-probabilities are given as without drafts: leave it out"),
    "enforce_eager": Elsewhere((None, False), "every step is a compiled program: leave it out"),
}


class _Key(NamedTuple):
    """A key with vLLM's name. methods: of drafting that read the key. kind: of the key's values."""

    methods: tuple[str, ...]
    kind: FieldKind


def _whole(least: int, most: float = math.inf) -> FieldKind:
    words = f", {least} or more" if most == math.inf else f" from {least} to {most}"
    return FieldKind(lambda value: type(value) is int and least <= value <= most, f"a whole number{words}")


def _number(most: float, words: str) -> FieldKind:
    return FieldKind(lambda value: type(value) in (int, float) and 0 <= value <= most, words)


_KEYS: Mapping[str, _Key] = {
    "num_speculative_tokens": _Key(METHODS, _whole(1, MAX_DRAFTED)),
    "prompt_lookup_max": _Key(("ngram",), _whole(1, MAX_LOOKED_UP)),
    "prompt_lookup_min": _Key(("ngram",), _whole(1, MAX_LOOKED_UP)),
    "suffix_decoding_max_tree_depth": _Key(("suffix",), _whole(1, _MAX_DEPTH)),
    "suffix_decoding_max_cached_requests": _Key(("suffix",), _whole(0)),
    "suffix_decoding_max_spec_factor": _Key(("suffix",), _number(1e6, "a number from 0 to 1000000")),
    "suffix_decoding_min_token_prob": _Key(("suffix",), _number(1, "a number from 0 to 1")),
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    "suffix": {
        "num_speculative_tokens": 24,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    },
    "mtp": {"num_speculative_tokens": 1},
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SpeculativeConfig:
    """How tokens are drafted. None is the method's default where the method reads the field, and stays None elsewhere.

    method: "ngram" looks for the last tokens earlier in prompt and output, "suffix" in an index of this and earlier
    requests, and "mtp" asks the checkpoint's own head. vLLM's names of such heads, as "deepseek_mtp", are "mtp" too.
    num_speculative_tokens: most tokens of a draft, from 1 to 64; 5 for ngram, the depth for suffix. mtp has 1.
    prompt_lookup_max, prompt_lookup_min: how many of the last tokens ngram looks for, at most and at least; 5 and 2,
    and one that is given moves the other.
    suffix_decoding_max_tree_depth: most tokens of a match that are told apart, up to 1,024; 24.
    suffix_decoding_max_cached_requests: ended requests that stay in the index, 0 keeps none; 10000.
    suffix_decoding_max_spec_factor: drafted tokens for each token that matched, at most; 1.0.
    suffix_decoding_min_token_prob: how likely a drafted token must be by their counts; 0.1.

    Raises ValueError with the field, its value and what is allowed.
    """

    method: str
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _method(self.method))
        given = {name: value for name in _KEYS if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            methods, kind = _KEYS[name]
            if self.method not in methods:
                raise ValueError(
                    f"{name} is {quoted(value)}, which only the method {named(methods)} reads, and method is "
                    f"{self.method!r}; leave it out"
                )
            require(name, value, kind)
        for name, default in _DEFAULTS[self.method].items():
            if name not in given:
                object.__setattr__(self, name, _beside(name, default, given))
        if self.method == "mtp" and self.num_speculative_tokens != 1:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, and a checkpoint's head predicts one token "
                "more; leave it out, or set it to 1"
            )
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is not None and most is not None and least > most:
            raise ValueError(f"prompt_lookup_min is {least}, more than prompt_lookup_max, {most}")

    def __repr__(self) -> str:
        """The fields that its method reads."""
        shown = [f"{name}={value!r}" for name in ("method", *_KEYS) if (value := getattr(self, name)) is not None]
        return f"SpeculativeConfig({', '.join(shown)})"


def asks_the_model(asked: SpeculativeConfig | None) -> bool:
    """Whether the checkpoint's own head drafts, so that its weights are read too."""
    return asked is not None and asked.method == "mtp"


def speculative_of(given: Any) -> SpeculativeConfig | None:
    """The config of a mapping, of its JSON text, or of an instance; None and the text null are none.

    Raises ValueError where it is something else, and for every key that is not known, or that is of another method.
    """
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    found = _read(given) if isinstance(given, str) else given
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ValueError(
            f"speculative_config is {quoted(given)}; it must be an object with a method, such as "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        )
    try:
        return SpeculativeConfig(**_known(found))
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error


def _read(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'speculative_config is {quoted(text)}; it must be JSON, such as \'{{"method": "ngram"}}\': {error}'
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _known(given: Mapping[Any, Any]) -> dict[str, Any]:
    """The keys that a config has. Raises ValueError for others, unless they ask for nothing."""
    if unknown := [str(name) for name in given if name not in (*_KEYS, "method", *SPECULATIVE_ELSEWHERE)]:
        meant = get_close_matches(unknown[0], ("method", *_KEYS), n=1) if len(unknown[0]) < 100 else []
        hint = f" (did you mean {meant[0]}?)" if meant else ""
        raise ValueError(f"there is no {named(unknown)}{hint}; known are method, {', '.join(_KEYS)}")
    method = _method(given.get("method"))
    for name in given.keys() & SPECULATIVE_ELSEWHERE.keys():
        require_harmless(name, given[name], SPECULATIVE_ELSEWHERE)
    return {name: value for name, value in given.items() if name in _KEYS} | {"method": method}


def _method(name: Any) -> str:
    if name is None:
        raise ValueError(f"method is missing; it must be one of {METHODS}: {_NO_SECOND_MODEL}")
    if isinstance(name, str) and name in _METHODS_ELSEWHERE:
        raise ValueError(f"method is {name!r}, which is not here: {_NO_SECOND_MODEL}")
    if isinstance(name, str) and name.endswith("_mtp"):
        return "mtp"  # as vLLM names the heads of families
    return require("method", name, FieldKind(lambda value: value in METHODS, f"one of {METHODS}"))


def _beside(name: str, default: Any, given: Mapping[str, Any]) -> Any:
    """The default of a key, moved as far as what is given asks for."""
    if name == "num_speculative_tokens":
        return min(given.get("suffix_decoding_max_tree_depth", default), MAX_DRAFTED)
    if name == "prompt_lookup_min":
        return min(default, given.get("prompt_lookup_max", default))
    if name == "prompt_lookup_max":
        return max(default, given.get("prompt_lookup_min", default))
    return default
