"""The dashboard in docs/ asks for metrics that a server has, by labels that they have."""

from __future__ import annotations

import json
import re

from prometheus_client.parser import text_string_to_metric_families

from ferrum_jax.serve.http.server_metrics import ServerMetrics
from tests.support import ROOT

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
