"""Tiles of the TPU's decode kernel by static count, kept as data beside the kernel, which takes those that are better.

    python -m scripts.tune_static                        three shapes of models, v5e, v6e and v7x: 5 to 20 minutes
    python -m scripts.tune_static --case llama_8b_decode_int8 --generation v6e

It is the walk of `ferrum-jax check --tune`, where no TPU is: the kernel's own tiles and their neighbours are compiled,
and the cycles of their schedules counted (see `tpu_static`). A launch takes its cycles, or the time in which its K and
V come from memory where that is longer: tiles that save cycles which wait for memory anyway are not better.
"""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

from scripts import tpu_attention  # isort: skip  # before jax: it sets what libtpu reads

import pallas_kernels
from ferrum_jax.inputs.sizes.tiles import tiles_text
from pallas_kernels.paged_attention import TpuConfig
from pallas_kernels.paged_attention.cases import REAL_CASES, Case, Work
from pallas_kernels.paged_attention.fastest_tiles import fastest
from pallas_kernels.paged_attention.tpu.decode.config import DecodeConfig
from pallas_kernels.target import Target
from scripts import tpu_static

FILE = pathlib.Path(pallas_kernels.__file__).parent / "paged_attention" / "tpu" / "decode" / "tiles.json"
CASES = ("llama_8b_decode_c16", "qwen3_0.6b_decode_c16", "qwen3_30b_tp4_decode_c64")


def tune(case: Case, generation: str) -> dict[str, Any]:
    """{"tiles": the better ones, {} for none, "own", "cycles" by tiles, "memory_cycles"} of a case."""
    target = Target.named(f"tpu:{generation}")
    assert target.clock_hz is not None, generation
    config = tpu_attention.choose_config(case, target)
    assert isinstance(config, TpuConfig), "a case of heads"
    own = DecodeConfig.by_formula(config.shape, target)
    memory_cycles = Work.of(case).kv_bytes / target.bandwidth_bytes_per_s * target.clock_hz
    cycles: dict[str, int] = {}

    def cycles_of(decode: DecodeConfig) -> float:
        found = tpu_attention.measure_ours(case, generation, dataclasses.replace(config, decode=decode)).cycles
        cycles[tiles_text(decode.tiles)] = round(found)
        print(f"{generation} {case.name} {tiles_text(decode.tiles)}: {found:,.0f} cycles", flush=True)
        return max(found, memory_cycles)

    best = fastest(own, own.neighbours(config.shape), cycles_of)
    return {
        "tiles": {} if best is own else best.tiles,
        "own": own.tiles,
        "cycles": cycles,
        "memory_cycles": round(memory_cycles),
    }


def keep(path: pathlib.Path, generation: str, case: Case, found: dict[str, Any]) -> None:
    """Adds what was found of a case to {generation: {shape: ..}}."""
    known = json.loads(path.read_text()) if path.exists() else {}
    config = tpu_attention.choose_config(case, Target.named(f"tpu:{generation}"))
    assert isinstance(config, TpuConfig), "a case of heads"
    known.setdefault(generation, {})[config.shape.name] = found
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    decode = [case.name for case in REAL_CASES if case.decode_only and case.rope_dim is None]
    parser.add_argument("--case", action="append", choices=decode, help="may be repeated; default: three")
    parser.add_argument("--generation", action="append", choices=tpu_static.GENERATIONS, help="may be repeated")
    parser.add_argument("--json", type=pathlib.Path, default=FILE, metavar="FILE", help="default: beside the kernel")
    arguments = parser.parse_args()
    for generation in arguments.generation or ("v5e", "v6e", "v7x"):
        for case in (case for case in REAL_CASES if case.name in (arguments.case or CASES)):
            keep(arguments.json, generation, case, tune(case, generation))


if __name__ == "__main__":
    main()
