"""Instructions, loops and trips, on the machine code of a kernel of thirty instructions."""

import pathlib

import pytest

from scripts.gpu_sass import Kernel, read_kernels

# Two roles: one fetches, four instructions a trip and a spin at a barrier that may not be ready; the other multiplies,
# with a spin and an arm that some of its warps skip. Control codes are waits:read:write:yield:stall.
_CODE = pathlib.Path(__file__).with_suffix(".sass").read_text()


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    (found,) = read_kernels(_CODE)
    return found


def test_an_instruction_has_its_guard_its_stall_and_whether_it_waits(kernel):
    branch, exit_ = kernel.code[4], kernel.code[8]
    assert (branch.guard, branch.opcode, branch.target, branch.stall, branch.waits) == (
        "@!P1",
        "BRA",
        ".L_spin",
        5,
        True,
    )
    assert branch.goes_on and not exit_.goes_on
    assert kernel.code[6].guard == "@UP1" and not kernel.code[6].waits


def test_control_codes_are_also_read_from_encodings():
    (found,) = read_kernels(
        ".text.k:\n"
        "        /*0000*/              @P0 LDS.64 R2, [R1] ;       /* 0x00000a00ff017b82 */\n"
        "                                                          /* 0x002e240000000800 */\n"
    )
    (one,) = found.code
    assert (one.guard, one.operands, one.stall, one.waits, one.shared_bytes) == ("@P0", "R2, [R1]", 2, True, 256)


def test_each_role_s_loop_is_found_and_the_spin_is_neither(kernel):
    (compute,), (fetch,) = kernel.innermost(multiplies=True), kernel.innermost(multiplies=False)
    assert [kernel.code[i].name for i in fetch.path] == ["SYNCS", "BRA", "SYNCS", "UTMALDG", "BRA"]
    assert kernel.code[compute.path[0]].is_group_product and len(kernel.loops) == 3


def test_a_trip_goes_the_way_that_stalls_least_and_arms_are_kept_apart(kernel):
    (loop,) = kernel.innermost(multiplies=True)
    trip, arms = kernel.count(loop.path), kernel.count(loop.arms)
    assert (trip.instructions, trip.stalls) == (7, 2 + 2 + 8 + 5 + 1 + 1 + 6)
    assert (arms.instructions, arms.stalls, arms.shared_bytes) == (2, 8, 32 * 16 + 32 * 2)


def test_products_and_what_they_read_of_shared_memory_are_counted(kernel):
    (loop,) = kernel.innermost(multiplies=True)
    trip = kernel.count(loop.path)
    assert trip.group_operations == 2 * 64 * (64 + 128) * 16 and trip.operations == 0
    assert trip.group_shared_bytes == (64 + 64) * 16 * 2 + 128 * 16 * 2  # the second has its left factor in registers
    assert (trip.mufu, trip.waits, trip.barriers, trip.has_bytes) == (1, 2, 1, False)


def test_bytes_that_a_barrier_is_told_to_expect_are_read_where_they_are_constant(kernel):
    (loop,) = kernel.innermost(multiplies=False)
    trip = kernel.count(loop.path)
    assert (trip.announced, trip.transfers) == (0x40, 1)
    (unknown,) = read_kernels(_CODE.replace("MOV R7, 0x40", "LDC R7, c[0x0][0x210]"))
    (loop,) = unknown.innermost(multiplies=False)
    assert unknown.count(loop.path).announced == 0


def test_the_way_round_a_loop_is_the_one_that_fetches(kernel):
    """An elected warp's arm is the trip, though jumping over it would stall less."""
    elected = _CODE.replace("@UP1 UTMALDG", "UTMALDG").replace(
        "   -:2:-:Y:03        /*0060*/", "   -:-:-:Y:05  /*0058*/ @P3 BRA `(.L_over)\n   -:2:-:Y:03        /*0060*/"
    )
    (found,) = read_kernels(elected.replace("   -:-:-:Y:05        /*0070*/", ".L_over:\n   -:-:-:Y:05        /*0070*/"))
    (loop,) = found.innermost(multiplies=False)
    assert found.count(loop.path).transfers == 1


@pytest.mark.parametrize(
    ("opcode", "operations", "shared"),
    [
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", 2 * 64 * 128 * 32, (64 + 128) * 32),
        ("HGMMA.64x64x8.F32.TF32 R24, gdesc[UR8], R24", 2 * 64 * 64 * 8, (64 + 64) * 8 * 4),
        ("HMMA.16816.F32.BF16 R4, R8, R2, R4", 2 * 16 * 8 * 16, 0),
        ("STSM.16.MT88.4 [R2], R4", 0, 512),
        ("LDGSTS.E.BYPASS.128 [R2], desc[UR4][R6.64]", 0, 512),
        ("FFMA R2, R3, R4, R5", 0, 0),
    ],
)
def test_each_kind_of_instruction_has_its_operations_and_bytes(opcode, operations, shared):
    (found,) = read_kernels(f".text.k:\n   -:-:-:Y:01        /*0000*/     {opcode}\n")
    assert (found.code[0].operations, found.code[0].shared_bytes) == (operations, shared)
