"""`ferrum-jax check`: measures this machine and checks its kernels."""

import argparse
import json
from pathlib import Path
from typing import Any

from ferrum_jax.cli.flags import given_fields
from ferrum_jax.cli.parsers import add_flags, new_command
from ferrum_jax.config import EngineConfig
from ferrum_jax.io.paths import make_folder, require_folder_of

EXIT_WRONG = 1


def add(commands: Any) -> None:
    check = new_command(
        commands,
        "check",
        _run,
        "measure this machine and check its kernels; engines follow the result",
        "",
        examples=("--model checkpoints/demo", "--full --output report"),
    )
    switches = {
        "--full": "all cases, prompts, KV dtypes and meshes; no limit of time",
        "--tune": "also time tiles of the model's decode attention on a TPU; keep the best",
    }
    add_flags(check, switches)
    check.add_argument("--mesh", default="tp=1", metavar="MESH", help="with --tune: devices by axis (default: tp=1)")
    check.add_argument(
        "--seconds",
        type=float,
        default=argparse.SUPPRESS,
        metavar="N",
        help="in which it is to be over, about; cases that find no time are left out (default: 300)",
    )
    check.add_argument(
        "--parts",
        type=lambda text: tuple(name.strip() for name in text.split(",")),
        default=argparse.SUPPRESS,
        metavar="NAMES",
        help="ops to check, and engine, with commas between them (default: all)",
    )
    check.add_argument("--model", metavar="DIR", help="model that the engine is checked with (default: the demo model)")
    check.add_argument(
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for check.json and check.html, without paths, prompts or names of machines; created if missing "
        "(default: the current folder)",
    )
    check.add_argument(
        "--compilation-cache-dir",
        type=lambda text: text or None,
        default=EngineConfig().compilation_cache_dir,
        metavar="DIR",
        help="where executables and verdicts on kernels are kept; '' keeps none",
    )
    check.add_argument("--fault", help=argparse.SUPPRESS)  # for tests: one of engine/startup/faults.py
    check.add_argument("--silence", dest="silence_s", type=float, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    check.set_defaults(runs_here=True)


def _run(args: argparse.Namespace) -> int:
    from ferrum_jax.cli.device_check.report import page
    from ferrum_jax.cli.device_check.run_check import CheckOptions, check_device
    from ferrum_jax.core.progress import plain_console, status

    make_folder(args.output, "report")
    for name in ("check.json", "check.html", "check.txt"):
        require_folder_of(args.output / name, "report")
        if (args.output / name).is_dir():
            raise ValueError(f"{args.output / name}, where the report belongs, is a folder; name another place")
    options = CheckOptions(**given_fields(args, CheckOptions))
    with status(plain_console(stderr=True), "checking this machine") as update:
        report = check_device(options, update)
    report.show(plain_console())  # before it is written, as a disk that is full loses minutes of work
    (args.output / "check.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (args.output / "check.html").write_text(page(report))
    words = args.output / "check.txt"
    words.unlink(missing_ok=True)
    if report.words:
        words.write_text("\n\n".join(report.words))
    print(f"{args.output / 'check.json'} and check.html hold this, for a bug report")
    if report.words:
        print(f"{words} holds the tracebacks; it has paths of this machine")
    return 0 if report.is_right else EXIT_WRONG
