"""`ferrum-jax generate`: completes prompts and prints the text."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ferrum_jax.cli.flags import add_sampling_flags, sampling_params
from ferrum_jax.cli.model import add_load, add_model, chosen_config, open_llm
from ferrum_jax.cli.parsers import new_command
from ferrum_jax.cli.prompt_flags import add_prompts, reach_of, read_prompts
from ferrum_jax.core.outputs import RequestOutput


def add(commands: Any) -> None:
    generate = new_command(
        commands,
        "generate",
        _run,
        "complete prompts and print the text",
        "--model DIR PROMPT ...",
        examples=(
            "--model checkpoints/demo --max-tokens 64 --temperature 0 'def add(a, b):'",
            "--model Qwen/Qwen3-0.6B --max-tokens 256 --chat 'Why is the sky blue?'",
        ),
        common="prompt_file chat json max_tokens temperature",
    )
    generate.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to complete")
    add_prompts(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object for each prompt")
    generate.add_argument("--stats", action="store_true", help="print the engine's counters to stderr at the end")
    add_model(generate)
    add_load(generate)
    add_sampling_flags(generate)


def _run(args: argparse.Namespace) -> int:
    params, config = sampling_params(args), chosen_config(args)
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ValueError("log-probabilities are printed as JSON only; add --json")
    if not args.json and not params.detokenize:
        raise ValueError("with --no-detokenize there are only token ids, printed as JSON only; add --json")
    prompts = read_prompts(args)
    with contextlib.ExitStack() as stack:
        llm = open_llm(args, config, stack, reach_of(prompts, params))
        params = params.over(llm.identity.generation)
        if len(prompts) == 1 and params.n == 1 and not args.json:
            _print_stream(llm.stream(prompts[0], params))
        else:
            _print_outputs(llm.generate(prompts, params), as_json=args.json)
        if args.stats:
            print(json.dumps(llm.stats()), file=sys.stderr)
    return 0


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
