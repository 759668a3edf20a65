"""Ready as a request sees it: what an Envoy's page says of its hosts."""

from __future__ import annotations

from mesh.world import warm

PAGE = """\
chat.us-east-1.canary::default_priority::max_connections::4096
chat.us-east-1.canary::127.60.2.12:21000::cx_active::1
chat.us-east-1.canary::127.60.2.12:21000::health_flags::{flags}
weir-ads::/tmp/x.sock::health_flags::healthy
"""


def test_a_host_that_has_not_passed_its_checks_is_cold() -> None:
    assert warm.cold(PAGE.format(flags="/failed_active_hc")) == (
        "chat.us-east-1.canary 127.60.2.12:21000: /failed_active_hc",
    )


def test_a_page_of_healthy_hosts_is_warm() -> None:
    assert warm.cold(PAGE.format(flags="healthy")) == ()
