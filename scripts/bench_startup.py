"""From `import jax` to the first token, phase by phase: cold, and with a bundle.

    python -m scripts.bench_startup [--model DIR | --shape NAME] [--bundle DIR] [--no-cold] [--json] [engine flags]

Each start is a process of its own that times itself. A bundle that DIR does not hold yet is made first and not counted.
Weights and executables are made side by side, so of the two only the slower one delays the first token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from ferrum_jax.cli.flags import add_engine_flags, engine_config
from ferrum_jax.config import EngineConfig

_PROMPT = list(range(16, 32))
_PHASES = {
    "import_jax": "import jax",
    "import": "import ferrum_jax.llm",
    "mesh": "devices",
    "llm": "LLM(...)",
    "weights": "  of it weights",
    "executables": "  of it executables",
    "first_token": "first token, 16 in",
    "after_jax": "all after import jax",
    "but_weights": "  without what weights add",
}
_DEFAULTS = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 1024}


def measure(model: str, config: dict[str, Any], bundle: str | None) -> dict[str, Any]:
    """(wall seconds, CPU seconds or None) of each phase of this process, and how much it compiled."""
    found: dict[str, tuple[float, float | None]] = {}

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def since(before: tuple[float, float]) -> tuple[float, float]:
        after = now()
        return after[0] - before[0], after[1] - before[1]

    started = now()
    import jax

    found["import_jax"] = since(started)
    imported = now()
    from ferrum_jax import LLM, SamplingParams

    found["import"] = since(imported)
    before = now()
    jax.devices()
    found["mesh"] = since(before)
    before = now()
    llm = LLM(model, EngineConfig(**config), bundle=bundle, require_bundle=bundle is not None)
    found["llm"] = since(before)
    before = now()
    llm.generate([_PROMPT], SamplingParams(max_tokens=1, temperature=0.0), progress=False)
    found["first_token"] = since(before)
    found["after_jax"] = since(imported)
    weights_s, executables_s = llm.loaded.weights_s, llm.loaded.executables_s
    found |= {"weights": (weights_s, None), "executables": (executables_s, None)}
    found["but_weights"] = (found["after_jax"][0] - max(weights_s - executables_s, 0.0), None)
    stats = llm.stats()
    return {
        "seconds": found,
        "executables": stats["executables"],
        "compiles": stats["compiles_before_ready"] + stats["compiles_after_ready"],
        "weights_bytes": stats["weights_bytes"],
        "jax": jax.__version__,
    }


def start(model: str, config: dict[str, Any], bundle: str | None) -> dict[str, Any]:
    """`measure` in a process of its own. Raises RuntimeError with what that said if it fails."""
    order = json.dumps({"model": model, "config": config, "bundle": bundle})
    process = subprocess.run(
        [sys.executable, "-m", "scripts.bench_startup", "--child", order], capture_output=True, text=True
    )
    if process.returncode:
        raise RuntimeError(f"the start failed:\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


def show(starts: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="seconds: wall (CPU of all threads)")
    table.add_column("phase")
    for name in starts:
        table.add_column(name, justify="right")
    for phase, text in _PHASES.items():
        table.add_row(text, *(_seconds(*found["seconds"][phase]) for found in starts.values()))
    for count in ("executables", "compiles"):
        table.add_row(count, *(str(found[count]) for found in starts.values()))
    Console().print(table)


def _seconds(wall_s: float, cpu_s: float | None) -> str:
    return f"{wall_s:.2f}" if cpu_s is None else f"{wall_s:.2f} ({cpu_s:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/demo", metavar="DIR", help="default: checkpoints/demo")
    parser.add_argument("--shape", metavar="NAME", help="a published shape with random weights instead of --model")
    shape_dir = pathlib.Path(tempfile.gettempdir())
    parser.add_argument(
        "--shape-dir", type=pathlib.Path, default=shape_dir, metavar="DIR", help="where weights are kept"
    )
    parser.add_argument("--bundle", metavar="DIR", help="a bundle to use, or where to make it; else it is temporary")
    parser.add_argument("--no-cold", action="store_true", help="leave out the start that compiles")
    parser.add_argument("--json", action="store_true", help="print one object and no table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    add_engine_flags(parser)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(measure(**json.loads(args.child))))
        return
    model = args.model
    if args.shape is not None:
        from scripts.shapes import SHAPES, write_random_checkpoint

        if args.shape not in SHAPES:
            parser.error(f"no shape is called {args.shape!r}; there are {sorted(SHAPES)}")
        model = str(write_random_checkpoint(args.shape, args.shape_dir))
    config = dataclasses.replace(engine_config(args, _DEFAULTS), compilation_cache_dir=None)
    with tempfile.TemporaryDirectory() as folder:
        from ferrum_jax.planning.offline.bundle_order import BundleOrder
        from ferrum_jax.planning.offline.make_bundle import make_bundle

        bundle = args.bundle or f"{folder}/bundle"
        make_bundle(BundleOrder(model=model, target="cpu", config=config), bundle, num_processes=2)
        fields = dataclasses.asdict(config)
        starts = {} if args.no_cold else {"cold": start(model, fields, None)}
        starts["with bundle"] = start(model, fields, bundle)
    if args.json:
        print(json.dumps({"model": model, "config": fields, "starts": starts}))
    else:
        show(starts)


if __name__ == "__main__":
    main()
