"""One decode step of one model in four forms over meshes: speed, scaling, collectives, memory, compile time.

    python -m scripts.bench_shard --mesh tp=2 --mesh tp=4 --mesh dp=2,tp=2 --devices 4 --png shard.png
    python -m scripts.bench_shard --aot v6e:4x4 --model DIR --layers 4 --mesh tp=16 --mesh dp=2,tp=8

The forms are those of `scripts/shard_forms.py`, all with the same weights and rows; each must draw the tokens that the
single device draws before it is timed. Devices are those that are here; on the CPU --devices simulates so many, which
share its cores: scaling among them says what dividing costs and nothing about accelerators. --aot compiles for a TPU
slice that is not here (`scripts/test -m aot` sets up what that needs) and times nothing. --model: a folder whose
config.json is read; weights are random. Prints a table, and with --json a line for each form.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

from ferrum_jax.io.paths import install_command

_SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One form measured on a mesh. Collectives are those of a step on one device.

    step_ms and tok_s are None where it did not run.
    """

    form: str
    mesh: str
    devices: int
    compile_s: float
    collectives: dict[str, int]
    collective_bytes: int
    memory_bytes: int  # of one device
    step_ms: float | None = None
    step_ms_p10_p90: tuple[float, float] | None = None
    tok_s: float | None = None
    efficiency: float | None = None  # tok/s over those of the single device times the devices

    @property
    def name(self) -> str:
        return {"single": "single", "pmap": f"pmap x {self.devices}"}.get(self.form, f"{self.form} {self.mesh}")


def main() -> None:
    arguments = _parse()
    if arguments.aot:
        from ferrum_jax.cli.compile import without_device

        without_device("tpu")
    elif arguments.devices:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={arguments.devices}"
        os.environ["JAX_PLATFORMS"] = "cpu"
    results = _run(arguments)
    if arguments.json:
        for result in results:
            print(json.dumps(dataclasses.asdict(result) | _versions(arguments)))
    if arguments.png:
        from scripts.shard_plot import plot

        plot(results, arguments.png, _title(arguments))
        print(f"wrote {arguments.png}", file=sys.stderr)


def _run(arguments: argparse.Namespace) -> list[Result]:
    import jax
    from rich.console import Console

    from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
    from ferrum_jax.models.families.registry import spec_of
    from ferrum_jax.runtime.compile.topology import target_devices
    from scripts.shard_forms import Workload, program

    devices = target_devices(f"tpu:{arguments.aot}") if arguments.aot else jax.devices()
    config = json.loads((arguments.model / "config.json").read_text()) if arguments.model else _SMALL
    if arguments.layers:
        config = config | {"num_hidden_layers": arguments.layers}
    work = Workload(
        spec=spec_of(config),
        rows=arguments.rows,
        context=arguments.context,
        dtype="float32" if devices[0].platform == "cpu" else "bfloat16",
        implementation="xla" if devices[0].platform == "cpu" else None,
    )
    shapes = [MeshShape.parse(text) for text in arguments.mesh]
    order = [("single", MeshShape())] + [(form, shape) for shape in shapes for form in arguments.forms]
    sizes = [shape.size for form, shape in order if form == "pmap"]  # replicas know no axes, only how many they are
    replicas = [("pmap", MeshShape(dp=size)) for size in dict.fromkeys(sizes)]
    order = [order[0], *replicas, *(pair for pair in order[1:] if pair[0] != "pmap")]
    console = Console(stderr=True)
    results: list[Result] = []
    expected: Any = None
    for form, shape in order:
        name = "single" if form == "single" else f"{form} {shape}"
        try:
            with console.status(name):
                result, tokens = _measure(program(form, shape, work, devices), arguments)
        except ValueError as error:
            console.print(f"{name} is left out: {error}", highlight=False, soft_wrap=True)
            continue
        if tokens is not None:
            expected = tokens if expected is None else expected
            assert (tokens == expected).all(), f"{name} draws other tokens than the single device"
        if result.tok_s is not None:
            single = results[0].tok_s if results else result.tok_s
            assert single is not None
            result = dataclasses.replace(result, efficiency=result.tok_s / single / result.devices)
        results.append(result)
        console.print(f"{name}: compiled in {result.compile_s:.0f} s", highlight=False, soft_wrap=True)
    _print(results, _title(arguments))
    return results


def _measure(program: Any, arguments: argparse.Namespace) -> tuple[Result, Any]:
    """The result without efficiency, and the tokens that the first step draws; None where it is only compiled."""
    from scripts.hlo_collectives import count_collectives

    started = time.perf_counter()
    executable = program.compile()
    compile_s = time.perf_counter() - started
    counts, collective_bytes = count_collectives(executable.as_text())
    memory = executable.memory_analysis()
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    result = Result(
        form=program.form,
        mesh=str(program.mesh),
        devices=1 if program.form == "single" else program.mesh.size,
        compile_s=round(compile_s, 2),
        collectives=dict(counts),
        collective_bytes=collective_bytes,
        memory_bytes=taken - memory.alias_size_in_bytes,
    )
    if arguments.aot:
        return result, None
    seconds, tokens = _time(program, executable, arguments.steps)
    p10, *_, p90 = statistics.quantiles(seconds, n=10)
    median = statistics.median(seconds)
    return dataclasses.replace(
        result,
        step_ms=round(median * 1e3, 3),
        step_ms_p10_p90=(round(p10 * 1e3, 3), round(p90 * 1e3, 3)),
        tok_s=round(arguments.rows / median, 1),
    ), tokens


def _time(program: Any, executable: Any, steps: int) -> tuple[list[float], Any]:
    """Seconds of each step, and the tokens that the first one draws. Each step waits for the one before it."""
    weights, *pools, blob = program.make()
    seconds: list[float] = []
    tokens = None
    for _ in range(steps + 2):  # two to warm up
        started = time.perf_counter()
        results = executable(weights, *pools, blob)
        found = program.read(results)
        seconds.append(time.perf_counter() - started)
        tokens = found if tokens is None else tokens
        pools = list(results[:4])
    return seconds[2:], tokens


def _print(results: list[Result], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    timed = any(result.tok_s is not None for result in results)
    for column in ("form", "mesh"):
        table.add_column(column)
    measured = ("tok/s", "step, ms", "p10 - p90", "efficiency") if timed else ()
    for column in (*measured, "collectives", "MB", "memory, MB", "compile, s"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.form,
            {"single": "", "pmap": f"{result.devices} replicas"}.get(result.form, result.mesh),
            *(_measured(result) if timed else ()),
            " ".join(f"{count} {kind}" for kind, count in sorted(result.collectives.items())) or "none",
            f"{result.collective_bytes / 1e6:.2f}",
            f"{result.memory_bytes / 1e6:,.1f}",
            f"{result.compile_s:.1f}",
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


def _measured(result: Result) -> tuple[str, ...]:
    span = result.step_ms_p10_p90
    return (
        "" if result.tok_s is None else f"{result.tok_s:,.0f}",
        "" if result.step_ms is None else f"{result.step_ms:.2f}",
        "" if span is None else f"{span[0]:.2f} - {span[1]:.2f}",
        "" if result.efficiency is None else f"{result.efficiency:.0%}",
    )


def _title(arguments: argparse.Namespace) -> str:
    import jax

    model = arguments.model.name if arguments.model else "a small Llama"
    layers = f", layers: {arguments.layers}" if arguments.layers else ""
    what = f"{model}{layers}, {arguments.rows} rows of {arguments.context} tokens; "
    if arguments.aot:
        return f"{what}compiled for {arguments.aot}, which is not here, jax {jax.__version__}"
    kind = jax.devices()[0].device_kind
    if jax.default_backend() == "cpu":
        return f"{what}{jax.device_count()} SIMULATED devices on {os.cpu_count()} CPU cores, jax {jax.__version__}"
    return f"{what}{jax.device_count()} {kind}, jax {jax.__version__}"


def _versions(arguments: argparse.Namespace) -> dict[str, Any]:
    import jax

    from scripts.git_state import git_state

    device = f"compiled for {arguments.aot}" if arguments.aot else jax.devices()[0].device_kind
    return {"jax": jax.__version__, "device": device, "cores": os.cpu_count(), **git_state()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", action="append", required=True, help="such as dp=2,tp=4; may be repeated")
    parser.add_argument(
        "--forms", nargs="+", choices=("pmap", "jit", "shard_map"), default=["pmap", "jit", "shard_map"]
    )
    parser.add_argument("--rows", type=int, default=16, help="of all devices together")
    parser.add_argument("--context", type=int, default=512, help="tokens that each row has already")
    parser.add_argument("--steps", type=int, default=20, help="that are timed")
    parser.add_argument("--model", type=pathlib.Path, help="a folder with a config.json; else a small Llama")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--devices", type=int, help="simulate this many on the CPU")
    parser.add_argument(
        "--aot", metavar="SLICE", help="compile for a TPU slice by name, such as v6e:4x4, and time nothing"
    )
    parser.add_argument("--png", type=pathlib.Path, help="write the plots to this file (matplotlib)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--png is given and matplotlib is not there; {install_command('plot')}")
    if arguments.aot:  # a pmap is of devices that are here
        arguments.forms = [form for form in arguments.forms if form != "pmap"]
    return arguments


if __name__ == "__main__":
    main()
