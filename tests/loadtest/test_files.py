"""The files that a test is made from: traces, messages, conversations; and what is said of a bad line."""

import json
from pathlib import Path

import pytest

from chairlift.loadtest.summary import BenchError
from chairlift.loadtest.workload import TraceLine, read_conversations, read_trace, trace_offsets


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def trace_line(timestamp: float, **fields: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": 6, "output_length": 3} | fields


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        trace_line(2000, type="text", chat_id=[]),
        "",
        trace_line(500, hash_ids=[1, 2]),
        trace_line(1000.5),
    )
    lines = read_trace(path, None)
    assert lines[0] == TraceLine(timestamp=500, input_length=6, output_length=3, hash_ids=(1, 2))
    assert [line.timestamp for line in lines] == [500, 1000.5, 2000]


def test_offsets_are_seconds_from_the_first_line(tmp_path: Path) -> None:
    lines = read_trace(write(tmp_path / "t.jsonl", trace_line(500), trace_line(1000), trace_line(3500)), None)
    assert trace_offsets(lines, speedup=1.0) == [0.0, 0.5, 3.0]
    assert trace_offsets(lines, speedup=2.0) == [0.0, 0.25, 1.5]


def test_only_the_first_requests_of_a_trace_may_be_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", trace_line(2), trace_line(1))
    assert [line.timestamp for line in read_trace(path, 1)] == [1]
    with pytest.raises(BenchError) as caught:
        read_trace(path, 3)
    assert str(caught.value) == f"{path} has 2 requests, not 3: lower --num-requests or leave it out"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{oops", "Invalid JSON: key must be a string at line 1 column 2"),
        ("3", "Input should be an object"),
        ('{"timestamp": 1, "output_length": 3}', "input_length: Field required"),
        (json.dumps(trace_line(1, input_length="6")), "input_length: Input should be a valid integer"),
        (json.dumps(trace_line(1, input_length=0)), "input_length: Input should be greater than or equal to 1"),
        (json.dumps(trace_line(-1)), "timestamp: Input should be greater than or equal to 0"),
        (json.dumps(trace_line(1, hash_ids=[1, -2])), "hash_ids: 1: Input should be greater than or equal to 0"),
    ],
)
def test_a_bad_line_is_told_by_its_number_and_text(tmp_path: Path, bad: str, said: str) -> None:
    path = write(tmp_path / "t.jsonl", trace_line(1), "", bad, trace_line(2))
    with pytest.raises(BenchError) as caught:
        read_trace(path, None)
    assert str(caught.value) == f"{path}, line 3: {said}: {bad}"


def test_a_long_bad_line_is_cut(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as caught:
        read_trace(write(tmp_path / "t.jsonl", "x" * 10_000), None)
    assert len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, empty, binary = tmp_path / "missing", write(tmp_path / "empty", "", "  "), tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in [
        (missing, f"cannot read {missing}: No such file or directory"),
        (tmp_path, f"cannot read {tmp_path}: Is a directory"),
        (empty, f"{empty} is empty: it must have one JSON object per line"),
        (binary, f"cannot read {binary}: it must be text in UTF-8, one JSON object per line"),
    ]:
        with pytest.raises(BenchError) as caught:
            read_trace(path, None)
        assert str(caught.value) == said


def test_messages_are_kept_with_all_their_fields(tmp_path: Path) -> None:
    sent = {"role": "user", "content": [{"type": "text", "text": "a\u2028b"}], "name": "ann"}
    [line] = read_conversations(write(tmp_path / "c.jsonl", {"messages": [sent], "output_tokens": 9, "id": 4}))
    assert line.turns == [[sent]]
    assert line.output_tokens == 9


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prompt": "a"}, "messages: Field required"),
        ({"messages": ["a"]}, "messages: 0: Input should be an object"),
        ({"messages": [message("user", "a")], "output_tokens": 0}, "output_tokens: Input should be greater than 0"),
    ],
)
def test_bad_messages_are_told_by_their_line(tmp_path: Path, bad: object, said: str) -> None:
    path = write(tmp_path / "c.jsonl", bad)
    with pytest.raises(BenchError) as caught:
        read_conversations(path)
    assert str(caught.value) == f"{path}, line 1: {said}: {json.dumps(bad)}"


def test_a_conversation_has_a_turn_for_each_message_of_the_user(tmp_path: Path) -> None:
    system, first = message("system", "be kind"), message("user", "one")
    answer, second = message("assistant", "1"), message("user", "two")
    path = write(tmp_path / "c.jsonl", {"messages": [system, first, answer, second, message("assistant", "2")]})
    [line] = read_conversations(path)
    assert line.turns == [[system, first], [second]]


def test_a_conversation_without_a_user_is_refused(tmp_path: Path) -> None:
    lines = [{"messages": [message(role, "a")]} for role in ("user", "system")]
    path = write(tmp_path / "c.jsonl", *lines)
    with pytest.raises(BenchError) as caught:
        read_conversations(path)
    assert str(caught.value) == f"{path}, conversation 2 has no message of role user, so it has no turn"
