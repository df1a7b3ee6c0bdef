"""Server-sent events out of arbitrary pieces of bytes (WHATWG HTML, section 9.2).

Only what an OpenAI-style stream uses: `data` fields, comments skipped, other fields ignored. An event ends
with a blank line; one cut off before that is never reported, as the standard asks.
"""


class EventReader:
    """Feed it bytes as they arrive; it returns the data of each event that became complete."""

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        lines = (self._unfinished_line + piece).split(b"\n")
        self._unfinished_line = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
