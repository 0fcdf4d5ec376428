"""Whole decode steps by estimate: from two depths to all layers, their bound, and what is kept of them."""

import dataclasses

import pytest

from ferrum_jax.models.families.registry import spec_of
from pallas_kernels.target import Target
from scripts.made_tables import steps_table
from scripts.step_estimates import Estimate, Walked, estimate, worse
from scripts.step_ops import Line
from scripts.tpu_steps import STEPS, shortened

V6E, STEP = Target.named("tpu:v6e"), STEPS[0]


def walked(unknown: float = 0.0, **lines: tuple[float, float, float]) -> Walked:
    made = {name: Line(count=n, seconds=seconds, bound=bound) for name, (n, seconds, bound) in lines.items()}
    return Walked(lines=made, hbm_bytes=1e9, flops=1e9, unknown=unknown)


def test_each_layer_that_a_model_has_more_takes_what_the_deeper_program_has_more():
    two, three = walked(dot=(4, 4e-3, 3e-3), head=(1, 1e-3, 1e-3)), walked(dot=(6, 6e-3, 4e-3), head=(1, 1e-3, 1e-3))
    whole = two.plus(three.plus(two, -1), 30)
    assert whole.lines["dot"] == Line(count=64, seconds=pytest.approx(64e-3), bound=pytest.approx(33e-3))
    assert whole.lines["head"].seconds == pytest.approx(1e-3) and whole.hbm_bytes == 1e9
    assert whole.seconds == pytest.approx(65e-3)


def test_an_estimate_names_what_loses_most_and_the_bound_of_needed_bytes():
    lines = {"dot": (64, 16e-3, 16e-3), "copy": (32, 3e-3, 0.0), "sort": (1, 1e-3, 0.5e-3), "add": (9, 1e-5, 0.0)}
    one = estimate(STEP, walked(**lines), V6E, needed_bytes=int(16.4e9))
    assert (one.step_us, one.bound_us, one.tokens_per_s) == (20_010, 10_000, round(64 / 20.01e-3))
    assert one.largest == {"copy": (3000, 0.0), "sort": (1000, 0.5), "add": (10, 0.0)}


def test_a_step_that_takes_longer_than_what_is_kept_is_worse():
    one = Estimate(step_us=1000, bound_us=900, hbm_mb=1, tokens_per_s=1, unknown=0, largest={})
    kept = {"a": {"step": dataclasses.asdict(one)}}
    assert worse(kept, {"a": dataclasses.replace(one, step_us=1020)}) == []
    assert worse(kept, {"a": dataclasses.replace(one, step_us=1030)}) == ["a: step_us 1000 -> 1030"]
    assert worse(kept, {"b": one}) == ["b: nothing is kept"]


def test_both_depths_of_a_step_have_every_kind_of_its_layers():
    for step in STEPS:
        spec = spec_of(step.config)
        for layers in step.layers:
            short = shortened(spec, layers)
            assert short.num_hidden_layers == layers < spec.num_hidden_layers
            assert (short.experts is None) == (spec.experts is None), step.name
        more = set(shortened(spec, step.layers[1]).moe_layers) - set(shortened(spec, step.layers[0]).moe_layers)
        assert len(more) == (0 if spec.experts is None else step.layers[1] - step.layers[0]), "what is more has experts"


def test_the_table_has_a_row_for_each_step_that_is_kept():
    head, *rows = steps_table()
    assert len(rows) == len(STEPS) and all(len(row) == len(head) for row in rows)
