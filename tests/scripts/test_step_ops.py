"""What the operations of a compiled step take by estimates, of programs that are written by hand."""

import pytest

from pallas_kernels.target import Target
from scripts.step_ops import Walk, Work, label_of, parse

V6E = Target.named("tpu:v6e")  # 1.75 GHz, 1,640 GB/s, four links of 100 GB/s
_GATHERED = "bf16[64,4096]{1,0:T(8,128)(2,1)S(1)}"


def program(*lines: str, before: str = "") -> str:
    return "\n".join(["HloModule jit_step", "", before, "ENTRY %main (p: f32[]) -> f32[] {", *lines, "}", ""])


def walked(hlo: str, **fields) -> Walk:
    def kernel(*_) -> Work:
        return Work(cycles=175_000, hbm_bytes=16.4e6, flops=0)

    return Walk(target=V6E, kernel=kernel, **fields).through(hlo)


def line(name: str, shape: str, call: str, cycles: int | None = None) -> str:
    config = "" if cycles is None else f', backend_config={{"estimated_cycles":"{cycles}"}}'
    return f'  %{name} = {shape} {call}, metadata={{op_name="jit(step)/x"}}{config}'


WEIGHT = line("w", "bf16[4096,2048]{1,0}", "parameter(0)")


def test_an_operation_takes_the_longest_of_its_estimate_and_its_bytes():
    read = walked(program(WEIGHT, line("a", "bf16[8,8]{1,0}", "copy(%w)", 1)))
    assert read.seconds == pytest.approx(2 * 4096 * 2048 / 1640e9, rel=1e-3)
    slow = walked(program(WEIGHT, line("a", "bf16[8,8]{1,0}", "copy(%w)", 1_750_000)))
    (found,) = slow.lines.values()
    assert slow.seconds == pytest.approx(1e-3) and found.lost == pytest.approx(1e-3 - read.seconds, rel=1e-3)


def test_what_lies_in_vector_memory_crosses_no_hbm():
    hlo = program(line("w", "bf16[4096,2048]{1,0:T(8,128)S(1)}", "parameter(0)"), line("a", _GATHERED, "copy(%w)", 175))
    assert walked(hlo).hbm_bytes == 0 and walked(hlo).seconds == pytest.approx(1e-7)


def test_a_fusion_that_takes_a_window_of_an_operand_reads_no_more():
    body = "\n".join(
        [
            "%fused (q: bf16[32,768,2048], i: s32[]) -> bf16[1,768,2048] {",
            "  %q = bf16[32,768,2048]{2,1,0} parameter(0)",
            "  %i = s32[] parameter(1)",
            "  ROOT %d = bf16[1,768,2048]{2,1,0:S(1)} dynamic-slice(%q, %i), dynamic_slice_sizes={1,768,2048}",
            "}",
            "",
        ]
    )
    stack, at = line("s", "bf16[32,768,2048]{2,1,0}", "parameter(0)"), line("n", "s32[]{:S(6)}", "parameter(1)")
    fusion = line("f", "bf16[1,768,2048]{2,1,0:S(1)}", "fusion(%s, %n), kind=kLoop, calls=%fused", 1)
    assert walked(program(stack, at, fusion, before=body)).hbm_bytes == 2 * 768 * 2048


def test_a_transfer_runs_beside_what_leaves_hbm_idle_and_is_awaited_at_its_end():
    start = line("c", "(bf16[4096,2048]{1,0:S(1)}, bf16[4096,2048]{1,0}, u32[]{:S(2)})", "copy-start(%w)")
    done = line("d", "bf16[4096,2048]{1,0:S(1)}", "copy-done(%c)")
    beside = line("a", _GATHERED, "copy(%v)", 1_750)  # a microsecond of the ten that the transfer needs
    found = walked(program(WEIGHT, line("v", _GATHERED, "parameter(1)"), start, beside, done))
    needed = 2 * 4096 * 2048 / 1640e9
    assert found.lines["wait for a transfer"].seconds == pytest.approx(needed - 1e-6, rel=1e-3)
    assert found.lines["copy x bf16[64,4096]"].lost == pytest.approx(0, abs=1e-12), "the transfer has HBM meanwhile"


def test_an_all_reduce_sends_its_bytes_twice_but_for_its_own_part_along_one_link():
    given, call = line("v", _GATHERED, "parameter(0)"), "all-reduce(%v), replica_groups={{0,1,2,3}}"
    assert walked(program(given, line("r", _GATHERED, call))).seconds == pytest.approx(
        2 * 3 / 4 * 2 * 64 * 4096 / 100e9
    )
    coloured = call + ', backend_config={"debug":"StrategyRing{colors:2 phases:1}"}'
    assert walked(program(given, line("r", _GATHERED, coloured))).seconds == pytest.approx(
        3 / 4 * 2 * 64 * 4096 / 100e9
    )


def test_a_conditional_takes_its_quickest_branch_and_a_loop_all_its_turns():
    def branch(name: str, cycles: int) -> str:
        return "\n".join([f"%{name} (t: s32[]) -> s32[] {{", line("x", "s32[]{:S(6)}", "copy(%t)", cycles), "}", ""])

    ends = "%end (t: s32[]) -> pred[] {\n  %three = s32[] constant(3)\n}\n"
    before = "\n".join([branch("slow", 17_500), branch("fast", 1_750), ends])
    chosen = line("c", "s32[]", "conditional(%p, %a, %b), branch_computations={%slow, %fast}")
    looped = line("l", "s32[]", "while(%a), condition=%end, body=%fast")
    assert walked(program(chosen, before=before)).seconds == pytest.approx(1e-6)
    assert walked(program(looped, before=before)).seconds == pytest.approx(3e-6)
    of_data = before.replace("constant(3)", "parameter(0)")
    assert walked(program(looped, before=of_data), turns=32).seconds == pytest.approx(32e-6)


def test_products_are_bound_by_the_matrix_unit_where_their_operands_are_near():
    near = [
        line(name, f"bf16[{n},4096]{{1,0:S(1)}}", f"parameter({i})")
        for i, (name, n) in enumerate([("x", 64), ("w", 512)])
    ]
    product = line("y", "f32[64,512]{1,0:S(1)}", "convolution(%x, %w), dim_labels=bf_oi->bf", 1_750)
    found = walked(program(*near, product))
    assert found.flops == 2 * 64 * 512 * 4096
    assert next(iter(found.lines.values())).bound == pytest.approx(found.flops / 918e12)


def test_a_kernel_has_the_work_that_it_is_given_and_its_own_name():
    call = parse(line("paged.7", _GATHERED, 'custom-call(%q), custom_call_target="tpu_custom_call"'))
    assert label_of(call) == "paged bf16[64,4096]"
    found = walked(program(line("paged.7", _GATHERED, 'custom-call(%q), custom_call_target="tpu_custom_call"')))
    assert found.seconds == pytest.approx(1e-4) and found.lines["paged bf16[64,4096]"].bound == pytest.approx(1e-5)


def test_what_nobody_estimates_is_counted():
    sorted_rows = line("s", "s32[2048]{0:S(1)}", "sort(%v), dimensions={0}")
    assert walked(program(line("v", "s32[2048]{0:S(1)}", "parameter(0)"), sorted_rows)).unknown == 1
