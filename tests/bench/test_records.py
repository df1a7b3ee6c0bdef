"""Latencies out of literal timestamps, by the definitions of `vllm bench serve`."""

from dataclasses import replace

import pytest

from chairlift.bench.failures import Failure, FailureKind, RequestFailed, one_line
from chairlift.bench.records import RequestRecord, TokenSource

FIVE_TOKENS = RequestRecord(
    index=0,
    intended_at=100.0,
    sent_at=100.0,
    ended_at=101.5,
    chunk_times=(100.5, 100.75, 101.0, 101.375, 101.5),
)


def test_ttft_is_the_first_content_chunk_minus_the_send_time() -> None:
    assert FIVE_TOKENS.ttft == 0.5


def test_latency_is_the_last_chunk_minus_the_send_time() -> None:
    assert FIVE_TOKENS.latency == 1.5


def test_tpot_is_the_rest_of_the_latency_over_the_rest_of_the_tokens() -> None:
    assert FIVE_TOKENS.tpot == (1.5 - 0.5) / 4


def test_itl_is_the_gaps_between_content_chunks() -> None:
    assert FIVE_TOKENS.inter_token_latencies == [0.25, 0.25, 0.375, 0.125]


def test_without_usage_chunks_are_counted() -> None:
    assert FIVE_TOKENS.output_tokens == 5
    assert FIVE_TOKENS.output_token_source is TokenSource.CHUNKS


def test_a_prompt_without_usage_is_as_long_as_asked_for_if_that_is_known() -> None:
    asked = replace(FIVE_TOKENS, asked_prompt_tokens=12)
    assert (asked.prompt_tokens, asked.prompt_token_source) == (12, TokenSource.REQUESTED)
    assert (FIVE_TOKENS.prompt_tokens, FIVE_TOKENS.prompt_token_source) == (0, TokenSource.NOBODY)


def test_a_reply_is_short_if_it_has_fewer_tokens_than_were_asked_for() -> None:
    assert replace(FIVE_TOKENS, asked_output_tokens=6).is_short
    assert not replace(FIVE_TOKENS, asked_output_tokens=5).is_short
    assert not FIVE_TOKENS.is_short


def test_usage_has_the_word_where_chunks_carry_several_tokens() -> None:
    record = RequestRecord(
        index=0,
        intended_at=0.0,
        sent_at=0.0,
        ended_at=2.0,
        chunk_times=(1.0, 2.0),
        usage_prompt_tokens=7,
        usage_output_tokens=9,
    )
    assert record.output_tokens == 9
    assert record.output_token_source is TokenSource.USAGE
    assert (record.prompt_tokens, record.prompt_token_source) == (7, TokenSource.USAGE)
    assert record.tpot == 1.0 / 8
    assert record.inter_token_latencies == [1.0]


def test_a_single_token_has_no_time_per_further_token() -> None:
    record = RequestRecord(index=0, intended_at=0.0, sent_at=0.0, ended_at=1.0, chunk_times=(1.0,))
    assert record.tpot is None
    assert record.inter_token_latencies == []


def test_latencies_count_from_the_intended_send_time_not_the_actual_one() -> None:
    """Coordinated omission: a client that could not send in time must not make the server look faster."""
    late = RequestRecord(
        index=0,
        intended_at=10.0,
        sent_at=12.5,
        ended_at=14.0,
        chunk_times=(13.0, 13.5, 14.0),
    )
    assert late.queue_time == 2.5
    assert late.ttft == 3.0
    assert late.latency == 4.0
    assert late.tpot == 0.5
    assert late.inter_token_latencies == [0.5, 0.5]


def test_failures_are_labelled_by_kind_and_http_errors_by_status() -> None:
    assert Failure(FailureKind.TIMEOUT, "10 s").label == "timeout"
    assert Failure(FailureKind.HTTP_STATUS, "busy", 503).label == "HTTP 503"
    assert str(Failure(FailureKind.HTTP_STATUS, "busy", 503)) == "HTTP 503: busy"
    assert str(Failure(FailureKind.HTTP_STATUS, "", 503)) == "HTTP 503"


def test_a_failure_keeps_one_line_of_what_was_said() -> None:
    failure = RequestFailed(FailureKind.HTTP_STATUS, "<html>\n  <body>\tno\n", 404).failure
    assert failure == Failure(FailureKind.HTTP_STATUS, "<html> <body> no", 404)


@pytest.mark.parametrize(("length", "kept"), [(200, 200), (201, 200), (5000, 200)])
def test_long_messages_are_cut(length: int, kept: int) -> None:
    line = one_line("x" * length)
    assert len(line) == kept
    assert line.endswith("..." if length > 200 else "xxx")
