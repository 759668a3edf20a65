"""What Prometheus needs to know of a world: scrape configuration and rules, as plain data.

Law: pure. Nothing is started here; `weir metrics` prints it, and a test feeds it to a real Prometheus.

Envoy puts `envoy_` before every statistic of its own, so the metric that the users' dashboards ask for gets
its name (names.BY_TAG_METRIC) by a relabel rule at scrape time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.world import executor_rules
from mesh.world.executor_rules import Target
from mesh.xds.names import BY_TAG_METRIC

SHARE = "service_region_stage:dye_share:rate1m"
REQUESTS = "service:dyed_requests:rate1m"
DEVIATION = "service:dye_deviation:max1m"

_BY = "by (service, region, stage)"
# "-" stands where no instance answered (a rate limit, a refusal): such a request has no colour.
_RATE = f'rate({BY_TAG_METRIC}{{region!="-"}}[1m])'
_INTENDED = f"avg {_BY} (weir_traffic_share)"

REQUESTS_QUERY = f"sum by (service) ({_RATE})"
SHARE_QUERY = f"sum {_BY} ({_RATE}) / on (service) group_left () {REQUESTS_QUERY}"
DEVIATION_QUERY = (
    f"max by (service) (abs(({SHARE_QUERY} or {_INTENDED} * 0) - ({_INTENDED} or ({SHARE_QUERY}) * 0))) "
    f"and on (service) ({REQUESTS_QUERY} > 0)"
)
"""How far the colour of the water is from what was ordered: the largest |observed - intended| share of any
(region, stage), per service, over the last minute. 0.02 is two points. What was ordered and not seen counts,
and what was seen and not ordered; without traffic there is no answer."""

TOLERANCE = 0.02
ALARM = f"{DEVIATION} > on (service) ({TOLERANCE} + 1.5 / sqrt({REQUESTS} * 60))"
"""Over the tolerance and over what chance does to so few requests (three sigma of a share of one half)."""


QUERIES = {"dye": DEVIATION_QUERY, **executor_rules.QUERIES}
"""Name → query: what `weir metrics query NAME` prints."""


def scrape_config(
    targets: Sequence[tuple[str, str, str]],
    executors: Sequence[Target] = (),
    rules_file: str = "",
    every: str = "5s",
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
            executor_rules.job(executors),
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
                    {"record": REQUESTS, "expr": REQUESTS_QUERY},
                    {"record": DEVIATION, "expr": DEVIATION_QUERY},
                    {
                        "alert": "DyeDeviation",
                        "expr": ALARM,
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
                    {
                        # Silence of the other alerts means nothing while nobody is asked.
                        "alert": "MeshNotWatched",
                        # Executors come and go, and have alerts of their own.
                        "expr": 'up{job=~"weir-ingress|weir-control-plane"} == 0 '
                        'or absent(up{job="weir-ingress"}) or absent(up{job="weir-control-plane"})',
                        "for": "1m",
                        "labels": {"severity": "warning", "team": "mesh"},
                        "annotations": {
                            "summary": "{{ $labels.job }} {{ $labels.ingress_region }} isn't scraped",
                            "description": "No answer, or no such target; see `weir metrics config`.",
                        },
                    },
                ],
            },
            executor_rules.group(),
        ]
    }
