"""Server-sent events, however the network cuts them."""

import pytest

from chairlift.bench.sse import EventReader

STREAM = b': ping\n\ndata: {"a": 1}\n\nevent: x\nid: 7\ndata: two\n\n\n\ndata:[DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two", b"[DONE]"]


def test_events_of_one_piece() -> None:
    assert EventReader().feed(STREAM) == EVENTS


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_events_are_the_same_however_the_stream_is_cut(size: int, line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    reader = EventReader()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    events = [event for piece in pieces for event in reader.feed(piece)]
    assert events == EVENTS


def test_an_event_is_reported_with_its_blank_line_and_not_before() -> None:
    reader = EventReader()
    assert reader.feed(b"data: one") == []
    assert reader.feed(b"\n") == []
    assert reader.feed(b"\n") == [b"one"]
    assert reader.feed(b"data: cut off") == []


def test_data_on_several_lines_is_joined() -> None:
    assert EventReader().feed(b"data: {\ndata:  1}\n\n") == [b"{\n 1}"]


def test_only_one_leading_space_is_taken_away() -> None:
    assert EventReader().feed(b"data:  x\n\ndata:y\n\n") == [b" x", b"y"]


def test_a_character_cut_in_two_stays_whole() -> None:
    reader = EventReader()
    encoded = "data: é\n\n".encode()
    assert reader.feed(encoded[:7]) == []
    assert reader.feed(encoded[7:]) == ["é".encode()]


def test_comments_and_other_fields_are_no_events() -> None:
    assert EventReader().feed(b": keep-alive\n\nretry: 3\n\nevent: ping\n\ndatax: 1\n\n") == []


def test_blank_lines_alone_are_no_events() -> None:
    assert EventReader().feed(b"\n\n\r\n\n") == []
