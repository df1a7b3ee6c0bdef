"""`chairlift run-batch`: requests of a file, their replies, going on after an interruption, and wrong files."""

import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from chairlift.__main__ import main
from chairlift.api.batches.lines import BatchRequest, Reply, ReplyFile, check_requests, read_requests
from chairlift.api.batches.runner import make_requests
from chairlift.errors import ConfigurationError
from tests.api.conftest import serving_app
from tests.support.server_process import SERVE, start_python

Printed = pytest.CaptureFixture[str]
PATH = "/v1/completions"


def line(custom_id: str, **fields: Any) -> str:
    body = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": PATH, "body": body, **fields})


def write(directory: Path, *lines: str) -> Path:
    path = directory / "in.jsonl"
    path.write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
    return path


def replies_of(path: Path) -> dict[str, dict[str, Any]]:
    entries = [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]
    replies = {entry["custom_id"]: entry for entry in entries}
    assert len(replies) == len(entries)
    return replies


def test_each_request_of_a_file_is_answered_once_also_by_a_second_run(tmp_path: Path, capsys: Printed) -> None:
    chat = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 16, "temperature": 0}
    vectors = line("v", url="/v1/embeddings", body={"input": ["a snail", "a house"]})
    lines = [line("a", url="/v1/chat/completions", body=chat), vectors, *(line(str(number)) for number in range(7))]
    flags = ["-i", str(write(tmp_path, *lines)), "-o", str(tmp_path / "out.jsonl"), "--max-batch-size", "2"]
    assert main(["run-batch", *flags]) == 0
    replies = replies_of(tmp_path / "out.jsonl")
    assert set(replies) == {"a", "v", *map(str, range(7))}
    assert {each["response"]["status_code"] for each in replies.values()} == {200}
    assert replies["a"]["response"]["body"]["choices"][0]["message"]["content"] == "17 + 25 = 42."
    assert [each["index"] for each in replies["v"]["response"]["body"]["data"]] == [0, 1]
    assert all(each["error"] is None and each["id"].startswith("batch_req_") for each in replies.values())
    written = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(written[:-20])  # a process was killed while it wrote the last line
    assert main(["run-batch", *flags]) == 0
    assert "8 of 9 requests have a reply; 1 are left" in capsys.readouterr().err
    assert set(replies_of(tmp_path / "out.jsonl")) == set(replies)


def test_refused_requests_have_their_error_and_the_exit_code_says_so(tmp_path: Path, capsys: Printed) -> None:
    path = write(tmp_path, line("good"), line("bad", body={"prompt": "Once", "max_tokens": -1}))
    flags = ["-i", str(path), "-o", str(tmp_path / "out.jsonl")]
    for _ in range(2):
        assert main(["run-batch", *flags]) == 1
        assert f"1 of 2 requests failed; see {tmp_path / 'out.jsonl'}" in capsys.readouterr().err
    refused = replies_of(tmp_path / "out.jsonl")["bad"]["response"]
    assert refused["status_code"] == 400
    assert "max_tokens" in refused["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1: Invalid JSON"),
        ([line("a"), "[]"], "line 2: Input should be an object"),
        ([line("a", method="GET")], "line 1: method: String should match pattern '^POST$'"),
        ([line("a", url="v1")], "line 1: url: String should match pattern"),
        ([line("a"), line("a")], "line 2: another line has the custom_id 'a'"),
        (['{"custom_id": "a", "url": "/v1", "method": "POST"}'], "line 1: body: Field required"),
        ([line("a", body={"stream": True})], "line 1: a reply in a file is whole; leave stream out"),
    ],
)
def test_a_wrong_line_is_named_before_a_model_loads(
    lines: list[str], words: str, tmp_path: Path, capsys: Printed
) -> None:
    output = tmp_path / "out.jsonl"
    flags = ["-i", str(write(tmp_path, *lines)), "-o", str(output), "--model", "/nowhere"]
    assert main(["run-batch", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not output.exists()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--input-file .*none cannot be read: No such file"):
        check_requests(tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"--output-file .* cannot be written to: Is a directory"):
        ReplyFile(tmp_path)
    (tmp_path / "text").write_text("a diary\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="line 1, is not a batch's reply; name another file"):
        ReplyFile(tmp_path / "text")
    assert (tmp_path / "text").read_text(encoding="utf-8") == "a diary\n"


def test_engine_settings_beside_a_server_are_refused(tmp_path: Path, capsys: Printed) -> None:
    flags = ["-i", str(write(tmp_path, line("a"))), "-o", str(tmp_path / "out"), "--url", "http://127.0.0.1:1"]
    assert main(["run-batch", *flags, "--dtype", "float32"]) == 2
    assert "--dtype is a setting of the server; leave it out, or leave --url out" in capsys.readouterr().err


@asynccontextmanager
async def server_that(handle: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(PATH, handle)
    async with serving_app(app) as url:
        yield url


async def ask(url: str, lines: Path, concurrency: int = 1) -> dict[str, Reply]:
    replies: dict[str, Reply] = {}

    def note(request: BatchRequest, reply: Reply) -> None:
        replies[request.custom_id] = reply

    async with aiohttp.ClientSession() as session:
        await make_requests(read_requests(lines), session, url, concurrency, note, first_wait_s=0.001)
    return replies


async def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    statuses = iter([503, 429, 200, *[503] * 5])

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"asked": await request.json()}, status=next(statuses))

    async with server_that(handle) as url:
        replies = await ask(url, write(tmp_path, line("first"), line("second")))
    assert replies["first"].is_good
    assert replies["first"].body["asked"]["prompt"] == "Once"
    assert (replies["second"].status, replies["second"].is_good) == (503, False)


async def test_a_server_that_is_gone_or_says_no_json_is_a_failure(tmp_path: Path) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(text="<html>proxy</html>")

    path = write(tmp_path, line("a"))
    async with server_that(handle) as url:
        assert (await ask(url, path))["a"].failure == "status 200, and no JSON: <html>proxy</html>"
    gone = (await ask(url, path))["a"]
    assert gone.failure is not None
    with ReplyFile(tmp_path / "out") as replies:
        replies.add("a", gone)
    with ReplyFile(tmp_path / "out") as replies:
        assert replies.answered == {}  # so it is made again
    assert replies_of(tmp_path / "out")["a"]["error"]["code"] == "no_reply"


async def test_no_more_requests_are_in_flight_than_asked_for(tmp_path: Path) -> None:
    running, most = 0, 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await request.read()
        running -= 1
        return web.json_response({})

    async with server_that(handle) as url:
        replies = await ask(url, write(tmp_path, *(line(str(number)) for number in range(50))), concurrency=4)
    assert len(replies) == 50
    assert most <= 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_batch_keeps_its_replies_and_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    long = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
    lines = write(tmp_path, *(line(str(each), body=long) for each in range(400)))
    output, said = tmp_path / "out.jsonl", tmp_path / "stderr"
    flags = ["run-batch", "-i", str(lines), "-o", str(output), "--max-batch-size", "2", "--num-threads", "1"]
    with said.open("wb") as stderr:
        process = start_python(SERVE, flags, os.environ, stderr.fileno())
        try:
            deadline = time.monotonic() + 120
            while not (output.exists() and output.read_bytes().count(b"\n")) and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert "are done; the same command makes the others" in said.read_text(encoding="utf-8")
    assert 1 <= len(replies_of(output)) < 400


def test_half_a_character_in_a_reply_is_kept_as_it_came(tmp_path: Path) -> None:
    with ReplyFile(tmp_path / "out") as replies:
        replies.add("a", Reply(200, {"text": "\ud83d"}))
    assert replies_of(tmp_path / "out")["a"]["response"]["body"] == {"text": "\ud83d"}
