"""The server behind nginx under a prefix, with the lines that docs/deploy.md gives."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import pytest

from tests.api.conftest import serving

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "deploy.md"
SETTINGS = """{user}
pid {room}/pid;
error_log {room}/errors;
events {{}}
http {{
    access_log off;
    client_body_temp_path {room}/bodies;
    proxy_temp_path {room}/replies;
    fastcgi_temp_path {room}/fastcgi;
    uwsgi_temp_path {room}/uwsgi;
    scgi_temp_path {room}/scgi;
    server {{
        listen unix:{room}/socket;
        server_name localhost;
{location}
    }}
}}
"""


@contextmanager
def proxying(url: str) -> Iterator[str]:
    """Runs nginx in front of a server; yields the socket that it listens on. It is over at the end."""
    assert NGINX is not None
    (location,) = re.findall(r"```nginx\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert "http://127.0.0.1:8000/;" in location
    user = "user root;" if os.geteuid() == 0 else ""  # its processes share the folder with the one that starts them
    with TemporaryDirectory() as room:  # with a short name, as that of a socket must be
        text = SETTINGS.format(user=user, room=room, location=location.replace("http://127.0.0.1:8000", url))
        (Path(room) / "nginx.conf").write_text(text, encoding="utf-8")
        command = [NGINX, "-e", f"{room}/errors", "-c", f"{room}/nginx.conf"]
        subprocess.run(command, check=True)  # it listens when this returns
        try:
            yield f"{room}/socket"
        finally:
            subprocess.run([*command, "-s", "stop"], check=True)


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
async def test_nginx_serves_the_page_and_streams_under_a_prefix() -> None:
    chat = {"model": "bundled", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    async with serving() as server:
        with proxying(server.url) as socket:
            connector = aiohttp.UnixConnector(socket)
            async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
                async with http.get("/llm/") as reply:
                    assert (reply.status, reply.content_type) == (200, "text/html")
                async with http.get("/llm/v1/models") as reply:
                    assert (await reply.json())["data"][0]["id"] == "bundled"
                async with http.post("/llm/v1/chat/completions", json={**chat, "stream": True}) as reply:
                    assert (reply.status, reply.content_type) == (200, "text/event-stream")
                    events = [line async for line in reply.content if line.startswith(b"data: ")]
                assert (len(events) > 3, events[-1]) == (True, b"data: [DONE]\n")
                async with http.post("/llm/v1/chat/completions", json=chat) as reply:
                    assert (await reply.json())["choices"][0]["message"]["content"] == "17 + 25 = 42."
                async with http.get("/v1/models") as reply:
                    assert reply.status == 404
