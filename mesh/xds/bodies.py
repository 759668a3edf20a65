"""Ready response bodies, shared by all streams that send the same resources.

Law: pure but for its own memory, which is bounded in entries and in bytes; oldest out first. Keys are content
hashes, so an entry is never wrong, only unused.
"""

from __future__ import annotations

from collections import OrderedDict

from mesh.xds.wire import Push, encode_body


class Bodies:
    """Cache of `encode_body` results."""

    def __init__(self, max_entries: int = 256, max_bytes: int = 32 << 20) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._bodies: OrderedDict[tuple[object, ...], bytes] = OrderedDict()
        self._bytes = 0
        self.built = 0
        """How many bodies were put together; a push to N streams adds one."""

    def of(self, push: Push) -> bytes:
        """The body of this push, without its nonce."""
        key = push.key
        body = self._bodies.get(key)
        if body is not None:
            self._bodies.move_to_end(key)
            return body
        body = encode_body(push)
        self.built += 1
        self._bodies[key] = body
        self._bytes += len(body)
        while len(self._bodies) > self._max_entries or self._bytes > self._max_bytes:
            _, dropped = self._bodies.popitem(last=False)
            self._bytes -= len(dropped)
        return body
