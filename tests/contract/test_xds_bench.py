"""The xDS scale bench runs and gives rows in the agreed form; its figures are judged by `weir bench`."""

from __future__ import annotations

from tests.bench.bench_xds_scale import run

KEYS = {"bench", "metric", "value", "unit", "peer", "peer_value", "ratio", "goal", "met"}


def test_rows_have_the_keys_that_other_tools_rely_on() -> None:
    rows = run(sizes=(5,))
    assert all(row.keys() == KEYS for row in rows)
    assert all(row["value"] > 0 for row in rows)
    assert len({row["metric"] for row in rows}) == len(rows) == 6
