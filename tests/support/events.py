"""Server-sent events as the specification has them, which asks more of a server than the load test's reader does."""


class EventReader:
    """Takes server-sent events apart, however their bytes were cut (WHATWG HTML, section 9.2).

    Only `data` fields count. An event ends with a blank line; one that is cut off before that is never reported.
    """

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that these bytes complete."""
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
