"""What counts come to: cycles by unit, the ceiling, and what is worse than before."""

import dataclasses
import pathlib

import pytest

from scripts import gpu_ceiling
from scripts.gpu_ceiling import Counted
from scripts.gpu_launches import MULTIPROCESSORS, Part, launches
from scripts.gpu_sass import read_kernels

# One consumer and one fetcher: a trip multiplies 64 lanes by 64 tokens and fetches 64 x 128 bytes by 128 threads.
_CODE = pathlib.Path(__file__).with_suffix(".sass").read_text()
_OWN = Counted(registers=168, spill_bytes=0, threads=256, blocks=1)
_TRIPS = 10  # of a multiprocessor
_PART = Part(
    name="decode",
    consumers=1,
    operations=_TRIPS * MULTIPROCESSORS * 2 * 64**3,
    fetched_bytes=_TRIPS * MULTIPROCESSORS * 64 * 128,
    hbm_bytes=1e6,
)


def _counted(**changes) -> Counted:
    (kernel,) = read_kernels(_CODE)
    return gpu_ceiling.count_part(_OWN, dataclasses.replace(_PART, **changes), kernel, has_roles=False)


def test_each_unit_has_the_cycles_of_all_trips():
    assert _counted().cycles == {
        "issue": _TRIPS * (3 + 3),  # both roles have a warp on each scheduler
        "warp": _TRIPS * 20,
        "wgmma": _TRIPS * 2 * 64**3 // 4096,
        "mufu": _TRIPS * 4 * 32 // 16,
        "shared": _TRIPS * ((64 + 64) * 64 * 2 + 64 * 128) // 128,
    }


def test_warps_of_several_blocks_share_the_trips_of_one():
    (kernel,) = read_kernels(_CODE)
    two = gpu_ceiling.count_part(dataclasses.replace(_OWN, blocks=2), _PART, kernel, has_roles=False)
    assert two.cycles["warp"] == _counted().cycles["warp"] / 2 and two.cycles["issue"] == _counted().cycles["issue"]


def test_the_ceiling_is_that_of_the_busiest_unit():
    few, many = _counted(hbm_bytes=1), _counted(hbm_bytes=1e9)
    assert few.bound("h200") == "shared" and few.ceiling("h200") == pytest.approx(_TRIPS * 192 / 1.98e9)
    assert many.bound("h200") == "hbm" and many.ceiling("h200") == pytest.approx(1e9 / 4.8e12, rel=0.01)
    assert many.ceiling("h100") == pytest.approx(1e9 / 3.35e12, rel=0.01)


def test_an_arm_of_one_consumer_counts_once_for_all_of_them():
    arm = "   -:-:-:Y:05   /*0074*/ @P4 BRA `(.L_skip)\n   -:-:-:Y:09   /*0078*/ LDS.128 R4, [R2]\n.L_skip:\n"
    (kernel,) = read_kernels(_CODE.replace("   -:-:-:Y:10 ", arm + "   -:-:-:Y:10 "))
    two = dataclasses.replace(_PART, consumers=2)
    without, with_ = (gpu_ceiling.count_part(_OWN, two, kernel, has_roles=has).cycles for has in (False, True))
    assert with_["issue"] - without["issue"] == _TRIPS // 2 and with_["shared"] - without["shared"] == _TRIPS // 2 * 16
    assert with_["wgmma"] == without["wgmma"]


def test_registers_threads_and_shared_memory_bound_the_blocks():
    assert gpu_ceiling.resident_blocks(168, 384, 1024) == 1
    assert gpu_ceiling.resident_blocks(47, 128, 0) == 10
    assert gpu_ceiling.resident_blocks(32, 128, 100 * 1024) == 2
    assert gpu_ceiling.resident_blocks(16, 256, 0) == 8


def test_what_is_more_than_two_percent_worse_is_named():
    one = _counted()
    kept = {"decode": dataclasses.asdict(one)}
    assert gpu_ceiling.worse(kept, {"decode": one}) == []
    slower = dataclasses.replace(one, cycles=one.cycles | {"issue": one.cycles["issue"] * 2}, spill_bytes=8)
    assert gpu_ceiling.worse(kept, {"decode": slower}) == ["decode: spill_bytes 0 -> 8", "decode: issue 60 -> 120"]
    faster = dataclasses.replace(one, cycles=one.cycles | {"issue": 1})
    assert gpu_ceiling.worse(kept, {"decode": faster}) == []
    assert gpu_ceiling.worse({}, {"decode": one}) == ["decode: nothing is kept"]


def test_a_tool_that_lacks_says_what_to_install():
    with pytest.raises(FileNotFoundError, match=r"pip install -c constraints\.txt nvidia-cuda-nvdisasmm"):
        gpu_ceiling.tool("nvdisasmm")


def test_lanes_are_filled_up_to_the_rows_of_a_product():
    full = _counted().cycles["wgmma"]
    assert _counted(lanes=64).cycles["wgmma"] == full
    assert _counted(lanes=4).cycles["wgmma"] == full * 16 and _counted(lanes=80).cycles["wgmma"] == full * 128 // 80


def test_where_tokens_are_the_rows_lanes_are_filled_up_to_columns():
    (kernel,) = read_kernels(_CODE.replace("64x64x64", "64x16x64"))
    ten, sixteen = (
        gpu_ceiling.count_part(_OWN, dataclasses.replace(_PART, lanes=lanes), kernel, has_roles=False).cycles["wgmma"]
        for lanes in (10, 16)
    )
    assert sixteen == _counted().cycles["wgmma"] and ten == sixteen * 16 // 10


def test_decoding_multiplies_each_token_by_a_head_s_queries_and_reads_it_once():
    decode = next(launch for launch in launches() if launch.name == "llama_8b_decode_4k").parts[0]
    assert decode.operations == 2 * 64 * 4096 * 32 * (128 + 128) and decode.lanes == 4
    assert decode.fetched_bytes == decode.hbm_bytes == 64 * 4096 * 8 * (128 + 128) * 2


@pytest.mark.parametrize(
    ("name", "codes_fetched", "tokens_fetched", "places"),
    [("int4_16", 1, 112, 16), ("int4_512", 4, 56, 512), ("of_experts_mxfp4_64", 1, 6, 128 * 8)],
)
def test_a_product_s_tiles_fetch_codes_and_tokens_which_memory_gives_once(name, codes_fetched, tokens_fetched, places):
    """112 and 6 tiles of 128 outputs, 56 of 256; 128 experts have 4 of a tile's 8 tokens each."""
    part = next(launch for launch in launches() if launch.name == f"product_{name}").parts[0]
    experts, outputs, inputs = (128, 768, 2048) if "experts" in name else (1, 14336, 4096)
    codes, tokens = experts * outputs * inputs // 2, places // (2 if "experts" in name else 1)
    scales = codes // 16 if "mxfp4" in name else codes // 64 * 2
    assert part.operations == 2 * places * outputs * inputs and part.lanes is None
    assert part.fetched_bytes == codes_fetched * codes + tokens_fetched * places * inputs * 2
    assert part.hbm_bytes == codes + scales + tokens * (inputs * 2 + outputs * (4 if experts > 1 else 2))


def test_every_launch_is_kept_and_no_ceiling_is_above_what_was_measured():
    kept = gpu_ceiling.kept()
    assert kept["launches"].keys() == {launch.name for launch in launches()}
    for launch in (launch for launch in launches() if launch.measured_us is not None):
        kernels = [Counted.of(one) for one in kept["launches"][launch.name].values()]
        assert 0 < sum(one.ceiling("h200") for one in kernels) * 1e6 <= launch.measured_us, launch.name
