"""The model of a job: loaded for its rows, and said so in its report that `verify` loads it again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ferrum_jax.cli.flags import flag_of, given_fields
from ferrum_jax.cli.model import job_config, named_adapters, open_llm
from ferrum_jax.config import EngineConfig
from ferrum_jax.io.error_text import quoted
from ferrum_jax.io.paths import is_hub_id, is_url

if TYPE_CHECKING:
    from ferrum_jax.batch.job import JobStart
    from ferrum_jax.batch.journal.job_record import JobRecord
    from ferrum_jax.inputs.identity import ModelIdentity
    from ferrum_jax.inputs.sizes.engine_sizes import Reach
    from ferrum_jax.llm import LLM
    from ferrum_jax.tasks.texts import TextIds

# Fields of EngineConfig that belong to a machine or a run; seed is among the job's settings.
_OF_HERE = ("devices", "request_log", "compilation_cache_dir", "on_recompile", "ready", "seed")
_OF_HERE += ("kv_tier", "kv_tier_bytes")
# Fields that decide answers: verify takes them as the job had them
_RECORDED = (
    *("dtype", "weights", "max_model_len", "max_image_tokens", "max_image_patches"),
    *("tool_form", "reasoning_form", "score_tokens"),
)
# Fields that decide bits, or where an adapter fits. How much memory is taken, a report does not say.
_TAKEN = (
    *_RECORDED,
    *("kv_dtype", "block_size", "invariant", "mesh", "implementation", "product_implementation", "attention_tiles"),
    *("adapter_targets", "max_adapter_rank"),
)
_OPENED = ("image_root", "allow_image_hosts")  # what rows may read, which a report alone does not open


def job_llm(
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
    start: JobStart,
    on_identity: Callable[[ModelIdentity], None],
) -> LLM:
    """The model that the flags name, with its adapters, for the rows of a job. stack: what must end after the job."""
    from ferrum_jax.batch.reach import reach_of

    def reach(ids: TextIds, max_model_len: int) -> Reach | None:
        taken = start.identity.generation
        start.rows.generation = ids.generation if taken is None else taken
        token_ids = functools.partial(ids, now=start.identity.started)
        return reach_of(start.rows, token_ids, max_model_len, ids.foreseen)

    commit = start.commit_of(args.model, args.revision)
    begun_with = start.identity.implementations()
    llm = open_llm(args, job_config(args), stack, reach, on_identity, commit, begun_with=begun_with)
    for name, path in named_adapters(args).items():
        llm.load_adapter(name, path)
    return llm


def loading_of(args: argparse.Namespace, input_path: str) -> dict[str, Any]:
    """The flags that load the model, for the report. input_path: as the user gave it."""
    config = {name: value for name, value in given_fields(args, EngineConfig).items() if name not in _OF_HERE}
    if config.get("image_root") is not None:
        config["image_root"] = os.path.abspath(config["image_root"])
    return {
        "input": _whole(input_path),
        "model": args.model if is_hub_id(args.model) else _whole(args.model),
        "revision": args.revision,
        "tokenizer": None if args.tokenizer is None else _whole(args.tokenizer),
        "adapters": {name: _whole(path) for name, path in named_adapters(args).items()},
        "config": config,
    }


def verifying_llm(
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
    start: JobStart,
    check: Callable[[ModelIdentity], None],
    record: JobRecord,
    taken: Sequence[str],
) -> LLM:
    """As `job_llm`. taken: of `take_loading`. A length of the record may be more than another model has, so where that
    is refused the model is compared without it: `check` then says that it is another.
    """
    from ferrum_jax.batch.verify.verify_job import OtherModel

    def check_digests(identity: ModelIdentity) -> None:
        check(dataclasses.replace(identity, max_model_len=(record.model or {}).get("max_model_len")))

    try:
        return job_llm(args, stack, start, check)
    except OtherModel:
        raise
    except ValueError:
        if "max_model_len" in taken:
            vars(args).pop("max_model_len")
            check_digests(job_llm(args, stack, start, check_digests).identity)  # an encoder's is not whole before
        raise


def take_loading(args: argparse.Namespace, record: JobRecord) -> list[str]:
    """Sets what the flags leave open as the report has it; the names of the engine's settings that it set.

    The report gives the engine's settings that decide answers; how much of this machine is used is not for it to say.
    Raises ValueError where neither names a model, where rows read what the flags do not open, and where flags ask for
    other answers than the job's.
    """
    loading, config = record.loading, record.loading.get("config") or {}
    _refuse_others(args, record)
    if os.path.isdir(folder := args.input or record.input["path"]) and "image_root" not in args:
        args.image_root = folder
    for name in _OPENED:
        if config.get(name) and name not in args:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"the job was run with {flag} {quoted(config[name])}, and what rows may read is for you to say; give "
                f"{flag} again"
            )
    if args.input is None:
        _require_near(record.input["path"], args.output, "--input")
    if args.model is None:
        if not loading.get("model"):
            raise ValueError("the report does not say where the model is; name it with --model")
        _require_near(loading["model"], args.output, "--model")
        _require_near(loading.get("tokenizer") if args.tokenizer is None else None, args.output, "--tokenizer")
        args.model, args.tokenizer = loading["model"], args.tokenizer or loading.get("tokenizer")
    if args.model == loading.get("model"):
        args.revision = args.revision or record.commit or loading.get("revision")
    if not args.adapter:
        for name, path in (adapters := loading.get("adapters") or {}).items():
            _require_near(path, args.output, f"--adapter {name}=URL")
        args.adapter = [f"{name}={path}" for name, path in adapters.items()]
    if record.model is not None and "generation" not in record.model:
        args.generation_config = "none"
    own = {name: (record.model or {}).get(name) for name in ("dtype", "max_model_len")}
    own["max_adapters"] = len(args.adapter) or None
    found = {**own, **{name: config.get(name) for name in _TAKEN if config.get(name) is not None}}
    taken = {name: value for name, value in found.items() if name not in args and value is not None}
    vars(args).update(taken)
    return list(taken)


def _refuse_others(args: argparse.Namespace, record: JobRecord) -> None:
    """Raises ValueError for a flag that is not as the job was run. What no record tells of is as the flags say."""
    config, model = record.loading.get("config"), record.model or {}
    recorded: dict[str, Any] = {"seed": record.settings["seed"]}
    fields = EngineConfig.__dataclass_fields__
    if config is not None:
        recorded |= {name: config.get(name, fields[name].default) for name in _RECORDED}
    recorded |= {name: model[name] for name in ("dtype", "max_model_len") if name in model}
    for name, value in given_fields(args, EngineConfig).items():
        if name in recorded and json.dumps(value) != json.dumps(recorded[name]):
            raise ValueError(
                f"{flag_of(fields[name])} is {quoted(value)}, and the job was run with {quoted(recorded[name])}, which "
                "its rows are answered again with; leave it out"
            )


def _whole(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


def _require_near(place: object, output: str, flag: str) -> None:
    """Raises ValueError for what a report alone does not open: a URL of another host or bucket than the output's, and
    a model of the hub."""
    if not isinstance(place, str) or not (is_url(place) or is_hub_id(place)):
        return
    if is_hub_id(place) or urlsplit(place)[:2] != urlsplit(output)[:2]:
        raise ValueError(f"the report names {quoted(place)}, and what is fetched is for you to say; give {flag}")
