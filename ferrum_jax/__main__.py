"""The `ferrum-jax` command: generate, batch, bench, convert, cache.

Flags are the fields of EngineConfig and SamplingParams under their own names; what is not given keeps the
field's default. jax is imported by the commands that need it and only once their files have been checked.
Exit codes: 0 done, 1 some rows failed (batch), 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_jax.config import EngineConfig
from ferrum_jax.flags import add_engine_flags, add_sampling_flags, engine_config, sampling_params
from ferrum_jax.prompt import Prompt
from ferrum_jax.request import RequestOutput

if TYPE_CHECKING:
    from ferrum_jax.llm import LLM

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("ferrum-jax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        print(f"ferrum-jax {args.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _generate(args: argparse.Namespace) -> int:
    params, config = sampling_params(args), engine_config(args)
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ValueError("log-probabilities are printed as JSON only; add --json")
    prompts = _prompts(args)
    with contextlib.ExitStack() as stack:
        llm = _load(args, config, stack)
        if len(prompts) == 1 and params.n == 1 and not args.json:
            _print_stream(llm.stream(prompts[0], params))
        else:
            _print_outputs(llm.generate(prompts, params), as_json=args.json)
        if args.stats:
            print(json.dumps(llm.stats()), file=sys.stderr)
    return 0


def _batch(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ferrum_jax.batch.job import run_batch

    config = engine_config(args)
    settings = {
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "max_model_len": config.max_model_len,
        "tokenizer": args.tokenizer,
    }
    with contextlib.ExitStack() as stack:

        def make_llm() -> LLM:
            return _load(args, _batch_config(config, given="invariant" in args), stack)

        model = os.path.basename(os.path.abspath(args.model))
        console = Console(stderr=True)
        return run_batch(
            make_llm, args.input, args.output, model=model, seed=config.seed, settings=settings, console=console
        )


def _batch_config(config: EngineConfig, *, given: bool) -> EngineConfig:
    """A job's config: where nothing else was said, the CPU gives every row the same bits in any company."""
    import jax

    if given or jax.default_backend() != "cpu" or config.dtype == "bfloat16":
        return config
    return dataclasses.replace(config, invariant=True)


def _convert(args: argparse.Namespace) -> int:
    from checkpoints.convert import convert
    from checkpoints.folder import read_json
    from ferrum_jax.models import registry

    config = read_json(args.hf / "config.json")
    spec = registry.spec_of(config)
    family = registry.family_of(spec.architecture)
    dtype = args.dtype or _main_dtype(args.hf)
    _, targets = registry.unbind(registry.abstract_model(spec, dtype))
    rules, harmless = family.weight_rules(spec), family.harmless(spec)
    summary = convert(args.hf, args.out, rules=rules, harmless=harmless, targets=targets, dtype=dtype)
    print(
        f"{args.out}: {summary.parameters} parameters, {summary.bytes / 1e6:,.1f} MB in {summary.dtype}, "
        f"largest rounding {summary.max_cast_error:.3g}"
    )
    return 0


def _bench(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        llm = _load(args, engine_config(args), stack)
        from ferrum_jax.bench import measure

        print(json.dumps({"model": os.path.basename(os.path.abspath(args.model)), **measure(llm, args.workload)}))
    return 0


def _cache_save(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    with contextlib.ExitStack() as stack:
        llm = _load(args, engine_config(args), stack)
        for prompt in prompts:
            llm.cache_prefix(prompt)
        count = llm.save_prefix_cache(args.dir, prompts)
    print(f"{args.dir}: {count} blocks of {llm.ledger.block_size} tokens")
    return 0


def _cache_load(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        llm = _load(args, engine_config(args), stack)
        count = llm.load_prefix_cache(args.dir)
    print(f"{args.dir}: {count} blocks of {llm.ledger.block_size} tokens, undamaged and of this model")
    return 0


def _cache_simulate(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ferrum_jax.what_if import simulate

    simulate(args.trace, args.blocks, args.plot, Console())
    return 0


def _block_counts(text: str) -> list[int]:
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of pool sizes, as in 1024,2048,4096")
    return sizes


def _main_dtype(folder: Path) -> str:
    """The dtype of most of a folder's weights, which config.json need not tell right."""
    from checkpoints.huggingface import map_tensors

    sizes = collections.Counter()
    for tensor in map_tensors(folder).values():
        sizes[tensor.dtype.name] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _load(args: argparse.Namespace, config: EngineConfig, stack: contextlib.ExitStack) -> LLM:
    """The model, ready; a trace of what follows is written if --profile asks for one."""
    from rich.console import Console
    from rich.markup import escape

    from ferrum_jax.llm import LLM

    console = Console(stderr=True)
    name = escape(str(args.model))
    with console.status(f"loading {name}") as status:

        def show(what: str, done: int, total: int) -> None:
            status.update(f"loading {name}: {what} {done}/{total}")

        llm = LLM(args.model, config, tokenizer=args.tokenizer, on_progress=show)
    console.print(f"{name} ready in {llm.startup_s:.1f} s", highlight=False)
    ledger = llm.ledger
    if ledger.head_copies > 1:
        console.print(
            f"{config.mesh} is more devices than KV heads: each head is on {ledger.head_copies} of them, and "
            f"{ledger.repeated_bytes:,} of {ledger.kv_bytes:,} KV bytes of a device are repeated",
            highlight=False,
        )
    if args.load_prefix_cache is not None:
        count = llm.load_prefix_cache(args.load_prefix_cache)
        console.print(f"{count} blocks of cached prefixes loaded", highlight=False)
    if args.profile is not None:
        import jax

        stack.enter_context(jax.profiler.trace(str(args.profile)))
    return llm


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    texts = list(args.prompt)
    for path in args.prompt_file:
        texts.append(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    ids = [[_token_id(token) for token in text.replace(",", " ").split()] for text in args.token_ids]
    if not texts and not ids:
        raise ValueError("there is no prompt; give PROMPT, --prompt-file FILE (- reads standard input) or --token-ids")
    if args.system is not None and not args.chat:
        raise ValueError("--system needs --chat")
    if not args.chat:
        return [*texts, *ids]
    if ids:
        raise ValueError("--chat takes text; leave --token-ids out")
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [[*system, {"role": "user", "content": text}] for text in texts]


def _token_id(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--token-ids holds {text!r}; give whole numbers, as in '1 2 3'")
    return int(text)


def _print_stream(outputs: Iterator[RequestOutput]) -> None:
    shown = 0
    for output in outputs:
        print(output.text[shown:], end="", flush=True)
        shown = len(output.text)
    print()


def _print_outputs(outputs: Sequence[RequestOutput], *, as_json: bool) -> None:
    for index, output in enumerate(outputs):
        if as_json:
            print(json.dumps(dataclasses.asdict(output)))
            continue
        for choice in output.outputs:
            print(f"--- prompt {index}, choice {choice.index} ({choice.finish_reason}) ---\n{choice.text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ferrum-jax", description="LLM inference in JAX: paged KV, prefix reuse.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = _command(
        commands, "generate", _generate, "complete prompts and print the text", "--model DIR PROMPT ..."
    )
    generate.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to complete")
    _add_prompts(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object for each prompt")
    generate.add_argument("--stats", action="store_true", help="print the engine's counters to stderr at the end")
    _add_model(generate)
    _add_load(generate)
    add_sampling_flags(generate)

    batch = _command(
        commands,
        "batch",
        _batch,
        "answer a JSONL file of requests; started again, it continues where it stopped",
        "--model DIR --input FILE --output FILE",
    )
    batch.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL file, one request a line, in the OpenAI batch form or the short form",
    )
    batch.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL file, one answer a line; appended to if it exists",
    )
    _add_model(batch)
    _add_load(batch)

    bench = _command(
        commands,
        "bench",
        _bench,
        "measure offline throughput, or the error of a KV dtype, and print one JSON line",
        "--model DIR --workload NAME",
    )
    bench.add_argument(
        "--workload",
        required=True,
        choices=("decode", "single", "shared_prefix", "ragged", "kv_error"),
        help="what to run; kv_error measures no time but what --kv-dtype does to the logits",
    )
    _add_model(bench)

    convert = _command(
        commands, "convert", _convert, "write a Hugging Face folder as an Orbax checkpoint", "--hf DIR --out DIR"
    )
    convert.add_argument(
        "--hf", type=Path, required=True, metavar="DIR", help="folder with config.json and safetensors"
    )
    convert.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, new or empty")
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: the checkpoint's own)",
    )
    _add_cache(commands.add_parser("cache", help="keep prefixes between runs; study the cache", allow_abbrev=False))
    return parser


def _add_cache(parser: argparse.ArgumentParser) -> None:
    """The commands of `ferrum-jax cache`."""
    commands = parser.add_subparsers(dest="cache_command", required=True, metavar="COMMAND")
    save = _command(
        commands,
        "cache save",
        _cache_save,
        "compute prompts and write their KV to a folder, for --load-prefix-cache of generate and batch",
        "DIR --model DIR --prompt TEXT ...",
    )
    save.add_argument("dir", type=Path, metavar="DIR", help="folder to write, new or empty")
    save.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="text to keep; may be repeated")
    _add_prompts(save)
    _add_model(save)
    load = _command(
        commands,
        "cache load",
        _cache_load,
        "check that a folder of prefixes is undamaged and fits a model",
        "DIR --model DIR",
    )
    load.add_argument("dir", type=Path, metavar="DIR", help="folder that `cache save` wrote")
    _add_model(load)
    simulate = _command(
        commands,
        "cache simulate",
        _cache_simulate,
        "replay a trace at other pool sizes, without the model, and print what the cache would have done",
        "--trace FILE",
    )
    simulate.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="written by generate or batch with --trace"
    )
    simulate.add_argument(
        "--blocks",
        type=_block_counts,
        metavar="N,...",
        help="pool sizes in blocks (default: from a quarter to four times the traced one)",
    )
    simulate.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw hit rate over pool size (needs matplotlib)"
    )


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, needed: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name.split()[-1],
        help=text,
        description=text[0].upper() + text[1:] + ".",
        usage=f"ferrum-jax {name} {needed} [options]",
        allow_abbrev=False,
    )
    command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    command.set_defaults(run=run)
    return command


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    """The ways to give prompts beside arguments of their own."""
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="file that holds a prompt; - is standard input",
    )
    parser.add_argument(
        "--token-ids", action="append", default=[], metavar="IDS", help="a prompt as token ids, such as '1 2 3'"
    )
    parser.add_argument("--chat", action="store_true", help="prompts are user messages for the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message before each prompt, with --chat")


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load-prefix-cache", type=Path, metavar="DIR", help="begin with the prefixes that `cache save` wrote there"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder or Orbax checkpoint")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder whose tokenizer to use instead of the model's own")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write a profiler trace of the run")
    parser.set_defaults(load_prefix_cache=None)
    add_engine_flags(parser)


if __name__ == "__main__":
    sys.exit(main())
