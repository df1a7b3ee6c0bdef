"""What the clients saw: every request is opened once and closed once, with one ending."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Ending(StrEnum):
    """What became of a request. Every request has exactly one."""

    FINISHED = "finished"  # the whole answer came, and it is right
    QUEUE_FULL = "queue full"  # 429
    REFUSED = "refused"  # the error that the request deserves
    LEFT = "left"  # the client went away before the end
    CUT_OFF = "cut off"  # the server ended the connection of a client that did not do its part
    FAILED = "failed"  # anything else, which must not be


@dataclass(slots=True)
class Entry:
    """One request. `status` is the HTTP status that the client saw, if it saw one."""

    number: int
    kind: str
    manner: str
    ending: Ending | None = None
    status: int | None = None
    complaint: str | None = None


class ClientLog:
    """All requests of a soak."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def open(self, kind: str, manner: str) -> Entry:
        """Before anything is sent."""
        entry = Entry(len(self.entries), kind, manner)
        self.entries.append(entry)
        return entry

    def close(self, entry: Entry, ending: Ending, complaint: str | None = None) -> None:
        """When it is known how the request ended. ValueError if that was known already."""
        if entry.ending is not None:
            raise ValueError(f"request {entry.number} ended twice: {entry.ending}, then {ending}")
        entry.ending, entry.complaint = ending, complaint

    def count(self) -> dict[str, Counter[str]]:
        """Endings by kind."""
        counts: dict[str, Counter[str]] = {}
        for entry in self.entries:
            counts.setdefault(entry.kind, Counter())[entry.ending or "open"] += 1
        return counts

    def count_manners(self) -> Counter[str]:
        return Counter(entry.manner for entry in self.entries)

    def complaints(self) -> list[str]:
        """Requests that failed or were never closed."""
        failed = [
            f"request {entry.number} ({entry.kind}, {entry.manner}): {entry.complaint}"
            for entry in self.entries
            if entry.ending is Ending.FAILED
        ]
        return failed + [f"request {entry.number} was never closed" for entry in self.entries if entry.ending is None]

    def compare(self, server_log: Mapping[str, Sequence[str]]) -> list[str]:
        """Where the server's log contradicts what the clients saw.

        What the client saw a status of, arrived once and ended with that status; nothing arrived twice; and nothing
        arrived that was not sent. Requests that no HTTP parser can read do not arrive.
        """
        complaints = []
        for entry in self.entries:
            told = server_log.get(str(entry.number), [])
            if len(told) > 1:
                complaints.append(f"request {entry.number} ({entry.kind}) arrived {len(told)} times: {told}")
            is_whole = entry.ending in (Ending.FINISHED, Ending.QUEUE_FULL, Ending.REFUSED)
            if is_whole and entry.status is not None and list(told) != [str(entry.status)]:
                complaints.append(
                    f"request {entry.number} ({entry.kind}): the client saw {entry.status}, the server tells {told}"
                )
        unknown = set(server_log) - {str(entry.number) for entry in self.entries}
        return complaints + [f"the server tells of requests that nobody sent: {sorted(unknown)}"] * bool(unknown)
