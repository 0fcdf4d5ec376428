"""`ferrum-jax serve`: OpenAI's HTTP over one model. Exit codes: see `ferrum_jax.serve.engine_process`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import ssl
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from ferrum_jax import __version__
from ferrum_jax.batch.notice import EXIT_PREEMPTED
from ferrum_jax.cli import model
from ferrum_jax.cli.flags import given_fields
from ferrum_jax.cli.model_names import model_names
from ferrum_jax.cli.parsers import add_flags, new_command
from ferrum_jax.io.files.store import open_store
from ferrum_jax.io.paths import install_command

if TYPE_CHECKING:
    from ferrum_jax.serve.http.settings import ServerSettings

_NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client")


def add(commands: Any) -> None:
    serve = new_command(
        commands,
        "serve",
        _run,
        "answer OpenAI's HTTP requests with one model",
        "--model DIR",
        examples=(
            "--model checkpoints/demo --served-model-name demo --port 8000",
            "--model Qwen/Qwen3-0.6B --api-key-file keys.txt --host 0.0.0.0",
        ),
        common="host port served_model_name api_key_file batches adapter max_adapters",
    )
    _add_address(serve)
    _add_keys(serve)
    _add_limits(serve)
    model.add_model(serve)
    model.add_load(serve)


def _add_address(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("address")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine alone)"
    )
    group.add_argument("--port", type=int, default=8000, metavar="INT", help="port (default: 8000; 0 takes a free one)")
    group.add_argument("--root-path", default="", metavar="PATH", help="path that a proxy puts before all others")
    of_certificate = {
        "--ssl-keyfile FILE": "key of the certificate; with it HTTPS is served",
        "--ssl-certfile FILE": "certificate",
    }
    repeated = {
        "--cors-origin ORIGIN": "origin whose pages may ask, as in https://example.org, or *; may be repeated",
        "--served-model-name NAME": "name by which requests may ask for the model; may be repeated, and answers carry "
        "the first",
    }
    folders = {
        "--adapter-root DIR": "folder below which /v1/load_lora_adapter may load adapters, with an admin key where "
        "there are keys; without it the server loads none",
        "--weights-root DIR": "folder below which /update_weights may read weights, with an admin key; without it the "
        "server reads none",
        "--batches DIR|URL": "folder or bucket that keeps files and batches, which go on after a restart; without it "
        "none are taken",
    }
    add_flags(group, of_certificate)
    add_flags(group, repeated, action="append", default=[])
    model.add_adapters(group, "requests name it as their model")
    add_flags(group, folders)


def _add_keys(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("who may ask")
    files = {
        "--api-key-file FILE": "keys, one a line: KEY [NAME [CACHE]]; two keys share no cached prefix unless they have "
        "one CACHE",
        "--admin-key-file FILE": "keys with which metrics and the page may be read, and adapters loaded",
    }
    add_flags(group, files)


def _add_limits(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("under load")
    counts = {
        "--max-waiting": (1024, "most requests that wait; more get 429 and Retry-After"),
        "--max-waiting-tokens": (4_000_000, "the same, counted in tokens that they may need"),
        "--max-body-bytes": (32 << 20, "most bytes of a request's body"),
        "--max-n": (128, "most choices of a prompt"),
        "--max-prompts": (2048, "most prompts or texts of a request"),
        "--max-file-bytes": (200 << 20, "most bytes of a file for --batches"),
        "--max-batch-rows": (50_000, "most rows of a batch"),
        "--max-stored-bytes": (10 << 30, "most bytes of all files that --batches keeps"),
    }
    for name, (default, text) in counts.items():
        group.add_argument(name, type=int, default=default, metavar="INT", help=f"{text} (default: {default})")
    times = {
        "--watchdog-s S": "/health fails when a step takes longer (default: 30)",
        "--drain-s S": "time for running requests to end after SIGTERM (default: 30)",
    }
    unknown = "take requests with fields that are unknown or not supported, and name these in a header Warning"
    add_flags(group, {"--timeout-s S": "end requests after this time; a request's own `timeout` wins"}, type=float)
    add_flags(group, times, type=float, default=30.0)
    add_flags(group, {"--ignore-unknown-fields": unknown})


def _run(args: argparse.Namespace) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve needs {' and '.join(missing)}; {install_command('server')}")
    config, settings = model.chosen_config(args), _settings(args)
    adapters = model.adapters_of(args, config)
    settings.require_apart(adapters)
    if args.adapter_root is not None and not config.max_adapters:
        raise ValueError("--adapter-root is given, and there is no slot for an adapter; set --max-adapters, as in 8")
    _check_certificate(args)
    if args.batches is not None:
        open_store(args.batches)  # raises for a URL whose driver is not installed
    from ferrum_jax.serve.app.http_process import HttpOrder
    from ferrum_jax.serve.batches.batch_process import BatchOrder
    from ferrum_jax.serve.engine_process import HttpChild, listening

    def order(link: int, listener: int) -> HttpOrder:
        return HttpOrder(settings=settings, link=link, listener=listener, **given_fields(args, HttpOrder))

    def batch_order(link: int) -> BatchOrder:
        return BatchOrder(settings=settings, link=link)

    listener = listening(args.host, args.port)
    port = listener.getsockname()[1]
    with contextlib.ExitStack() as stack:
        _end_at_sigterm()
        child = stack.enter_context(HttpChild(order, listener))
        started = time.monotonic()
        llm = model.open_llm(args, config, stack)
        for name, path in adapters.items():
            llm.load_adapter(name, path)
        child.require_alive()
        return child.serve(
            llm,
            drain_s=args.drain_s,
            on_ready=lambda: _greet(args, settings, port, time.monotonic() - started),
            roots=settings.roots,
            batch_order=None if settings.batches is None else batch_order,
        )


def _settings(args: argparse.Namespace) -> ServerSettings:
    """The server's settings by the flags. Raises ValueError and OSError for settings that cannot work."""
    from ferrum_jax.serve.http.api_keys import read_keys
    from ferrum_jax.serve.http.settings import ServerSettings

    keys = () if args.api_key_file is None else read_keys(args.api_key_file)
    admin_keys = () if args.admin_key_file is None else read_keys(args.admin_key_file)
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port is {args.port}; it must be 0 (a free one) to 65535")
    if args.drain_s < 0:
        raise ValueError(f"--drain-s is {args.drain_s}; it must be 0 or more")
    return ServerSettings(
        **given_fields(args, ServerSettings),
        names=model_names(args.model, args.served_model_name),
        num_listed=max(1, len(args.served_model_name)),
        version=__version__,
        keys=keys,
        admin_keys=admin_keys,
        cors_origins=tuple(args.cors_origin),
    )


def _check_certificate(args: argparse.Namespace) -> None:
    """Raises ValueError before the model loads."""
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise ValueError("--ssl-keyfile is given without --ssl-certfile; give both")
    if args.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
    except (ssl.SSLError, OSError) as error:
        what = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--ssl-certfile {args.ssl_certfile} cannot be used: {what}; give a PEM file and its key"
        ) from error


def _greet(args: argparse.Namespace, settings: ServerSettings, port: int, seconds: float) -> None:
    scheme = "http" if args.ssl_certfile is None else "https"
    host = f"[{args.host}]" if ":" in args.host else args.host
    keys = f"{len(settings.keys)} API keys" if settings.keys else "no API keys: everybody who reaches it may ask"
    print(
        f"ferrum-jax serve: {settings.names[0]} at {scheme}://{host}:{port}/v1 after {seconds:.1f} s, with {keys}",
        file=sys.stderr,
        flush=True,
    )


def _end_at_sigterm() -> None:
    """While the model loads, SIGTERM ends the process at once, as Ctrl-C does."""

    def end(number: int, frame: Any) -> NoReturn:
        raise SystemExit(EXIT_PREEMPTED)

    signal.signal(signal.SIGTERM, end)
