"""Server-sent events, read piece by piece as they come off the wire.

Law: pure. Bytes in, the data of whole events out; a character or a line end that is cut between two pieces is
put together again. Grammar: WHATWG HTML, "Server-sent events", section "Parsing an event stream". Only `data`
counts for this API; names, ids, retry times and comments are skipped.
"""

from __future__ import annotations

import codecs

MAX_EVENT = 4 * 1024 * 1024
"""Characters of one event. vLLM repeats the token ids of a prompt in the first one."""


class BadStream(ValueError):
    """These bytes are no event stream: not UTF-8, or an event without end."""


class Events:
    """One stream. `feed` pieces as they come; what an unfinished event holds is dropped at the end, as the
    grammar says."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("strict")
        self._rest, self._size = "", 0
        self._data: list[str] = []
        self._begun = self._cr = False

    def feed(self, piece: bytes) -> list[str]:
        """Data of the events that end in this piece. Raises BadStream."""
        try:
            text = self._decode.decode(piece)
        except UnicodeDecodeError as error:
            raise BadStream(f"not UTF-8: {error.reason} at byte {error.start}") from error
        if not text:
            return []
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\ufeff")
        return [data for line in self._lines(text) if (data := self._line(line)) is not None]

    def _lines(self, text: str) -> list[str]:
        """Whole lines; CR, LF and CR LF end one. A CR at the end of a piece ends its line at once: the LF
        that may follow is skipped when it comes."""
        if self._cr and text.startswith("\n"):
            text = text[1:]
        self._cr = text.endswith("\r")
        lines = (self._rest + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT:
            raise BadStream(f"a line of more than {MAX_EVENT} characters")
        return lines

    def _line(self, line: str) -> str | None:
        """The event that this line ends, if it ends one."""
        if not line:
            data, self._data, self._size = self._data, [], 0
            return "\n".join(data) if data else None
        name, _, value = line.partition(":")
        if name == "data":
            self._size += len(value)
            if self._size > MAX_EVENT:
                raise BadStream(f"an event of more than {MAX_EVENT} characters")
            self._data.append(value.removeprefix(" "))
        return None
