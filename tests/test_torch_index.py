"""The index that `make serve` takes torch from: the one of builds for CPUs only where it answers and is wanted."""

import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "torch_index.py"))
VARIABLES: tuple[str, ...] = TOOL["VARIABLES"]


def options(index: str, *devices: Path, system: str = "linux") -> list[str]:
    found: list[str] = TOOL["options"](index, devices, system)
    return found


class _Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with an index at /cpu."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Index)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without settings of pip."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_an_index_that_answers_is_one_more_for_pip(url: str) -> None:
    assert options(f"{url}/cpu") == ["--extra-index-url", f"{url}/cpu"]


@pytest.mark.parametrize("index", ["{url}/elsewhere", "http://127.0.0.1:9/cpu"])
def test_an_index_that_does_not_answer_is_left_out(url: str, index: str) -> None:
    assert options(index.format(url=url)) == []


def test_a_gpu_gets_pips_default_build(url: str, tmp_path: Path) -> None:
    assert options(f"{url}/cpu", tmp_path / "absent", tmp_path) == []


@pytest.mark.parametrize("name", VARIABLES)
def test_indexes_that_pips_variables_name_stay_the_only_ones(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert options(f"{url}/cpu") == []


def test_other_systems_get_pips_default_build(url: str) -> None:
    assert options(f"{url}/cpu", system="darwin") == []
