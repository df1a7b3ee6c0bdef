"""From records to figures, by the definitions of `vllm bench serve`; as tables, as JSON, and as a page with plots."""

import json
from base64 import b64decode
from dataclasses import astuple, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chairlift.loadtest import BenchConfig, SweepValues, parse_limits
from chairlift.loadtest.command import sweep_configs
from chairlift.loadtest.plots import draw_sweep, draw_test
from chairlift.loadtest.records import RequestFailed, RequestFailure, RequestRecord, one_line
from chairlift.loadtest.report import Report, report_sweep, report_test
from chairlift.loadtest.summary import (
    Distribution,
    FailureCount,
    keeps_limits,
    peak_running,
    peak_token_rate,
    running_at,
    summarize,
    token_rates,
)

from .conftest import BUSY, TIMEOUT, failed, record, result, sweep

FIVE_TOKENS = RequestRecord(
    index=0, intended_at=100.0, sent_at=100.0, ended_at=101.5, chunk_times=[100.5, 100.75, 101.0, 101.375, 101.5]
)


def alike(milliseconds: float) -> Distribution:
    return Distribution(milliseconds, milliseconds, milliseconds, milliseconds)


def test_latencies_of_a_request() -> None:
    assert FIVE_TOKENS.ttft == 0.5  # the first content chunk minus the send time
    assert FIVE_TOKENS.latency == 1.5  # the last chunk minus the send time
    assert FIVE_TOKENS.tpot == (1.5 - 0.5) / 4  # the rest of the latency over the rest of the tokens
    assert FIVE_TOKENS.inter_token_latencies == [0.25, 0.25, 0.375, 0.125]
    single = replace(FIVE_TOKENS, chunk_times=[101.5])
    assert (single.tpot, single.inter_token_latencies) == (None, [])


def test_latencies_count_from_the_intended_send_time_not_the_actual_one() -> None:
    """Coordinated omission: a client that could not send in time must not make the server look faster."""
    late = RequestRecord(index=0, intended_at=10.0, sent_at=12.5, ended_at=14.0, chunk_times=[13.0, 13.5, 14.0])
    assert (late.queue_time, late.ttft, late.latency, late.tpot) == (2.5, 3.0, 4.0, 0.5)
    assert late.inter_token_latencies == [0.5, 0.5]


def test_usage_has_the_word_else_chunks_are_counted_and_a_prompt_is_as_long_as_asked_for_if_that_is_known() -> None:
    assert (FIVE_TOKENS.output_tokens, FIVE_TOKENS.output_token_source) == (5, "chunks received")
    several = replace(FIVE_TOKENS, usage_prompt_tokens=7, usage_output_tokens=9)
    assert (several.output_tokens, several.output_token_source) == (9, "server's usage")
    assert (several.prompt_tokens, several.prompt_token_source) == (7, "server's usage")
    assert (several.tpot, several.inter_token_latencies) == (1.0 / 8, FIVE_TOKENS.inter_token_latencies)
    asked = replace(FIVE_TOKENS, asked_prompt_tokens=12)
    assert (asked.prompt_tokens, asked.prompt_token_source) == (12, "length asked for")
    assert (FIVE_TOKENS.prompt_tokens, FIVE_TOKENS.prompt_token_source) == (0, "not known")


def test_a_failure_keeps_one_line_of_what_was_said() -> None:
    failure = RequestFailed("HTTP 404", "<html>\n  <body>\tno\n").failure
    assert failure == RequestFailure("HTTP 404", "<html> <body> no")
    assert (str(failure), str(RequestFailure("timeout", ""))) == ("HTTP 404: <html> <body> no", "timeout")
    cut = [one_line("x" * length) for length in (200, 201, 5000)]
    assert [(len(line), line[-3:]) for line in cut] == [(200, "xxx"), (200, "..."), (200, "...")]


def test_a_distribution_is_in_milliseconds_with_interpolated_percentiles() -> None:
    distribution = Distribution.of_seconds([step / 1000 for step in range(101)])
    assert distribution is not None
    assert astuple(distribution) == pytest.approx((50.0, 50.0, 90.0, 99.0))
    assert Distribution.of_seconds([1.0, 2.0]) == Distribution(1500.0, 1500.0, 1900.0, 1990.0)
    assert Distribution.of_seconds([]) is None


def test_itl_is_over_all_gaps_and_tpot_over_requests() -> None:
    uneven = replace(record(1), chunk_times=[52.0, 52.0, 52.0, 52.0], ended_at=52.0, usage_output_tokens=4)
    summary = summarize(result(record(0), uneven))
    assert summary.itl_ms is not None
    assert summary.tpot_ms is not None
    assert (summary.itl_ms.mean, summary.tpot_ms.mean) == (1000.0 / 5, 500.0 / 2)


def test_failures_are_counted_by_label_most_frequent_first_with_the_first_message() -> None:
    again = RequestFailure("HTTP 503", "queue is still full")
    assert summarize(result(failed(0, TIMEOUT), failed(1, BUSY), failed(2, again))).failures == [
        FailureCount("HTTP 503", 2, "queue is full"),
        FailureCount("timeout", 1, "no complete reply within 9 s"),
    ]


def test_where_all_failed_nothing_was_measured() -> None:
    summary = summarize(result(failed(0, BUSY), goodput="ttft:1000"))
    assert (summary.num_succeeded, summary.request_throughput) == (0, 0.0)
    assert summary.ttft_ms is summary.tpot_ms is summary.itl_ms is summary.e2el_ms is None
    assert summary.output_token_source == summary.prompt_token_source == "no replies"
    assert (summary.peak_output_token_throughput, summary.peak_running) == (0.0, 0)
    assert (summary.goodput, summary.good_share) == (0.0, 0.0)


def test_the_summary_says_who_counted_the_tokens_and_how_many_replies_were_short() -> None:
    by_chunks = replace(record(1), usage_prompt_tokens=None, usage_output_tokens=None)
    counted, both = summarize(result(by_chunks)), summarize(result(record(0), by_chunks))
    assert summarize(result(record(0))).output_token_source == "server's usage"
    assert (counted.output_token_source, counted.prompt_token_source) == ("chunks received", "length asked for")
    assert both.output_token_source == "chunks received and server's usage"
    assert both.prompt_tokens == 10 + 12
    assert summarize(result(record(0), replace(record(1), usage_output_tokens=2))).num_short_replies == 1


def test_goodput_is_what_succeeded_within_the_limits_of_all_that_was_sent() -> None:
    for limits, goodput, share in [("ttft:1000,tpot:500", 0.5, 2 / 3), ("tpot:499", 0.0, 0.0), (None, None, None)]:
        summary = summarize(result(record(0), record(1), failed(2, BUSY), goodput=limits))
        assert (summary.goodput, summary.good_share, summary.limits) == (goodput, share, limits)


def test_a_good_request_is_at_or_below_every_limit() -> None:
    kept = {text: keeps_limits(FIVE_TOKENS, parse_limits(text)) for text in ("ttft:500", "tpot:250", "e2el:1500")}
    exceeded = ("ttft:499", "tpot:249", "e2el:1499", "ttft:500,tpot:249,e2el:1500")
    assert kept == dict.fromkeys(kept, True)
    assert not any(keeps_limits(FIVE_TOKENS, parse_limits(text)) for text in exceeded)
    assert keeps_limits(replace(FIVE_TOKENS, chunk_times=[101.5]), {"tpot": 0.001})  # no time per further token
    assert not keeps_limits(replace(FIVE_TOKENS, failure=TIMEOUT), {"e2el": 1e9})


def test_a_late_or_a_fully_busy_client_lags() -> None:
    for lag, busy_share, is_lagging in [(0.009, 0.89, False), (0.011, 0.1, True), (0.001, 0.91, True)]:
        summary = summarize(result(record(0), lag=lag, busy_share=busy_share))
        assert summary.has_lagging_client is is_lagging
        assert (summary.client_lag_ms, summary.client_busy_share) == (alike(1000 * lag), busy_share)


def test_tokens_count_in_the_bin_in_which_they_arrived_or_in_the_last_and_a_chunk_of_several_for_as_many() -> None:
    # Tokens at 51, 51.5 and 52; and at 52, 52.5 and 53.
    rates = token_rates([record(0), record(1)], started_at=50.0, num_bins=8, width_s=0.5)
    assert rates.tolist() == [0, 0, 2, 2, 4, 2, 2, 0]
    assert token_rates([record(0)], started_at=50.0, num_bins=1, width_s=1.0).tolist() == [3]
    twelve = replace(record(0), usage_output_tokens=12)
    assert token_rates([twelve], started_at=50.0, num_bins=3, width_s=1.0).tolist() == [0, 8, 4]


def test_the_peak_is_that_of_whole_seconds_from_the_first_request_sent() -> None:
    burst = replace(record(1), chunk_times=[52.0, 52.25, 52.75], ended_at=52.75)
    # Seconds from 51: none, the burst, none. From 50: none, two of the first, its last with the burst.
    assert [peak_token_rate(records) for records in ([burst], [record(0), burst], [])] == [3.0, 4.0, 0.0]


def test_requests_are_in_flight_from_being_sent_to_their_end_and_one_sent_then_does_not_overlap() -> None:
    # In flight from 50 to 52 and from 51 to 53.
    moments = np.asarray([49.0, 50.0, 50.5, 51.0, 51.5, 52.0, 52.5, 53.0])
    assert running_at([record(0), record(1)], moments).tolist() == [0, 1, 1, 2, 2, 1, 1, 0]
    starts: list[list[int]] = [[], [0], [0, 1], [0, 2], [0, 1, 2, 3], [0, 0, 0]]
    assert [peak_running(list(map(record, each))) for each in starts] == [0, 1, 2, 1, 2, 3]


GOOD = (record(0),)
NINE_OF_TEN = (*(record(n) for n in range(9)), failed(9, BUSY))
BAD = (*(record(n) for n in range(8)), failed(8, BUSY), failed(9, BUSY))


def test_each_value_of_a_sweep_is_a_test_with_a_seed_of_its_own() -> None:
    config = BenchConfig(sweep="rate=1,2", goodput="ttft:5", seed=7)
    first, second = sweep_configs(config, SweepValues.parse("rate=1,2"))
    assert (first.request_rate, first.seed, first.sweep) == (1.0, 7, None)
    assert (second.request_rate, second.seed) == (2.0, 8)
    [closed] = sweep_configs(config, SweepValues.parse("concurrency=3"))
    assert (closed.concurrency, closed.is_open_loop) == (3, False)


def test_the_highest_value_with_the_wanted_share_of_good_requests_is_found() -> None:
    sweeps = [(GOOD, NINE_OF_TEN, BAD), (BAD, GOOD, BAD), (GOOD, GOOD, GOOD), (BAD, BAD, BAD)]
    assert [sweep(*tests).highest for tests in sweeps] == [2.0, 2.0, 4.0, None]


def lines(report: Report) -> list[str]:
    return str(report).splitlines()


def test_the_table_of_a_closed_loop() -> None:
    assert lines(report_test(result(record(0), record(1), failed(1, TIMEOUT), concurrency=2))) == [
        "server                    http://host:8000/v1/completions",
        "model                     tiny",
        "arrivals                  --concurrency 2 (closed loop)",
        "",
        "requests succeeded        2 of 3",
        "most in flight            2",
        "duration                  4.00 s",
        "prompt tokens             20 (server's usage)",
        "output tokens             6 (server's usage)",
        "short replies             0",
        "request throughput        0.50 requests/s",
        "output throughput         1.50 tokens/s",
        "total throughput          6.50 tokens/s",
        "most output in a second   3 tokens",
        "",
        "ms                                mean         p50         p90         p99",
        "TTFT, first token              1000.00     1000.00     1000.00     1000.00",
        "TPOT, per output token          500.00      500.00      500.00      500.00",
        "ITL, between chunks             500.00      500.00      500.00      500.00",
        "E2EL, whole request            2000.00     2000.00     2000.00     2000.00",
        "client's own lag                  1.00        1.00        1.00        1.00",
        "",
        "failed: timeout           1 (no complete reply within 9 s)",
    ]


def test_what_was_not_measured_has_no_row() -> None:
    single = replace(record(0), chunk_times=[51.0], ended_at=51.0, usage_output_tokens=1)
    shown = [line.split("  ")[0] for line in lines(report_test(result(single, failed(1, BUSY), duration_s=0.5)))]
    assert not {"TPOT, per output token", "ITL, between chunks", "most output in a second", "goodput"} & set(shown)
    assert shown[-2:] == ["", "failed: HTTP 503"]


def test_an_open_loop_shows_how_long_requests_waited_in_the_client_and_the_goodput() -> None:
    late = replace(record(0), sent_at=50.5)
    shown = lines(report_test(result(late, failed(1, BUSY), request_rate=2.5, goodput="ttft:1500, e2el:2000")))
    assert "goodput                   0.25 requests/s, 50.0% of requests within ttft:1500, e2el:2000" in shown
    assert "queued in the client            250.00      250.00      450.00      495.00" in shown
    assert shown[-1] == "failed: HTTP 503          1 (queue is full)"


def test_arrivals_are_shown_as_they_are_typed() -> None:
    typed: list[tuple[dict[str, Any], str]] = [
        ({}, "--concurrency 8 (closed loop)"),
        ({"request_rate": 2.5}, "--request-rate 2.5 (open loop)"),
        ({"ramp": (1, 20), "burstiness": 0.5}, "--burstiness 0.5 --ramp 1,20 (open loop)"),
        ({"request_rate": 500.0, "concurrency": 4}, "--request-rate 500 --concurrency 4 (open loop)"),
        ({"trace": "a.jsonl", "trace_speedup": 2}, "--trace a.jsonl --trace-speedup 2 (open loop)"),
    ]
    for settings, said in typed:
        assert lines(report_test(result(record(0), **settings)))[2] == f"arrivals                  {said}"


def test_what_is_said_of_a_client_that_fell_behind() -> None:
    assert report_test(result(record(0))).warnings == []
    assert report_test(result(record(0), lag=0.025, busy_share=0.97)).warnings == [
        "the load test itself fell behind: its event loop was 25 ms late (p99) and 97% of a core busy, which is in the "
        "latencies above; give it a core of its own, or lower the load"
    ]


def test_the_table_of_a_sweep() -> None:
    report = report_sweep(sweep((record(0),), (failed(0, BUSY),)))
    assert report.is_good
    assert lines(report) == [
        "requests/s asked for        requests/s    tokens/s    TTFT p50    TTFT p99    TPOT p50    TPOT p99      failed"
        "        good",
        "1                                 0.25         0.8      1000.0      1000.0       500.0       500.0           0"
        "      100.0%",
        "2                                 0.00         0.0           -           -           -           -           1"
        "        0.0%",
        "",
        "limits                    ttft:1000 for 90% of requests",
        "highest rate              1",
    ]


def test_guessed_tokens_have_a_row_where_the_server_tells_of_some() -> None:
    guessed = [replace(record(index), usage_accepted_tokens=2, usage_rejected_tokens=index) for index in range(3)]
    assert "guessed tokens            9, of which 6 are output" in str(report_test(result(*guessed))).splitlines()
    silent = replace(record(0), usage_accepted_tokens=0, usage_rejected_tokens=0)
    assert "guessed" not in str(report_test(result(silent, record(1))))


def written(path: Path, report: Report) -> Any:
    report.write_json(path)
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_json_has_settings_summary_and_raw_figures_in_seconds_since_the_test_began(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"request_rate": 2.0, "goodput": "ttft:1000", "api_key": "sk-secret"}
    late = replace(record(0), sent_at=50.5, turn=2, usage_cached_tokens=4)
    document = written(tmp_path / "result.json", report_test(result(late, failed(1, BUSY), **settings)))
    assert list(document) == ["config", "summary", "requests"]
    config, summary, (first, second) = document.values()
    assert (config["model"], config["request_rate"], config["api_key"]) == ("tiny", 2.0, "**********")
    assert summary["ttft_ms"] == {"mean": 1000.0, "p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert summary["client_queue_ms"] == {"mean": 250.0, "p50": 250.0, "p90": 450.0, "p99": 495.0}
    assert (summary["client_busy_share"], summary["output_token_source"]) == (0.25, "server's usage")
    assert (summary["limits"], summary["goodput"], summary["good_share"]) == ("ttft:1000", 0.25, 0.5)
    assert summary["failures"] == [{"label": "HTTP 503", "count": 1, "first_message": "queue is full"}]
    times = {"intended_s": 0.0, "sent_s": 0.5, "chunks_s": [1.0, 1.5, 2.0], "ended_s": 2.0}
    asked = {"index": 0, "turn": 2, "asked_prompt_tokens": 12, "asked_output_tokens": 3}
    counts = {"prompt_tokens": 10, "cached_tokens": 4, "accepted_tokens": None, "rejected_tokens": None}
    reply = {"output_tokens": 3, "output_token_source": "server's usage", "error": None}
    assert first == times | asked | counts | reply
    assert (second["intended_s"], second["chunks_s"], second["ended_s"]) == (1.0, [], 10.0)
    assert (second["output_tokens"], second["error"]) == (0, "HTTP 503: queue is full")


def test_the_json_of_a_sweep_has_its_tests_and_what_was_found(tmp_path: Path) -> None:
    document = written(tmp_path / "sweep.json", report_sweep(sweep((record(0),), (record(0),))))
    assert (document["highest"], document["config"]["sweep"]) == (2.0, "rate=1")
    assert [test["value"] for test in document["tests"]] == [1.0, 2.0]
    assert [list(test) for test in document["tests"]] == [["value", "config", "summary", "requests"]] * 2


class Page(HTMLParser):
    """Collects the text and what is referred to, and sees that tags are closed in order."""

    def __init__(self, report: Report, path: Path) -> None:
        super().__init__()
        self.texts, self.sources, self.open = list[str](), list[str](), list[str]()
        report.write_page(path)
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_the_tables_and_plots_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    broken = failed(1, replace(BUSY, message="<script>alert(1)</script>"))  # what a server said is no markup
    page = Page(report_test(result(record(0), broken, lag=0.05)), tmp_path / "r.html")
    for text in ("Load test of tiny", "TTFT, first token", "p99", "1000.00", "1 of 2", "failed: HTTP 503"):
        assert text in page.texts
    assert "1 (<script>alert(1)</script>)" in page.texts
    assert [text.split(":")[0] for text in page.texts if "behind" in text] == ["the load test itself fell behind"]
    [source] = page.sources
    assert source.startswith("data:image/png;base64,")
    assert b64decode(source.partition(",")[2]).startswith(b"\x89PNG\r\n\x1a\n")


def test_a_page_is_written_where_nothing_succeeded(tmp_path: Path) -> None:
    report = report_sweep(sweep((failed(0, BUSY),)))
    assert report.title in Page(report, tmp_path / "r.html").texts
    assert (report.is_good, report_test(result(failed(0, BUSY))).is_good) == (False, False)


def plots(figure: Figure) -> dict[str, Axes]:
    return {title: axes for axes in figure.axes if (title := axes.get_title(loc="left"))}


def legend(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


LATENCIES = ["Time to first token (TTFT)", "Time per output token (TPOT)"]


def test_six_plots_of_a_test_and_the_requests_in_flight() -> None:
    bench = result(record(0), record(1), failed(2, BUSY), goodput="ttft:1100,e2el:9000", duration_s=6.0)
    figure = draw_test(bench)
    drawn = plots(figure)
    others = ["Inter-token latency (ITL)", "Whole request (E2EL)", "Throughput over time", "TTFT against arrival"]
    assert list(drawn) == LATENCIES + others
    assert legend(drawn[LATENCIES[0]]) == ["limit 1100 ms"]
    assert list(drawn[LATENCIES[0]].lines[0].get_xdata())[1:] == [1000.0, 1000.0]  # type: ignore[arg-type]
    assert legend(drawn["TTFT against arrival"]) == ["succeeded", "failed", "limit 1100 ms"]
    [running] = [axes for axes in figure.axes if axes.get_ylabel() == "requests in flight"]
    # In flight from 0, 1 and 2 s, to 2, 3 and beyond: 10 bins a second.
    in_flight = [1.0] * 10 + [2.0] * 20 + [1.0] * 30
    assert list(running.lines[0].get_ydata()) == in_flight  # type: ignore[arg-type]


def test_four_plots_of_a_sweep_with_the_highest_value_marked() -> None:
    figure = draw_sweep(sweep((record(0),), (record(0),), (failed(0, BUSY),)))
    *others, share = plots(figure).values()
    assert list(plots(figure)) == [*LATENCIES, "Output throughput", "Requests within the limits"]
    assert list(share.lines[0].get_ydata()) == [100.0, 100.0, 0.0]  # type: ignore[arg-type]
    assert all(list(axes.lines[-1].get_xdata()) == [2.0, 2.0] for axes in (*others, share))  # type: ignore[arg-type]
    assert figure.get_suptitle() == "sweep of rate: 2 is the highest within the limits"
