"""What a server tells of its engine's drafts, under vLLM's names; an engine that counts none has none of them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ferrum_jax.metrics import MEDIA, SpeculationCounts
from ferrum_jax.serve.http.server_metrics import ServerMetrics


def all_told(stats: dict) -> list[Sample]:
    metrics = ServerMetrics("small")
    metrics.stats = stats
    families = text_string_to_metric_families(metrics.text(0, 0).decode())
    return [sample for family in families for sample in family.samples]


def told(stats: dict) -> dict[tuple[str, str | None], float]:
    """The value of each metric about drafts, by its name and position."""
    found = [sample for sample in all_told(stats) if "spec_decode" in sample.name]
    assert all(sample.labels["model_name"] == "small" for sample in found)
    return {(sample.name, sample.labels.get("position")): sample.value for sample in found}


def test_drafts_are_counted_under_vllms_names():
    counts = SpeculationCounts()
    counts.count(3, 2)
    counts.count(2, 1)
    assert told(counts.snapshot()) == {
        ("vllm:spec_decode_num_drafts_total", None): 2,
        ("vllm:spec_decode_num_draft_tokens_total", None): 5,
        ("vllm:spec_decode_num_accepted_tokens_total", None): 3,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 2,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 1,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
    }


def test_an_engine_that_counts_no_drafts_has_no_metrics_of_them():
    assert told({"live": 3}) == {}
    assert set(told(SpeculationCounts().snapshot()).values()) == {0}


def test_what_was_seen_and_heard_is_counted_by_its_kind():
    counts = {name: number + 0.5 for number, name in enumerate(MEDIA)}
    found = {sample.name: sample.value for sample in all_told(counts)}
    assert {name: found[f"ferrum:{name}_total"] for name in MEDIA} == counts
