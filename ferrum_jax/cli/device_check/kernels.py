"""The check of one op, in a child process of its own: every case on this device, right or wrong, and how fast."""

import dataclasses
import time
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from ferrum_jax.cli.device_check.estimates import NO_CACHE_BYTES
from ferrum_jax.cli.device_check.op_problems import problems
from ferrum_jax.cli.device_check.problem import Problem
from ferrum_jax.cli.device_check.rates import target_of
from ferrum_jax.cli.device_check.timing import measure
from ferrum_jax.engine.startup.accelerators import explain
from ferrum_jax.engine.startup.faults import open_devices, spoilt
from ferrum_jax.io.child import Send, first_line
from pallas_kernels.tolerance import difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOrder:
    """op: of OPS. budget_s: cases that are not begun by then are left out. rates: what this device reached, by name.

    done: cases that an earlier child has begun. fault: of startup/faults.py, in every kernel but "xla", for tests.
    """

    op: str
    full: bool
    budget_s: float
    rates: Mapping[str, float]
    done: tuple[str, ...] = ()
    fault: str | None = None


def check_op(order: KernelOrder, send: Send) -> None:
    """Sends for each case and implementation first {"begins": ..}, so that one that never ends is known by name, and
    then its line: the fields of `_line`."""
    device = open_devices(order.fault)[0]
    target = target_of(device)
    until = time.monotonic() + order.budget_s
    for problem in problems(order.op, target, device.platform, full=order.full):
        if problem.name in order.done:
            continue
        if time.monotonic() > until:
            send({"left_out": problem.name, "op": order.op, "dtype": problem.dtype, "shape": problem.shape})
            continue
        expected: np.ndarray | None = None
        by_xla: tuple[np.ndarray, float | None] | None = None
        for implementation in problem.implementations:
            line = {"op": order.op, "case": problem.name, "implementation": implementation, "dtype": problem.dtype}
            line |= {"shape": problem.shape, "device_kind": device.device_kind}
            send({"begins": line})
            try:
                if expected is None:
                    expected = problem.oracle()
                found = _run(problem, implementation, order, device.platform, expected, by_xla)
            except Exception as error:  # of a compiler or a runtime: the next case may do
                said = explain(f"{type(error).__name__}: {first_line(str(error))}")
                send(line | {"problem": said, "words": traceback.format_exc()})
                continue
            result, numbers = found
            if implementation == "xla":
                by_xla = result, numbers["median_s"]
            send(line | numbers)


def _run(
    problem: Problem,
    implementation: str,
    order: KernelOrder,
    platform: str,
    expected: np.ndarray,
    by_xla: tuple[np.ndarray, float | None] | None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """The result of real tokens, and the numbers of its line."""
    call = problem.begin(implementation)
    is_kernel = implementation != "xla"
    started = time.perf_counter()
    result = problem.real(spoilt(order.fault if is_kernel else None, call)(), implementation)
    first_s = time.perf_counter() - started
    judged = difference(problem.take(result), expected, problem.tolerance, problem.axes)
    other = None if by_xla is None else difference(result, by_xla[0], problem.tolerance, problem.axes)
    wrong = judged.problem or (other and other.problem and f"beside 'xla' {other.problem}")
    numbers: dict[str, Any] = {
        "error": judged.error,
        "error_to_xla": None if other is None else other.error,
        "tolerance": problem.tolerance["rtol"],
        "is_interpreted": is_kernel and platform == "cpu",
        "compile_s": first_s,
        "median_s": None,
        "p90_s": None,
        "speed": None,
        "problem": wrong,
    }
    if wrong is None and not numbers["is_interpreted"]:
        timing = measure(call)
        numbers |= {"median_s": timing.median_s, "p90_s": timing.p90_s}
        if by_xla is not None and by_xla[1] is not None:
            numbers["speed"] = by_xla[1] / timing.median_s
        numbers |= _shares(problem, timing.median_s, order.rates)
    return result, numbers


def _shares(problem: Problem, seconds: float, rates: Mapping[str, float]) -> dict[str, Any]:
    """Shares of what the device reached; more than its data sheet allows is a problem."""
    if problem.num_bytes is None or problem.flops is None:
        return {}
    per_s, flops_per_s = problem.num_bytes / seconds, problem.flops / seconds
    found: dict[str, Any] = {"num_bytes": problem.num_bytes, "flops": problem.flops}
    if "copy" in rates:
        found["of_copy"] = per_s / rates["copy"]
    if "matmul in bfloat16" in rates:
        found["of_matmul"] = flops_per_s / rates["matmul in bfloat16"]
    limits = (
        ("memory", per_s, rates.get("sheet of copy"), problem.num_bytes >= NO_CACHE_BYTES),
        ("matmul", flops_per_s, rates.get("sheet of matmul in bfloat16"), True),
    )
    for what, rate, sheet, counts in limits:
        if sheet is not None and counts and rate > sheet:
            found["problem"] = f"{rate / sheet:.0%} of the data sheet's {what} rate cannot be: the time is wrong"
    return found
