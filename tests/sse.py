"""A strict reader of server-sent events: anything the WHATWG grammar leaves undefined here is an error.

Law: pure; bytes in, the data of whole events out.
"""

from __future__ import annotations


def events(body: bytes) -> list[str]:
    """Data of each event. Every event must be `data: …` lines alone, ended by an empty line, in UTF-8."""
    text = body.decode("utf-8", errors="strict")
    if not text:
        return []
    assert "\r" not in text
    assert text.endswith("\n\n"), f"the last event is not ended: {text[-80:]!r}"
    out = []
    for block in text[:-2].split("\n\n"):
        lines = block.split("\n")
        assert all(line.startswith("data: ") for line in lines), f"no data line: {block!r}"
        out.append("\n".join(line[len("data: ") :] for line in lines))
    return out
