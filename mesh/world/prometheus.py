"""What Prometheus needs to know of a world: scrape configuration and rules, as plain data.

Law: pure. Nothing is started here; `weir metrics` prints it, and a test feeds it to a real Prometheus.

Envoy puts `envoy_` before every statistic of its own, so the metric that the users' dashboards ask for gets
its name (names.BY_TAG_METRIC) by a relabel rule at scrape time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.xds.names import BY_TAG_METRIC

SHARE = "service_region_stage:dye_share:rate1m"
DEVIATION = "service:dye_deviation:max1m"

SHARE_QUERY = (
    f"sum by (service, region, stage) (rate({BY_TAG_METRIC}[1m])) "
    f"/ on (service) group_left () sum by (service) (rate({BY_TAG_METRIC}[1m]))"
)
DEVIATION_QUERY = (
    "max by (service) (abs("
    f"(sum by (service, region, stage) (rate({BY_TAG_METRIC}[1m])) "
    f"/ on (service) group_left () sum by (service) (rate({BY_TAG_METRIC}[1m]))) "
    "- on (service, region, stage) avg by (service, region, stage) (weir_traffic_share)))"
)
"""How far the colour of the water is from what was ordered: the largest |observed - intended| share of any
(region, stage), per service, over the last minute. 0.02 is two points."""


def scrape_config(
    targets: Sequence[tuple[str, str, str]], rules_file: str = "", every: str = "5s"
) -> dict[str, Any]:
    """prometheus.yml as data. targets: (region, host:port of the ingress' metrics, of the control plane)."""
    by_tag = {
        "source_labels": ["__name__"],
        "regex": f"envoy_({BY_TAG_METRIC})",
        "target_label": "__name__",
        "replacement": "$1",
    }
    config: dict[str, Any] = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "scrape_configs": [
            {
                "job_name": "weir-ingress",
                "metrics_path": "/metrics",
                "static_configs": [_target(ingress, region) for region, ingress, _ in targets],
                "metric_relabel_configs": [by_tag],
            },
            {
                "job_name": "weir-control-plane",
                "metrics_path": "/metrics",
                "static_configs": [_target(plane, region) for region, _, plane in targets],
            },
        ],
    }
    return {**config, "rule_files": [rules_file]} if rules_file else config


def _target(address: str, region: str) -> dict[str, Any]:
    # The region that reports, not the one that answered: that one is the metric's own label `region`.
    return {"targets": [address], "labels": {"ingress_region": region}}


def rules() -> dict[str, Any]:
    """Recording rules and the alerts that go with them."""
    return {
        "groups": [
            {
                "name": "weir-dye",
                "rules": [
                    {"record": SHARE, "expr": SHARE_QUERY},
                    {"record": DEVIATION, "expr": DEVIATION_QUERY},
                    {
                        "alert": "DyeDeviation",
                        "expr": f"{DEVIATION} > 0.02",
                        "for": "2m",
                        "labels": {"severity": "warning", "team": "mesh"},
                        "annotations": {
                            "summary": "Traffic of {{ $labels.service }} is not where it was sent",
                            "description": "The share of a region and stage is off by "
                            "{{ $value | humanizePercentage }}.",
                        },
                    },
                    {
                        "alert": "ConfigRefused",
                        "expr": "max by (service) (weir_kv_refused) > 0",
                        "for": "1m",
                        "labels": {"severity": "warning", "team": "mesh"},
                        "annotations": {
                            "summary": "A value under config/traffic/ is refused for {{ $labels.service }}",
                            "description": "The last good value is in force; see `weir traffic show`.",
                        },
                    },
                ],
            }
        ]
    }
