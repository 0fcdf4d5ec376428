"""Padding: the share of an engine's token slots that hold no token, counted by its own scheduler without a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ferrum_jax.core.plan import StepPlan
from ferrum_jax.core.scheduler.request_log import LoggedRequest, Segment
from ferrum_jax.planning.offline.replay import replay
from ferrum_jax.runtime.buckets import Ladder
from ferrum_jax.runtime.layout import Layout


def expected_padding(requests: Sequence[LoggedRequest], layout: Layout) -> float:
    """The share of all token slots that is padding when an engine of this layout runs the requests; 0 to 1."""
    sizes = dataclasses.replace(
        layout.sizes(layout.settled.config), max_cached_prompts=0, max_snapshots=None, num_host_blocks=0
    )
    plans: list[StepPlan] = []
    replay([Segment(sizes=sizes, requests=list(requests))], layout.ledger.num_blocks, on_plan=plans.append)
    return padding_of(plans, layout.ladder)


def padding_of(plans: Sequence[StepPlan], ladder: Ladder) -> float:
    """The share of the steps' token slots, on all shards, that holds no token; 0 to 1."""
    slots = sum(len(plan.shards) * ladder.bucket_of(plan).num_tokens for plan in plans)
    real = sum(plan.num_tokens for plan in plans)
    return 1 - real / slots if slots else 0.0
