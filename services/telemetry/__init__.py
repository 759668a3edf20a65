"""What an executor tells of itself: metrics, load reports, traces.

Law: nothing in this package decides anything about a request; it may be slow or broken without a request
noticing.
"""

from __future__ import annotations

from services.telemetry.outgoing import outgoing_headers

__all__ = ["outgoing_headers"]
