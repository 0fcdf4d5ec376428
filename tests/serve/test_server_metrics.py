"""What a server tells of its engine's drafts, under vLLM's names; an engine that counts none has none of them.

The dashboard in docs/ asks for metrics that a server has, by labels that they have.
"""

import json
import re

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ferrum_jax.core.metrics import MEDIA, SpeculationCounts
from ferrum_jax.serve.http.server_metrics import ServerMetrics
from tests.support import ROOT


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


DASHBOARD = json.loads((ROOT / "docs/reference/grafana_dashboard.json").read_text())


def samples() -> dict[str, set[str]]:
    """The labels of each metric that a server which has answered something tells."""
    metrics = ServerMetrics("demo")
    metrics.ended("stop")
    metrics.answered("/v1/completions", 200)
    families = text_string_to_metric_families(metrics.text(0, 0).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_expression_of_the_dashboard_asks_for_metrics_and_labels_that_exist():
    known = samples()
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        asked = re.findall(r"((?:vllm|ferrum):\w+)\{(\w+)", expression)
        assert asked, expression
        for name, label in asked:
            assert label in known[name], (name, label)
        groups = {label for labels in re.findall(r"by \(([\w, ]+)\)", expression) for label in labels.split(", ")}
        assert groups <= set.intersection(*(known[name] for name, _ in asked)), expression


def test_the_dashboards_panels_have_places_and_numbers_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "${source}" for panel in panels)
