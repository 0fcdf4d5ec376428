"""`ferrum-jax bench serve`: asks a running server a load over HTTP, and prints what came of it as one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
from pathlib import Path
from typing import Any

from ferrum_jax.bench.serving import http_client, loads
from ferrum_jax.bench.serving import run as serving
from ferrum_jax.commands.flags import add_fields, given_fields
from ferrum_jax.commands.parsers import new_command
from ferrum_jax.paths import require_folder_of, require_plot

_LOAD_FLAGS = {
    "num_prompts": (int, "requests"),
    "input_len": (int, "tokens of a prompt; the most of a ragged load"),
    "output_len": (int, "tokens to generate; the most of a ragged load"),
    "prefix_len": (int, "tokens that prompts of a shared-prefix load have in common"),
    "num_prefixes": (int, "different prefixes of that load"),
    "max_token_id": (int, "highest token id of random prompts"),
    "seed": (int, "seed of prompts and arrivals"),
    "request_rate": (float, "requests a second; inf asks all at once"),
    "burstiness": (float, "1 draws a Poisson process, less comes in bursts, more evenly"),
}


def add(commands: Any) -> None:
    serve = new_command(
        commands,
        "bench serve",
        _run,
        "measure a running server over HTTP, and print one JSON line",
        "--url URL",
        examples=(
            "--url http://127.0.0.1:8000 --num-prompts 64 --request-rate 8",
            "--url http://127.0.0.1:8000 --load shared-prefix --goodput ttft:500 --plot run.png",
        ),
        common="api_key_file load num_prompts input_len output_len request_rate max_concurrency goodput output plot",
    )
    serve.set_defaults(runs_here=False)
    serve.add_argument("--url", required=True, metavar="URL", help="the server, as in http://127.0.0.1:8000")
    serve.add_argument("--served-model-name", metavar="NAME", help="model to ask for (default: the server's first)")
    serve.add_argument("--api-key-file", type=Path, metavar="FILE", help="file whose first word is the key to ask with")
    serve.add_argument("--insecure", action="store_true", help="take any certificate of an https server")
    _add_load(serve)
    serve.add_argument(
        "--goodput",
        action="append",
        default=[],
        metavar="NAME:MS",
        help=f"limit of a good request, such as ttft:500; names: {', '.join(serving.LIMITED)}; may be repeated",
    )
    serve.add_argument("--output", type=Path, metavar="FILE", help="also write all requests' times to this JSON file")
    serve.add_argument("--plot", type=Path, metavar="FILE", help="draw the run into this PNG, PDF or SVG file")


def _add_load(serve: argparse.ArgumentParser) -> None:
    group, kind = serve.add_argument_group("load"), loads.Load.load
    group.add_argument("--load", choices=loads.LOADS, default=kind, help=f"kind (default: {kind})")
    group.add_argument("--trace", type=Path, metavar="FILE", help="ask the requests of this file of JSON lines instead")
    add_fields(group, loads.Load, _LOAD_FLAGS)
    group.add_argument("--max-concurrency", type=int, metavar="INT", help="most requests at once (default: no limit)")


def _run(args: argparse.Namespace) -> int:
    limits, load = serving.limits_of(args.goodput), loads.Load(**given_fields(args, loads.Load))
    trace = None if args.trace is None else loads.read_trace(args.trace, max_token_id=load.max_token_id)
    requests = trace or loads.requests_of(load)
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ValueError(f"--max-concurrency is {args.max_concurrency}; it must be 1 or more")
    if args.plot is not None:
        require_plot(args.plot)
    if args.output is not None:
        require_folder_of(args.output, "result")
    place = http_client.Address.of(args.url, verify=not args.insecure)
    headers = {} if args.api_key_file is None else {"Authorization": f"Bearer {_key(args.api_key_file)}"}
    try:
        model, answers = asyncio.run(_ask(args, place, headers, requests))
    except ConnectionError as error:
        raise ValueError(str(error)) from error
    found = {"model_id": model, **_what(args, load), **serving.summary_of(answers, limits)}
    if args.output is not None:
        args.output.write_text(json.dumps({**found, **serving.details_of(answers)}), encoding="utf-8")
    if args.plot is not None:
        from ferrum_jax.bench.serving.plot import draw

        draw(answers, args.plot, f"{model}: {len(answers)} requests, {_how(args, load)}")
    print(json.dumps({**found, "first_error": next((each.error for each in answers if each.error), None)}))
    return 1 if found["failed"] else 0


async def _ask(
    args: argparse.Namespace, place: http_client.Address, headers: dict[str, str], requests: list[loads.TimedRequest]
) -> tuple[str, list[http_client.Answered]]:
    model = args.served_model_name or await serving.model_of(place, headers)
    more = {"ignore_eos": True, "temperature": 0}
    answers = await serving.run(
        place, requests, model=model, headers=headers, more=more, max_concurrency=args.max_concurrency
    )
    return model, answers


def _key(path: Path) -> str:
    words = path.read_text(encoding="utf-8").split()
    if not words:
        raise ValueError(f"{path} holds no key; write one into it")
    return words[0]


def _how(args: argparse.Namespace, load: loads.Load) -> str:
    """When they were asked, in words."""
    if args.trace is not None:
        return f"at the times of {args.trace.name}"
    return "all at once" if math.isinf(load.request_rate) else f"{load.request_rate:g} a second"


def _what(args: argparse.Namespace, load: loads.Load) -> dict[str, Any]:
    """How it was asked."""
    rate = "inf" if math.isinf(load.request_rate) else load.request_rate
    drawn = {"load": load.load, "num_prompts": load.num_prompts, "request_rate": rate, "burstiness": load.burstiness}
    traced = {"load": str(args.trace), "num_prompts": None, "request_rate": "trace", "burstiness": None}
    asked = drawn if args.trace is None else traced
    return {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        **asked,
        "max_concurrency": args.max_concurrency,
    }
