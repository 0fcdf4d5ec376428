"""Targets by name and by device, and the block size that follows."""

from __future__ import annotations

import types

import jax
import pytest

from pallas_kernels.target import Target


def test_a_named_target_and_a_live_device_of_its_kind_are_the_same() -> None:
    assert Target.of_device(jax.devices("cpu")[0]) == Target.named("cpu")
    kinds = {"TPU v5 lite": "tpu:v5e", "TPU v5": "tpu:v5p", "TPU v6 lite": "tpu:v6e", "NVIDIA H200": "gpu:h200"}
    for kind, name in kinds.items():
        device = types.SimpleNamespace(platform=name[:3], device_kind=kind)
        assert Target.of_device(device) == Target.named(name)


def test_an_unknown_target_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"target is 'tpu:v1'; known targets are .*'tpu:v6e'"):
        Target.named("tpu:v1")
    with pytest.raises(ValueError, match="device is a 'NVIDIA T4'"):
        Target.of_device(types.SimpleNamespace(platform="gpu", device_kind="NVIDIA T4"))


@pytest.mark.parametrize(
    ("target", "bytes_per_token", "tokens"),
    [("cpu", 8, 16), ("tpu:v6e", 4096, 16), ("tpu:v6e", 2048, 16), ("gpu:h200", 512, 64), ("tpu:v5e", 8, 128)],
)
def test_a_block_holds_32_kb_between_16_and_128_tokens(target: str, bytes_per_token: int, tokens: int) -> None:
    assert Target.named(target).block_size(bytes_per_token) == tokens
