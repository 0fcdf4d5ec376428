"""Flags of the command line that are fields of EngineConfig and SamplingParams, under the fields' own names.

A flag that is not given is absent from the result, so the field keeps its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.request import SamplingParams
from ferrum_jax.structured.asked.params import StructuredOutputsParams


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of device ids such as 2,3") from None


# field -> (type, help); True and False are flags that set the field so
_ENGINE_FLAGS: Mapping[str, tuple[Any, str]] = {
    "dtype": (str, "dtype of weights and activations: auto, float32 or bfloat16"),
    "weights": (
        str,
        "quantise dense weights while they load: auto, int8, int8-a16, fp8, fp8-a16, mxfp4, int4, int4-gN",
    ),
    "kv_dtype": (str, "dtype of the KV pool: auto, float32, bfloat16, int8, fp8_e4m3 or fp8_e5m2"),
    "block_size": (int, "tokens per KV block, a power of two"),
    "max_model_len": (int, "most tokens in a request, prompt and output together"),
    "max_num_seqs": (int, "most requests that run at once (default: 16 on the CPU, else 256; batch 256)"),
    "max_num_batched_tokens": (int, "most tokens in one step"),
    "kv_memory_bytes": (
        int,
        "size of the KV pool in bytes (default: all that is left; on the CPU 1 GiB or more)",
    ),
    "num_blocks": (int, "size of the KV pool in blocks, instead of in bytes"),
    "host_cache_bytes": (int, "host memory in bytes for cached blocks that the KV pool gives up; 0 keeps none"),
    "max_cached_prompts": (int, "most whole prompts whose repeat computes no token; 0 keeps none"),
    "min_cached_prompt_tokens": (int, "shorter prompts are not kept as a whole"),
    "max_state_snapshots": (int, "most snapshots of recurrent states; 0 keeps none"),
    "max_image_tokens": (int, "tokens of images whose embeddings are kept; 0 serves a model that sees images for text"),
    "max_image_patches": (int, "patches of the largest image, and of all that a step encodes while others run"),
    "allow_image_hosts": (str, "hosts whose URLs of images are fetched, such as example.com,b.org:8080, or * for all"),
    "image_root": (str, "folder below which file: URLs name images"),
    "max_adapters": (int, "LoRA adapters that rows can use at once; 0 has no slots for them"),
    "max_adapter_rank": (int, "largest rank of an adapter"),
    "adapter_targets": (str, "weights that adapters may add to: of attention, mlp, experts and head"),
    "score_tokens": (str, "score pairs by the logits of these tokens, such as yes,no for Qwen3-Reranker"),
    "implementation": (str, "implementation of attention: xla, mosaic_tpu (the default on TPUs) or mosaic_gpu"),
    "product_implementation": (
        str,
        "implementation of products with quantised weights: auto, xla, or mosaic_tpu on TPUs",
    ),
    "attention_tiles": (str, "tiles of decode in mosaic_tpu, such as tile_kv=256,items=2"),
    "check": (str, "check the kernel of attention at the start on a chip that has no verdict: auto or off"),
    "mesh": (str, "devices by axis, such as tp=4 or dp=2,tp=4"),
    "devices": (_ids, "ids of the devices that the mesh is made of, such as 2,3 (default: the first)"),
    "on_recompile": (str, "what to do when a step compiles, which it should not: warn or error"),
    "ready": (str, "answer when the first executables are compiled, or when all are: first or all"),
    "request_log": (str, "append each request to this file when it ends, for `ferrum-jax cache simulate`"),
    "check_writes": (True, "prove after each step that it wrote nothing that others may read; slow"),
    "seed": (int, "seed from which requests without one get theirs"),
}
_AS_JSON = " (needs --json)"
_SAMPLING_FLAGS: Mapping[str, tuple[Any, str]] = {
    "n": (int, "completions of each prompt"),
    "max_tokens": (int, "most tokens to generate"),
    "min_tokens": (int, "fewest tokens before an end token may come or a stop string counts"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "keep the k most likely tokens; 0 is off"),
    "top_p": (float, "keep the most likely tokens up to this probability"),
    "min_p": (float, "keep tokens at least this likely, relative to the most likely one"),
    "repetition_penalty": (float, "above 1 discourages tokens of prompt and output"),
    "presence_penalty": (float, "above 0 discourages tokens of the output"),
    "frequency_penalty": (float, "above 0 discourages tokens of the output by their count"),
    "logprobs": (int, "log-probabilities of this many alternatives" + _AS_JSON),
    "prompt_logprobs": (int, "the same for each prompt token" + _AS_JSON),
    "truncate_prompt_tokens": (int, "keep only this many tokens at the end of the prompt; -1: as many as fit"),
    "ignore_eos": (True, "continue past end tokens"),
    "include_stop_str_in_output": (True, "keep the stop string in the text"),
    "detokenize": (False, "print no text, but token ids" + _AS_JSON),
    "echo": (True, "print the prompt before its completion"),
    "skip_special_tokens": (False, "show special tokens in the text"),
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of EngineConfig."""
    group = parser.add_argument_group("engine")
    _add_fields(group, EngineConfig, _ENGINE_FLAGS)
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        default=argparse.SUPPRESS,
        help="compute every prompt token and reuse none",
    )
    group.add_argument(
        "--invariant",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="the same bits whatever runs beside a request; only on the CPU in float32, where it is the default of "
        "batch and cache save",
    )
    group.add_argument(
        "--compilation-cache-dir",
        type=lambda text: text or None,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="where compiled executables are kept, a folder or a URL such as gs://; '' keeps none",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, *, title: str = "sampling", note: str = _AS_JSON) -> None:
    """Adds a flag for every field of SamplingParams; --seed is the engine's. note: on what is not printed as text."""
    group = parser.add_argument_group(title)
    flags = {name: (how, text.replace(_AS_JSON, note)) for name, (how, text) in _SAMPLING_FLAGS.items()}
    _add_fields(group, SamplingParams, flags)
    repeated: dict[str, Any] = {"action": "append", "default": argparse.SUPPRESS}
    group.add_argument("--stop", metavar="TEXT", help="end before this text; may be repeated", **repeated)
    group.add_argument(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        metavar="ID",
        help="end at this token; may be repeated",
        **repeated,
    )
    group.add_argument(
        "--logit-bias",
        type=_bias,
        metavar="ID=VALUE",
        help="add to a token's logit, -inf: never; may be repeated",
        **repeated,
    )
    group.add_argument(
        "--allowed-token-id",
        dest="allowed_token_ids",
        type=int,
        metavar="ID",
        help="draw no other token; may be repeated",
        **repeated,
    )
    group.add_argument(
        "--bad-word", dest="bad_words", metavar="TEXT", help="never write this text; may be repeated", **repeated
    )
    group.add_argument(
        "--structured-outputs",
        type=_json_object,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help='hold the text to a form: {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXT, ...]} or {"grammar": TEXT}',
    )


def engine_config(args: argparse.Namespace, base: Mapping[str, Any] = MappingProxyType({})) -> EngineConfig:
    """The config that the flags ask for, over the fields of `base`. Raises ValueError for a value not allowed."""
    return EngineConfig(**{**base, **_given(args, EngineConfig)})


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags ask for. Raises ValueError for a value that is not allowed."""
    values = _given(args, SamplingParams)
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
    values = {name: getattr(params, name) for name in _given(args, SamplingParams) if name != "seed"}
    if "logit_bias" in values:
        values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"].items()}
    if "structured_outputs" in values:
        values["structured_outputs"] = args.structured_outputs
    return values


def _add_fields(group: Any, kind: type, flags: Mapping[str, tuple[Any, str]]) -> None:
    """A flag for each field; what is not given is absent from the result."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, (how, text) in flags.items():
        flag, default = "--" + name.replace("_", "-"), argparse.SUPPRESS
        if isinstance(how, bool):
            flag = flag if how else "--no-" + flag[2:]
            group.add_argument(flag, dest=name, action="store_const", const=how, default=default, help=text)
            continue
        shown = "" if defaults[name] in (None, "") else f" (default {defaults[name]})"
        group.add_argument(flag, type=how, default=default, metavar=how.__name__.upper(), help=text + shown)


def _given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
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
