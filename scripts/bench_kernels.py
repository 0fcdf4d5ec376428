"""Times attention on this machine's device: one JSON line for each case and implementation.

    scripts/gpu/kernels                                 on a GPU, where nothing need be installed
    scripts/gpu/kernels llama_8b_decode_64x4k_c16
    python -m scripts.bench_kernels                     "xla" on a CPU in sizes of tests: shows that the harness works

What runs beside what is in `kernel_rivals`. A result is compared with that of "xla" before it is timed. Bytes are those
of K and V that queries see, once; they are set against a copy on the device that is timed in the same run, operations
against the data sheet. More than the data sheet allows is an error. Blocks lie in random order.
"""

import argparse
import dataclasses
import json
import time

_NO_CACHE_BYTES = 2**28  # from here on a cache of 50 MB changes little
_TOLERANCE = 2e-2
OURS = ("xla", "mosaic_gpu")  # what others cannot do here is their line; what these cannot is an error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="run none")
    parser.add_argument("cases", nargs="*", help="names; all of the platform's by default")
    arguments = parser.parse_args()
    if not arguments.dry_run:
        import jax

        run(arguments.cases, on_gpu=jax.default_backend() == "gpu")


def run(names: list[str], *, on_gpu: bool) -> None:
    """Prints the lines. Raises SystemExit for an unknown case, ValueError for what no device can do."""
    import jax
    import numpy as np

    from ferrum_jax.cli.device_check.rates import make_copy
    from ferrum_jax.cli.device_check.timing import measure
    from pallas_kernels.paged_attention.cases import Work
    from pallas_kernels.target import Target
    from scripts import kernel_rivals as rivals
    from scripts.git_state import git_state

    cases = rivals.GPU_CASES if on_gpu else rivals.CPU_CASES
    unknown = set(names) - {case.name for case in cases}
    if unknown:
        raise SystemExit(f"no case is called {sorted(unknown)}; there are {[case.name for case in cases]}")
    device = jax.devices()[0]
    target = Target.of_device(device)
    copy, there = make_copy(num_bytes := 2**32 if on_gpu else 2**24)
    copied = 2 * num_bytes / measure(lambda: copy(there)).median_s
    about = {"device": device.device_kind, "jax": jax.__version__, **git_state()}
    print(json.dumps({**about, "copy_gb_per_s": round(copied / 1e9, 1)}), flush=True)
    for case in cases:
        if names and case.name not in names:
            continue
        expected, work = None, Work.of(case, "mosaic_gpu")
        for name, prepare, reason in rivals.implementations(case, target):
            line = {"case": case.name, "implementation": name, **about}
            if prepare is None:
                print(json.dumps({**line, "left_out": reason}), flush=True)
                continue
            try:
                attend, began_s = prepare(), time.perf_counter()
                result = np.asarray(attend()).astype(np.float32)
                first_s, timing = time.perf_counter() - began_s, measure(attend)
            except Exception as error:
                if name in OURS:
                    raise
                print(json.dumps({**line, "failed": repr(error)[:500]}), flush=True)
                continue
            real = result[: sum(count for _, count in case.rows)]
            expected = real if expected is None else expected
            np.testing.assert_allclose(real, expected, rtol=_TOLERANCE, atol=_TOLERANCE, err_msg=f"{case.name} {name}")
            bandwidth, rate = work.kv_bytes / timing.median_s, work.flops / timing.median_s
            is_too_fast = work.kv_bytes > _NO_CACHE_BYTES and bandwidth > target.bandwidth_bytes_per_s
            if is_too_fast or rate > target.flops_per_s:
                raise ValueError(f"{case.name} {name}: {bandwidth:.3g} bytes/s and {rate:.3g} operations/s cannot be")
            line |= {"compile_and_first_s": first_s, **dataclasses.asdict(timing)}
            line |= {"bytes": work.kv_bytes, "flops": work.flops, "of_copy": round(bandwidth / copied, 3)}
            print(json.dumps({**line, "tflops": round(rate / 1e12, 2)}), flush=True)


if __name__ == "__main__":
    main()
