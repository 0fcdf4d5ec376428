"""Flags of the command line that are fields of EngineConfig and SamplingParams, under the fields' own names.

A flag that is not given is absent from the result, so the field keeps its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.params_codec import params_to_json
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.setting import Setting, settings_of
from ferrum_jax.openai.body_fields import FIELDS
from ferrum_jax.sampling_params import SamplingParams


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of device ids such as 2,3") from None


_AS_JSON = " (needs --json)"
# field -> type; True and False are flags that set the field so
_SAMPLING_FLAGS: Mapping[str, Any] = {
    **dict.fromkeys(("n", "max_tokens", "min_tokens", "top_k", "logprobs", "prompt_logprobs"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
    "truncate_prompt_tokens": int,
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "echo"), True),
    **dict.fromkeys(("detokenize", "skip_special_tokens", "speculative"), False),
}
# Where a command says it otherwise than a body.
_SAYS: Mapping[str, str] = {
    "logprobs": "log-probabilities of this many alternatives" + _AS_JSON,
    "prompt_logprobs": "the same for each prompt token" + _AS_JSON,
    "detokenize": "print no text, but token ids" + _AS_JSON,
    "echo": "print the prompt before its completion",
    "skip_special_tokens": "show special tokens in the text",
    "speculative": "draft no tokens, whatever --speculative-config says",
}


def add_engine_flags(parser: argparse.ArgumentParser, *, planned: bool = False) -> None:
    """Adds a flag for every field of EngineConfig that has one; planned: for those that a plan counts with."""
    group = parser.add_argument_group("engine")
    for field, said in settings_of(EngineConfig):
        if said.has_flag and (said.is_planned or not planned):
            group.add_argument(flag_of(field), dest=field.name, default=argparse.SUPPRESS, **_reading(field, said))


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The flag that sets a field of EngineConfig; what is on by default has one that turns it off."""
    name = field.name.replace("_", "-")
    return "--no-" + name.removeprefix("enable-") if field.default is True else f"--{name}"


def _reading(field: dataclasses.Field[Any], said: Setting) -> dict[str, Any]:
    """How argparse reads and shows the flag of a field."""
    if field.default is True:
        return {"action": "store_false", "help": f"do not {said.text}"}
    if field.type == "bool":
        return {"action": argparse.BooleanOptionalAction, "help": said.text}
    default = field.default if said.unset is None else said.unset
    text = said.text if default in (None, "") else f"{said.text} (default: {default})"
    metavar = said.metavar or (f"{{{','.join(said.choices)}}}" if said.choices else "INT")
    return {"type": _reader(field), "metavar": metavar, "help": text}


def _reader(field: dataclasses.Field[Any]) -> Callable[[str], Any]:
    kind, *optional = str(field.type).split(" | ")
    if kind == "tuple[int, ...]":
        return _ids
    if optional and field.default is not None:
        return lambda text: text or None  # '' is the None that a default hides
    return int if kind == "int" else str


def add_sampling_flags(parser: argparse.ArgumentParser, *, title: str = "sampling", note: str = _AS_JSON) -> None:
    """Adds a flag for every field of SamplingParams; --seed is the engine's. note: on what is not printed as text."""
    group = parser.add_argument_group(title)
    says = {name: _SAYS.get(name, FIELDS[name].says).replace(_AS_JSON, note) for name in _SAMPLING_FLAGS}
    flags = {name: (how, says[name]) for name, how in _SAMPLING_FLAGS.items()}
    add_fields(group, SamplingParams, flags)
    for flag, field, read, metavar, text in _REPEATED_FLAGS:
        how: dict[str, Any] = {"type": read, "metavar": metavar, "help": f"{text}; may be repeated"}
        group.add_argument(flag, dest=field, action="append", default=argparse.SUPPRESS, **how)
    group.add_argument(
        "--structured-outputs",
        type=_json_object,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help='hold the text to a form: {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXT, ...]} or {"grammar": TEXT}',
    )


def engine_config(args: argparse.Namespace, base: Mapping[str, Any] = MappingProxyType({})) -> EngineConfig:
    """The config that the flags ask for, over the fields of `base`. Raises ValueError for a value not allowed."""
    return EngineConfig(**{**base, **given_fields(args, EngineConfig)})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags ask for. Raises ValueError for a value that is not allowed."""
    values = given_fields(args, SamplingParams)
    values.pop("seed", None)  # --seed is the engine's; each prompt and choice gets its own from it
    if "logit_bias" in values:
        pairs = values["logit_bias"]
        values["logit_bias"] = dict(pairs)
        if len(values["logit_bias"]) < len(pairs):
            raise ValueError(f"--logit-bias is given twice for a token: {[token for token, _ in pairs]}")
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputsParams.from_dict(values["structured_outputs"])
    return SamplingParams(**values)


def row_defaults(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that the flags give, as a row has them. Raises ValueError for a value that is not allowed."""
    params = sampling_params(args)
    values = params_to_json(params, [name for name in given_fields(args, SamplingParams) if name != "seed"])
    return values | ({"structured_outputs": args.structured_outputs} if "structured_outputs" in values else {})


def add_fields(group: Any, kind: type, flags: Mapping[str, tuple[Any, str]]) -> None:
    """A flag for each field; what is not given is absent from the result."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, (how, text) in flags.items():
        flag, default = "--" + name.replace("_", "-"), argparse.SUPPRESS
        if isinstance(how, bool):
            flag = flag if how else "--no-" + flag[2:]
            group.add_argument(flag, dest=name, action="store_const", const=how, default=default, help=text)
            continue
        shown = "" if defaults[name] in (None, "") else f" (default: {defaults[name]})"
        group.add_argument(flag, type=how, default=default, metavar=how.__name__.upper(), help=text + shown)


def given_fields(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of a dataclass whose flags are given, or have a default."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if field.name in args}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, as in 42=-1.5") from error


# flag, field, type of each value, its name in the help, help
_REPEATED_FLAGS: tuple[tuple[str, str, Any, str, str], ...] = (
    ("--stop", "stop", str, "TEXT", "end before this text"),
    ("--stop-token-id", "stop_token_ids", int, "ID", "end at this token"),
    ("--logit-bias", "logit_bias", _bias, "ID=VALUE", "add to a token's logit, -inf: never"),
    ("--allowed-token-id", "allowed_token_ids", int, "ID", "draw no other token"),
    ("--bad-word", "bad_words", str, "TEXT", "never write this text"),
)
