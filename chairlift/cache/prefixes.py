"""An index of the tokens in each slot: a radix tree that finds the longest common prefix.

An edge carries one or more tokens, and a node knows all slots whose tokens lead through it:

    root ── "You are ..." (slots 0 1 4) ──┬── "Hi!" (0)
                                          └── "Tell me" (1 4) ──┬── " a joke" (1)
                                                                └── " more" (4)

Tokens are packed into four bytes each, so that thousands of them are compared as one piece of memory. Every `salt` has
a tree of its own: a lookup never finds what was computed under another salt. `CommonPrefixes` tracks which slots were
copied from which. Plain Python, no tensors; not thread-safe.
"""

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from chairlift.plan import CommonPrefix

_TOKEN_TYPE = "i"
_TOKEN_BYTES = array(_TOKEN_TYPE).itemsize
_MIN_COMMON_TOKENS = 128  # shorter common prefixes are not worth tracking


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Packs token ids for `PrefixIndex`."""
    return array(_TOKEN_TYPE, token_ids).tobytes()


def count_tokens(tokens: bytes) -> int:
    """Counts packed tokens."""
    return len(tokens) // _TOKEN_BYTES


def cut_tokens(tokens: bytes, num_tokens: int) -> bytes:
    """Returns the first of these packed tokens."""
    return tokens[: num_tokens * _TOKEN_BYTES]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Slots whose first `num_tokens` tokens are those of the lookup."""

    num_tokens: int
    slots: frozenset[int] | set[int]  # borrowed: valid until the index changes


@dataclass(slots=True)
class _Node:
    """The end of an edge; `slots` are those whose tokens lead to this node."""

    edge: bytes = b""
    slots: set[int] = field(default_factory=set)
    children: dict[bytes, "_Node"] = field(default_factory=dict)  # by the first token of their edges


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: bytes
    salt: str
    number: int  # in order of insertion


class PrefixIndex:
    """Finds slots by their first tokens, in a few microseconds per node on a path; paths are short."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._entries: dict[int, _Entry] = {}
        self._num_inserted = 0

    def __contains__(self, slot: object) -> bool:
        return slot in self._entries

    @property
    def slots(self) -> set[int]:
        """All slots in the index."""
        return set(self._entries)

    def entry(self, slot: int) -> tuple[bytes, str]:
        """Returns the tokens of a slot, and its salt. KeyError if it is not in the index."""
        entry = self._entries[slot]
        return entry.tokens, entry.salt

    def insert(self, slot: int, tokens: bytes, salt: str = "") -> None:
        """Records that the slot holds, or will hold, exactly these tokens."""
        self._num_inserted += 1
        self._set(slot, _Entry(tokens, salt, self._num_inserted))

    def _set(self, slot: int, entry: _Entry) -> None:
        self.remove(slot)
        self._entries[slot] = entry
        tokens = entry.tokens
        node = self._roots.setdefault(entry.salt, _Node())
        node.slots.add(slot)
        position = 0
        while position < len(tokens):
            first = tokens[position : position + _TOKEN_BYTES]
            child = node.children.get(first)
            if child is None:
                node.children[first] = _Node(tokens[position:], {slot})
                return
            num_shared = _common_bytes(child.edge, tokens, position)
            if num_shared < len(child.edge):
                child = _split(child, num_shared)
                node.children[first] = child
            child.slots.add(slot)
            node = child
            position += num_shared

    def remove(self, slot: int) -> None:
        """Removes the slot, if it is in the index."""
        entry = self._entries.pop(slot, None)
        if entry is None:
            return
        root = node = self._roots[entry.salt]
        path = [root]
        position = 0
        while position < len(entry.tokens):
            node = node.children[entry.tokens[position : position + _TOKEN_BYTES]]
            path.append(node)
            position += len(node.edge)
        for node in path:
            node.slots.discard(slot)
        for parent, child in zip(path[-2::-1], path[:0:-1], strict=True):
            if child.slots:
                _join_with_only_child(child)
            else:
                del parent.children[child.edge[:_TOKEN_BYTES]]
        if not root.slots:
            del self._roots[entry.salt]

    def cut(self, slot: int, num_tokens: int) -> None:
        """Removes all but the first `num_tokens` tokens of a slot in the index."""
        entry = self._entries[slot]
        if num_tokens:
            self._set(slot, replace(entry, tokens=cut_tokens(entry.tokens, num_tokens)))
        else:
            self.remove(slot)

    def clear(self) -> None:
        """Removes all slots."""
        self._roots.clear()
        self._entries.clear()

    def match(self, tokens: bytes, salt: str = "") -> Iterator[SharedPrefix]:
        """Iterates over shared prefixes, the longest first; the slots of a prefix also appear in all shorter ones.

        Must be exhausted before the index changes.
        """
        node = self._roots.get(salt)
        found: list[SharedPrefix] = []
        position = 0
        while node is not None and position < len(tokens):
            node = node.children.get(tokens[position : position + _TOKEN_BYTES])
            if node is None:
                break
            num_shared = _common_bytes(node.edge, tokens, position)
            position += num_shared
            found.append(SharedPrefix(position // _TOKEN_BYTES, node.slots))
            if num_shared < len(node.edge):
                break
        return reversed(found)

    def following(self, tokens: bytes, salt: str, num_slots: int, num_tokens: int) -> list[list[int]]:
        """The `num_tokens` tokens that follow these in each of the newest `num_slots` slots that begin with these."""
        longest = next(iter(self.match(tokens, salt)), None)
        if longest is None or longest.num_tokens * _TOKEN_BYTES < len(tokens):
            return []
        known = [entry for slot in longest.slots if len((entry := self._entries[slot]).tokens) > len(tokens)]
        known.sort(key=lambda entry: -entry.number)
        behind = slice(len(tokens), len(tokens) + num_tokens * _TOKEN_BYTES)
        return [array(_TOKEN_TYPE, entry.tokens[behind]).tolist() for entry in known[:num_slots]]

    def check(self) -> None:
        """Asserts that the trees hold exactly the entries."""
        for salt, root in self._roots.items():
            assert root.slots == {slot for slot, entry in self._entries.items() if entry.salt == salt}
            _check_below(root, b"", self._entries)
        assert {entry.salt for entry in self._entries.values()} == set(self._roots), "a tree without slots"


def _common_bytes(edge: bytes, tokens: bytes, position: int) -> int:
    """Bytes, of whole tokens, that an edge shares with `tokens` from `position` on."""
    if tokens.startswith(edge, position):
        return len(edge)
    low, high = 0, min(len(edge), len(tokens) - position) // _TOKEN_BYTES  # the number of equal tokens is between
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = low * _TOKEN_BYTES, middle * _TOKEN_BYTES
        if edge[begin:end] == tokens[position + begin : position + end]:
            low = middle
        else:
            high = middle - 1
    return low * _TOKEN_BYTES


def _split(node: _Node, num_bytes: int) -> _Node:
    """A new node in the middle of an edge; the old one becomes its child."""
    upper = _Node(node.edge[:num_bytes], set(node.slots))
    node.edge = node.edge[num_bytes:]
    upper.children[node.edge[:_TOKEN_BYTES]] = node
    return upper


def _join_with_only_child(node: _Node) -> None:
    """Undoes a split that no longer separates slots."""
    if len(node.children) == 1:
        (child,) = node.children.values()
        if len(child.slots) == len(node.slots):
            node.edge += child.edge
            node.children = child.children


def _check_below(node: _Node, tokens: bytes, entries: dict[int, _Entry]) -> None:
    tokens += node.edge
    assert node.slots, "a node without slots"
    assert all(entries[slot].tokens.startswith(tokens) for slot in node.slots), "a slot in the wrong place"
    for first, child in node.children.items():
        assert child.edge.startswith(first), "an edge under another's first token"
        assert child.slots <= node.slots, "a child has a slot that its parent lacks"
        _check_below(child, tokens, entries)
    ending = node.slots.difference(*(child.slots for child in node.children.values()))
    assert all(entries[slot].tokens == tokens for slot in ending), "a slot ends in the wrong place"


class CommonPrefixes:
    """In which other slot the prefix of a slot can be read, because one was copied from the other.

    If attention reads a common prefix from one place for all rows, the processor's caches have it from the second row
    on. All slots in a chain of copies refer to one slot; when that slot changes, another copy replaces it.
    """

    def __init__(self) -> None:
        self._prefixes: dict[int, CommonPrefix] = {}

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def of(self, slot: int) -> CommonPrefix:
        """The slot in which this slot's prefix can be read: the slot itself, with 0 tokens, if there is no other."""
        return self._prefixes.get(slot) or CommonPrefix(slot, 0)

    def note_copy(self, source: int, target: int, num_tokens: int) -> None:
        """Records that the first `num_tokens` tokens of `source` have replaced the contents of `target`."""
        self.cut(target, 0)
        known = self.of(source)
        self._set(target, CommonPrefix(known.slot if known.num_tokens >= num_tokens else source, num_tokens))

    def cut(self, slot: int, num_kept: int) -> None:
        """Records that a slot's tokens after the first `num_kept` will be overwritten."""
        if not self._prefixes:
            return
        own = self.of(slot)
        self._set(slot, CommonPrefix(own.slot, min(own.num_tokens, num_kept)))
        losing = {
            each: prefix.num_tokens
            for each, prefix in self._prefixes.items()
            if prefix.slot == slot and prefix.num_tokens > num_kept
        }
        if losing:
            heir = max(losing, key=lambda each: losing[each])
            for each, num_tokens in losing.items():
                self._set(each, CommonPrefix(heir, 0 if each == heir else num_tokens))

    def num_read(self, slot: int, readers: Collection[int]) -> int:
        """The most tokens of this slot that one of `readers` reads there instead of in its own slot."""
        return max(
            (own.num_tokens for each, own in self._prefixes.items() if own.slot == slot and each in readers), default=0
        )

    def _set(self, slot: int, prefix: CommonPrefix) -> None:
        if prefix.num_tokens >= _MIN_COMMON_TOKENS:
            self._prefixes[slot] = prefix
        else:
            self._prefixes.pop(slot, None)
