"""`/v1/files` and `/v1/batches`: files of requests, their replies, going on after a restart, limits and wrong input."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from pydantic import SecretStr

from chairlift.api import ServerConfig
from chairlift.api.batches import BatchDirectory, claim_directory, executing_batches
from chairlift.api.batches.shapes import FileObject
from chairlift.api.http.access import BATCH_HEADER, IDLE_PRIORITY, Client
from chairlift.api.http.connections import connections_of
from chairlift.api.openai.completions import CompletionRequest
from chairlift.api.server import make_runner
from chairlift.errors import ConfigurationError
from tests.api.conftest import Server, client_of, serving
from tests.engine.async_support import DEADLINE_S, wait_until

PATH = "/v1/completions"
OVER = ("completed", "failed", "cancelled", "expired")


def lines(*ids: str, url: str = PATH, **fields: Any) -> bytes:
    body = {"prompt": "Once", "max_tokens": 2, "temperature": 0, **fields}
    each = [{"custom_id": custom_id, "method": "POST", "url": url, "body": body} for custom_id in ids]
    return "".join(json.dumps(line) + "\n" for line in each).encode()


@asynccontextmanager
async def executing(server: Server) -> AsyncIterator[None]:
    runner = make_runner(server.api)
    await runner.setup()
    assert runner.server is not None
    make_protocol = connections_of(runner.server, ServerConfig())
    async with executing_batches(server.api.service.batches, server.api.keys, 4, make_protocol, 0.01):
        yield


@asynccontextmanager
async def batching(path: Path, **settings: Any) -> AsyncIterator[tuple[Server, AsyncOpenAI]]:
    async with serving(ServerConfig(batch_dir=path, **settings)) as server, client_of(server) as client:
        yield server, client


async def begin(client: AsyncOpenAI, content: bytes, **fields: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    settings = {"endpoint": PATH, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **settings)


async def end(client: AsyncOpenAI, batch_id: str) -> Batch:
    deadline = time.monotonic() + DEADLINE_S
    while (batch := await client.batches.retrieve(batch_id)).status not in OVER:
        assert time.monotonic() < deadline, f"the batch is {batch.status}"
    return batch


async def replies(client: AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    content = (await client.files.content(file_id)).text
    entries = [json.loads(line) for line in content.splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len(entries)
    return {entry["custom_id"]: entry for entry in entries}


async def test_each_line_of_a_file_gets_its_reply_and_bad_ones_their_error(tmp_path: Path) -> None:
    names = [str(number) for number in range(10)]
    async with batching(tmp_path) as (server, client), executing(server):
        batch = await begin(client, lines(*names) + lines("bad", max_tokens=-1), metadata={"of": "a test"})
        assert (batch.status, batch.metadata) == ("validating", {"of": "a test"})
        batch = await end(client, batch.id)
        counts = batch.request_counts
        assert counts is not None
        assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 11, 10, 1)
        good, bad = await replies(client, batch.output_file_id), await replies(client, batch.error_file_id)
        assert set(good) == set(names)
        alone = await client.completions.create(model="bundled", prompt="Once", max_tokens=2, temperature=0)
        assert {each["response"]["body"]["choices"][0]["text"] for each in good.values()} == {alone.choices[0].text}
        assert "max_tokens" in bad["bad"]["response"]["body"]["error"]["message"]
        listed = [file.purpose async for file in client.files.list(limit=2)]
        assert sorted(listed) == ["batch", "batch_output", "batch_output"]
        assert [each.id async for each in client.batches.list()] == [batch.id]
        await client.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)


@pytest.mark.slow
async def test_a_thousand_lines_get_a_reply_each(tmp_path: Path) -> None:
    names = [str(number) for number in range(1000)]
    async with batching(tmp_path) as (server, client), executing(server):
        batch = await end(client, (await begin(client, lines(*names))).id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert set(await replies(client, batch.output_file_id)) == set(names)
        assert server.is_idle


async def test_a_batch_goes_on_where_a_stopped_server_left_it(tmp_path: Path) -> None:
    names = [str(number) for number in range(40)]
    async with batching(tmp_path) as (server, client):
        batch = await begin(client, lines(*names, max_tokens=20, ignore_eos=True))
        output = next(tmp_path.iterdir()) / "files" / f"file-{batch.id.removeprefix('batch_')}-output.data"
        async with executing(server):
            await wait_until(lambda: output.exists() and output.stat().st_size > 0, "a first reply is written")
        num_before = output.read_bytes().count(b"\n")
        assert 0 < num_before < len(names)
        with output.open("ab") as file:
            file.write(b'{"id": "cut')  # a killed server leaves part of a line
    async with batching(tmp_path) as (server, client), executing(server):
        batch = await end(client, batch.id)
        assert batch.status == "completed"
        assert set(await replies(client, batch.output_file_id)) == set(names)
        assert server.llm.read_stats().totals.num_finished <= len(names) - num_before


async def test_a_cancelled_batch_keeps_what_is_done_and_a_late_one_says_what_is_not(tmp_path: Path) -> None:
    names = [str(number) for number in range(400)]
    async with batching(tmp_path) as (server, client):
        batch = await begin(client, lines(*names, max_tokens=20, ignore_eos=True))
        async with executing(server):
            while not (now := await client.batches.retrieve(batch.id)).request_counts.completed:  # type: ignore[union-attr]
                assert now.status in ("validating", "in_progress")
            asked = await client.batches.cancel(batch.id)
            assert asked.status == "cancelling"
            batch = await end(client, batch.id)
            await wait_until(lambda: server.is_idle, "no request of it goes on")
        assert (batch.status, batch.cancelling_at) == ("cancelled", asked.cancelling_at)
        assert 0 < len(await replies(client, batch.output_file_id)) < len(names)
        late = await begin(client, lines("a", "b"))
        directory = server.api.service.batches
        assert directory is not None
        directory.keep_batch("", directory.batch("", late.id).model_copy(update={"expires_at": 1}))
        async with executing(server):
            late = await end(client, late.id)
        assert late.status == "expired"
        errors = await replies(client, late.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"{\n", 1, "Invalid JSON"),
        (lines("a", "a"), 2, "another line has the custom_id 'a'"),
        (lines("a") + lines("b", url="/v1/chat/completions"), 2, f"the batch's endpoint is {PATH}"),
        (lines("a", stream=True), 1, "a reply in a file is whole"),
        (b"\n", None, "no requests"),
    ],
)
async def test_a_wrong_line_fails_the_batch_before_any_request(
    content: bytes, line: int | None, words: str, tmp_path: Path
) -> None:
    async with batching(tmp_path) as (server, client), executing(server):
        batch = await end(client, (await begin(client, content)).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].line == line
        assert words in (batch.errors.data[0].message or "")
        assert server.llm.read_stats().totals.num_finished == 0


async def test_wrong_requests_are_told_what_to_change(tmp_path: Path) -> None:
    async with batching(tmp_path, max_batch_bytes=4000) as (server, client), aiohttp.ClientSession() as http:
        with pytest.raises(openai.BadRequestError, match="purpose: only 'batch'"):
            await client.files.create(file=("a", b"x"), purpose="vision")
        with pytest.raises(openai.BadRequestError, match="input_file_id: there is no file 'file-1'"):
            await client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="completion_window"):
            await client.batches.create(input_file_id="file-1", endpoint=PATH, completion_window="soon")  # type: ignore[arg-type]
        with pytest.raises(openai.InternalServerError, match="larger --max-batch-bytes"):
            await client.files.create(file=("a", b"x" * 5000), purpose="batch")
        url = f"{server.url}/v1/files"
        for path, status in (("/..%2f..%2fserver.lock", 404), ("/file-0/content", 404), ("?limit=0", 400)):
            async with http.get(url + path) as reply:
                assert reply.status == status, path
        async with http.post(url, json={}) as reply:
            assert reply.status == 415
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        for cut in (
            b"",
            b"--b\r\n",
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        ):
            async with http.post(url, data=cut, headers=headers) as reply:
                assert reply.status == 400, cut
        async with http.post(url, data=b"", headers=headers | {"Origin": "https://elsewhere.example"}) as reply:
            assert reply.status == 403
        assert not list(tmp_path.rglob("*.upload"))
    async with serving(ServerConfig(max_batch_bytes=0)) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError, match="--max-batch-bytes 0"):
            await client.files.list()


async def test_replies_that_do_not_fit_end_the_batch(tmp_path: Path) -> None:
    async with batching(tmp_path, max_batch_bytes=20_000) as (server, client), executing(server):
        batch = await end(client, (await begin(client, lines(*map(str, range(100))))).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "no_room"
        assert await replies(client, batch.output_file_id)


async def test_keys_are_walls_and_batches_ask_as_their_key_at_idle_priority(tmp_path: Path) -> None:
    keys = [SecretStr("one"), SecretStr("two")]
    async with (
        serving(ServerConfig(batch_dir=tmp_path, api_key=keys)) as server,
        executing(server),
        client_of(server, "one") as one,
        client_of(server, "two") as two,
        client_of(server, "three") as three,
    ):
        batch = await end(one, (await begin(one, lines("a"))).id)
        assert batch.status == "completed"
        for ask in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            await two.files.content(batch.output_file_id or "")
        assert [each async for each in two.files.list()] == []
        with pytest.raises(openai.AuthenticationError):
            await three.models.list(extra_headers={BATCH_HEADER: "guessed x"})
    body = CompletionRequest(prompt="a", priority=-5)
    assert Client("one", is_idle=True).options_of(body).priority == IDLE_PRIORITY


def test_a_directory_has_one_server(tmp_path: Path) -> None:
    config = ServerConfig(batch_dir=tmp_path / "new")
    refused = pytest.raises(ConfigurationError, match="in use by another server")
    with claim_directory(config), refused, claim_directory(config):
        pass
    with claim_directory(config) as claimed, claim_directory(ServerConfig()) as temporary:
        assert claimed.batch_dir == tmp_path / "new"
        assert temporary.batch_dir is not None
        assert temporary.batch_dir.is_dir()
    assert not temporary.batch_dir.exists()


def test_files_end_after_their_time(tmp_path: Path) -> None:
    directory = BatchDirectory(tmp_path, 10**6)
    upload = directory.begin_upload("")
    upload.write_bytes(b"x")
    record = FileObject(id="file-a", bytes=1, created_at=0, expires_at=1, filename="f", purpose="batch")
    directory.add_file("", upload, record)
    assert directory.files("") == []
    directory.remove_expired()
    assert not list(tmp_path.rglob("file-a*"))
