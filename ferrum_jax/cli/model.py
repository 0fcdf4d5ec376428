"""The flags that name a model, and the LLM that they ask for."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ferrum_jax.cli.flags import add_engine_flags, engine_config
from ferrum_jax.cli.parsers import add_flags
from ferrum_jax.config import MANY_ROWS, EngineConfig
from ferrum_jax.engine.startup.accelerators import Chips
from ferrum_jax.inputs.sizes.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from ferrum_jax.engine.startup.load_request import Measure
    from ferrum_jax.inputs.identity import ModelIdentity
    from ferrum_jax.llm import LLM


def add_model(parser: argparse.ArgumentParser, *, needed: bool = True) -> None:
    add_source(parser, "Hugging Face folder or Orbax checkpoint, its URL, or a model of the hub as ORG/NAME", needed)
    parser.add_argument("--tokenizer", metavar="DIR", help="folder whose tokenizer to use instead of the model's own")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a profile of the run")
    of_bundle = {
        "--bundle DIR": "executables that `ferrum-jax compile` made: a folder or its URL",
        "--require-bundle": "refuse to compile what the bundle lacks",
    }
    add_flags(parser, of_bundle)
    parser.set_defaults(load_prefix_cache=None, runs_here=True)
    add_hosts(parser)
    add_engine_flags(parser)


def add_source(parser: argparse.ArgumentParser, text: str, needed: bool = True) -> None:
    """The model, and its revision. text: the help of --model."""
    text = text if needed else f"{text} (default: the one that the report names)"
    parser.add_argument("--model", required=needed, metavar="DIR", help=text)
    add_revision(parser)


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit of a model of the hub (default: its main branch)"
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts, each with this same command")
    flags = {
        "--coordinator HOST:PORT": "address of process 0, which alone reads and writes; auto in a TPU slice, where jax "
        "finds the processes",
        "--coordinator-secret-file FILE": "file with the secret that all processes share; needed unless all are on one "
        "host; without it FERRUM_JAX_COORDINATOR_SECRET is read",
        "--num-processes INT": "number of processes",
        "--process-id INT": "number of this process, from 0",
    }
    add_flags(group, flags)


def add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load-prefix-cache", type=Path, metavar="DIR", help="begin with the prefixes that `cache save` wrote there"
    )


def add_adapters(parser: argparse._ActionsContainer, how: str) -> None:
    """how: requests name one, in words."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help=f"LoRA that PEFT saved, or its URL; {how}; may be repeated (see --max-adapters)",
    )


def named_adapters(args: argparse.Namespace) -> dict[str, str]:
    """The folder of each adapter that --adapter names. Raises ValueError for what is not NAME=DIR."""
    found: dict[str, str] = {}
    for text in args.adapter:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise ValueError(f"--adapter is {text!r}; it must be NAME=DIR, with each name once")
        found[name] = path
    return found


def adapters_of(args: argparse.Namespace, config: EngineConfig) -> dict[str, str]:
    """The adapters of `named_adapters`. Raises ValueError too where no slot could hold them."""
    found = named_adapters(args)
    if found and not config.max_adapters:
        raise ValueError(f"--adapter names {len(found)}, and there is no slot for one; set --max-adapters, as in 8")
    if found and args.num_processes not in (None, 1):
        raise ValueError(
            f"--adapter does not work over {args.num_processes} processes; merge the adapter with "
            "`ferrum-jax convert --adapter`, or run in one process"
        )
    return found


def chosen_config(args: argparse.Namespace, defaults: Mapping[str, Any] = MappingProxyType({})) -> EngineConfig:
    """The config of the flags; what they leave open is the bundle's own where one is given, and then as `defaults`."""
    if args.bundle is None:
        return engine_config(args, defaults)
    from ferrum_jax.runtime.compile.bundle import Bundle

    own = Bundle.open(args.bundle).purpose.config
    return engine_config(args, {**defaults, **{name: value for name, value in own.items() if value is not None}})


def exact_config(args: argparse.Namespace) -> EngineConfig:
    """The config of what a batch job loads: the CPU gives every row the same bits in any company."""
    return chosen_config(args, _exact(args) if runs_on_cpu() else {})


def job_config(args: argparse.Namespace) -> EngineConfig:
    """The config of a batch job: rows of a job resemble each other, so tokens are drafted where that pays.

    On the CPU exact and of many rows; elsewhere they are many anyway, if there is room. Flags and bundle may say
    otherwise.
    """
    drafts = {"speculative_config": SpeculativeConfig(method="suffix")}
    if not runs_on_cpu():
        return chosen_config(args, drafts)
    rows = chosen_config(args).rows_or(MANY_ROWS)
    return chosen_config(args, {**drafts, **_exact(args), "max_num_seqs": rows})


def _exact(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.bundle is not None or getattr(args, "dtype", None) == "bfloat16" else {"invariant": True}


def runs_on_cpu() -> bool:
    """Whether jax takes the CPU.

    Said without opening a device: where a kernel is to be checked on a chip a child must open it first, and with
    several processes the first look at devices waits until all of them look.
    """
    import jax

    if platforms := jax.config.values["jax_platforms"]:
        return platforms.split(",")[0] == "cpu"
    chips = Chips.here()
    return not (chips.platform and chips.has_package())


def open_llm(
    args: argparse.Namespace,
    config: EngineConfig,
    stack: contextlib.ExitStack,
    reach: Measure | None = None,
    on_identity: Callable[[ModelIdentity], None] = lambda identity: None,
    commit: str | None = None,
    begun_with: Mapping[str, str] = MappingProxyType({}),
) -> LLM:
    """The model, ready; writes a profile of what follows if --profile asks for one.

    reach, on_identity, begun_with: of `LLM`. commit: of a hub's model; None is that of --revision.
    """
    from ferrum_jax.core.progress import plain_console, status
    from ferrum_jax.llm import LLM

    _check_folders(args)
    console = plain_console(stderr=True)
    with status(console, f"loading {args.model}") as update:
        llm = LLM(
            args.model,
            config,
            revision=commit or args.revision,
            tokenizer=args.tokenizer,
            bundle=args.bundle,
            require_bundle=args.require_bundle,
            reach=reach,
            on_progress=lambda what, done, total: update(f"{what} {done}/{total}"),
            on_problem=lambda text: console.print(text, highlight=False),
            on_identity=on_identity,
            begun_with=begun_with,
        )
    for sentence in (f"{args.model} ready in {llm.startup_s:.1f} s{_room(llm)}", *llm.choices):
        console.print(sentence, highlight=False, soft_wrap=True)
    for sentence in _notes(llm):
        console.print(sentence, highlight=False)
    if args.load_prefix_cache is not None:
        count = llm.load_prefix_cache(args.load_prefix_cache)
        console.print(f"{count} blocks of cached prefixes loaded", highlight=False)
    if args.profile is not None:
        import jax

        stack.enter_context(jax.profiler.trace(str(args.profile)))
    return llm


def _notes(llm: LLM) -> Iterator[str]:
    """Sentences for the user about an LLM that is ready."""
    ledger = llm.ledger
    if llm.products.why:
        yield llm.products.why
    if llm.attention.why and not llm.attention.is_set_aside:
        yield llm.attention.why
    if llm.bundled is not None:
        found = ", ".join(sorted(llm.bundled.found)) or "none"
        yield f"bundle: {llm.bundled.hits} executables ({found}); {llm.bundled.misses} others"
    if ledger.head_copies > 1:
        yield (
            f"{llm.config.mesh} is more devices than KV heads: each head is on {ledger.head_copies} of them, and "
            f"{ledger.repeated_bytes:,} of {ledger.kv_bytes:,} KV bytes of a device are repeated"
        )
    if refused := llm.refused_products:
        reasons = "; ".join(dict.fromkeys(refused.values()))
        yield f"{len(refused)} quantised weights are multiplied by 'xla': {reasons}"
    if ledger.padded_bytes:
        yield (
            f"heads of {llm.loaded.layout.options.spec.attention.head_dim} values are padded to what the kernels read: "
            f"{ledger.padded_bytes:,} of {ledger.kv_bytes:,} KV bytes of a device are zeros"
        )
    if llm.host_memory_kind is not None:
        yield (
            f"host tier: {ledger.num_shards * ledger.num_host_blocks} blocks of {ledger.host_block_bytes:,} bytes in "
            f"{llm.host_memory_kind} memory"
        )


def _room(llm: LLM) -> str:
    """The engine's capacity in words; "" for an encoder, which has no pools."""
    ledger, config = llm.ledger, llm.config
    if not ledger.groups:
        return ""
    rows = config.num_rows * ledger.num_shards
    size = f"{ledger.kv_bytes / 2**30:.2f} GiB" if ledger.kv_bytes >= 2**28 else f"{ledger.kv_bytes / 2**20:.1f} MiB"
    return f": {rows:,} rows at once, KV pool of {ledger.kv_tokens:,} tokens ({size} a device)"


def _check_folders(args: argparse.Namespace) -> None:
    """Checks the folders that are read or written once the model is ready."""
    if args.profile is not None:
        args.profile.mkdir(parents=True, exist_ok=True)
    if args.load_prefix_cache is not None and not args.load_prefix_cache.is_dir():
        raise ValueError(f"{args.load_prefix_cache} is not a folder; name one that `ferrum-jax cache save` wrote")
