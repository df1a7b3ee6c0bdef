"""The log of a real server process, as its flags want it."""

import json
import signal

import httpx

from tests.support.server_process import SERVE, long_stream, running


def test_every_record_is_an_object_of_its_own_from_start_to_end() -> None:
    with running(SERVE, "--log-format", "json", "--log-interval", "0.05") as process:
        url = process.url.rstrip('"}')  # it was read out of a JSON string
        with httpx.Client(base_url=url, timeout=60) as client:
            client.post("/v1/completions", json=long_stream(800), headers={"X-Request-Id": 129 * "x"})
            client.post("/v1/completions", json=long_stream(800), headers={"X-Request-Id": "mine"})
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    entries = [json.loads(line) for line in process.log]
    assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)
    requests = [entry for entry in entries if entry["message"] == "request"]
    assert [entry["output_tokens"] for entry in requests] == [800, 800]
    assert len(requests[0]["request_id"]) == 32
    assert requests[1]["request_id"] == "mine"
    batches = [entry for entry in entries if entry["message"] == "batch"]
    assert batches
    assert all(entry["running"] <= entry["slots"] for entry in batches)


def test_an_interval_of_zero_is_never() -> None:
    with running(SERVE, "--log-interval", "0") as process:
        httpx.post(f"{process.url}/v1/completions", json=long_stream(50), timeout=60)
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    assert sum(" INFO    request request_id=" in line for line in process.log) == 1
    assert not any(" INFO    batch " in line for line in process.log)
