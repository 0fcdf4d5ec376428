"""Flags of the command line that are fields of EngineConfig and SamplingParams, under the fields' own names.

A flag that is not given is absent from the result, so the field keeps its default.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.params_codec import params_to_json
from ferrum_jax.inputs.params.parameter import Parameter
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.setting import Setting, settings_of
from ferrum_jax.sampling_params import PARAMETERS, SamplingParams


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of device ids such as 2,3") from None


_AS_JSON = " (needs --json)"


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
    values: dict[str, Any] = {"int": int, "float": float}
    plain = {
        name: (not getattr(SamplingParams, name) if said.kind == "bool" else values[said.kind], _help(said, note))
        for name, said in PARAMETERS.items()
        if said.bodies and said.has_flag and said.kind in ("bool", *values)
    }
    add_fields(group, SamplingParams, plain)
    reads: dict[str, Any] = {"TEXT": str, "ID": int, "ID=VALUE": _bias}
    for name, said in PARAMETERS.items():
        if said.flag is not None:
            flag, metavar = said.flag
            how: dict[str, Any] = {"type": reads[metavar], "metavar": metavar, "default": argparse.SUPPRESS}
            group.add_argument(flag, dest=name, action="append", help=f"{_help(said, note)}; may be repeated", **how)
    group.add_argument(
        "--structured-outputs",
        type=json_object,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help='hold the text to a form: {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXT, ...]} or {"grammar": TEXT}',
    )


def _help(said: Parameter, note: str) -> str:
    return (said.help or said.text).replace(_AS_JSON, note)


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


def json_object(text: str) -> dict[str, Any]:
    """The object of a JSON text. Raises ArgumentTypeError for anything else."""
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
