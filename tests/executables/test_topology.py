"""Devices by name: slices of the cloud, shapes, and what is said of names that are none."""

import pytest

from ferrum_jax.cli.compile import without_device
from ferrum_jax.runtime.compile.topology import slice_of, target_devices, with_platform
from tests.forked import call
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

SLICES = ROWS["slices"]


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_has_the_shape_that_the_cloud_gives_it(name):
    topology, host = slice_of(name)
    assert topology == SLICES[name][0]
    assert (host == (2, 4, 1)) == name.endswith("e-8")  # one host of eight chips


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *ROWS["the platform may be left out of a shape or a gpu"],
        *((name, name) for name in ("tpu:v6e:2x2", "gpu:h100:2", "v6e-8", "v6e", "cpu", "x9:2x2")),
    ],
)
def test_the_platform_may_be_left_out_of_a_shape_or_a_gpu(name, whole):
    assert with_platform(name) == whole


@pytest.mark.parametrize(("name", "says"), ROWS["a name that is none is refused with those that there are"])
def test_a_name_that_is_none_is_refused_with_those_that_there_are(name, says):
    with pytest.raises(ValueError, match=says):
        target_devices(name)


@pytest.mark.aot
def test_the_compiler_knows_every_slice_and_one_chip():
    names = [*SLICES, "v6e:8x8", "tpu:v6e:1x1", "tpu:v5e:1x1", "tpu:v6e:2x4"]
    found = dict(zip(names, call(counted, names), strict=True))
    assert {name: count for name, (count, _) in found.items() if name in SLICES} == {n: s[1] for n, s in SLICES.items()}
    assert found["v6e-8"] == [8, 1] and found["tpu:v6e:2x4"] == [8, 2] and found["v6e-16"][1] == 4
    assert found["v6e:8x8"] == [64, 16]
    assert found["tpu:v6e:1x1"] == found["tpu:v5e:1x1"] == [1, 1]


def counted(names):
    """Devices of each name, and hosts."""
    without_device("tpu")
    return [[len(devices), len({d.process_index for d in devices})] for devices in map(target_devices, names)]
