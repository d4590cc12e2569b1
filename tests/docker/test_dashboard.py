"""The dashboard asks for metrics and labels that exist, and shows all of them; no engine is needed to see that."""

from __future__ import annotations

import json
import re
from pathlib import Path

from exactly_once.metrics.table import METRICS
from tests.support.docker import FOLDER
from tests.support.findings import nothing

DASHBOARD = FOLDER / "observability" / "dashboards" / "exactly-once.json"
SERIES = {name for m in METRICS for name in ([f"{m.name}_bucket"] if m.kind == "histogram" else [m.name])}
LABELS = {label for metric in METRICS for label in metric.labels} | {"le"}


def queries() -> list[str]:
    """Every expression of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return expressions + [variable["query"] for variable in dashboard["templating"]["list"]]


def test_dashboard_shows_every_metric_and_no_other() -> None:
    assert {name for query in queries() for name in re.findall(r"exactly_once_\w+", query)} == SERIES


def test_dashboard_groups_by_labels_that_exist() -> None:
    grouped = [names.split(", ") for query in queries() for names in re.findall(r"(?:by|on) \(([^)]*)\)", query)]
    assert grouped
    assert {name for names in grouped for name in names} <= LABELS


def test_counters_are_shown_as_rates() -> None:
    """The bare value of a counter says how long a process lives."""
    bare = r"(?<!rate\()(?<!increase\()(?<!label_values\()\bexactly_once_\w+_(?:total|bucket)"
    nothing((query for query in queries() if re.search(bare, query)), "no rate")


def test_provisioning_and_compose_file_agree() -> None:
    source = re.search(r"uid: (\S+)", (FOLDER / "observability" / "grafana.yml").read_text())
    assert source is not None
    assert set(re.findall(r'"uid": "(exactly-once-\w+)"', DASHBOARD.read_text())) == {source[1]}
    place = re.search(r"path: (\S+)", (FOLDER / "observability" / "grafana-dashboards.yml").read_text())
    assert place is not None
    compose = (FOLDER / "compose.yaml").read_text()
    assert f"./{DASHBOARD.parent.relative_to(FOLDER)}:{place[1]}:ro" in compose
    mounted = re.findall(r"- (\./[^:]+):", compose)
    assert mounted
    assert all(Path(FOLDER, path).exists() for path in mounted)
