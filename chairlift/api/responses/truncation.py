"""Shortens a conversation that does not fit, as `truncation: "auto"` of `/v1/responses` asks."""

from collections.abc import Callable, Sequence

from chairlift.engine.text.chat_template import Message
from chairlift.errors import ContextLengthExceeded

Encode = Callable[[Sequence[Message]], list[int]]
"""Makes a prompt of messages. `ContextLengthExceeded` if it is longer than a sequence."""

_SHARE_FOR_ANSWER = 8  # of a sequence: one in so many tokens is kept free if the request does not say how many


def encode_end(
    messages: Sequence[Message], encode: Encode, max_seq_len: int, num_wanted: int | None
) -> tuple[list[int], int]:
    """The prompt, and the number of messages that were left out of its beginning so that it fits beside an answer of
    `num_wanted` tokens (None: of any length).

    System messages at the beginning stay, and what is left begins with a turn of the user. `ContextLengthExceeded` if
    the last such turn does not fit. Encodes O(log(turns)) times.
    """
    most = max_seq_len - (num_wanted or 1)
    whole = _encode_up_to(messages, encode, most)
    if whole is not None:
        return whole, 0
    if num_wanted is None:
        most = max_seq_len - max(1, max_seq_len // _SHARE_FOR_ANSWER)
    lead = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    starts = [i for i, each in enumerate(messages) if i > lead and each["role"] == "user"]
    fitting: tuple[list[int], int] | None = None
    while starts:
        middle = len(starts) // 2
        prompt = _encode_up_to([*messages[:lead], *messages[starts[middle] :]], encode, most)
        if prompt is None:
            starts = starts[middle + 1 :]
        else:
            fitting, starts = (prompt, starts[middle] - lead), starts[:middle]
    return fitting or (encode(messages), 0)


def _encode_up_to(messages: Sequence[Message], encode: Encode, most: int) -> list[int] | None:
    """The prompt; None if it is longer than `most` tokens."""
    try:
        prompt = encode(messages)
    except ContextLengthExceeded:
        return None
    return prompt if len(prompt) <= most else None
