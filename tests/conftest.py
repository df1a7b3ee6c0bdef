"""Settings that hold for every test: no hub, few threads, quiet tokenizers, how many examples hypothesis makes up."""

import ctypes
import gc
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)  # no authorities: to load them takes each httpx client 40 ms
os.environ.pop("SSL_CERT_FILE", None)

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import fork_server

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: kernels run without a GPU then

# A test that takes its input from hypothesis names no settings of its own, so that `--hypothesis-profile` decides.
for _name, _num_examples in (("everyday", 25), ("ci", 100)):
    settings.register_profile(
        _name,
        max_examples=_num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
settings.load_profile("everyday")

_LONGEST = ("test_soak.py", "test_repository.py", "test_ray_serve.py", "test_smollm2.py")

gc.disable()  # until all tests are collected, which makes millions of objects and no garbage


def pytest_configure(config: pytest.Config) -> None:
    is_spreading = bool(getattr(config.option, "numprocesses", None))  # over workers, which then share a fork server
    if is_spreading and config.option.markexpr != "gpu" and fork_server.is_possible():  # those tests fork nothing
        fork_server.ensure_started()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay in one process, so the longest files come first: at the end no process has to wait long."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_collection_finish() -> None:
    gc.enable()
    _freeze()


@pytest.fixture
def stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps frozen what all tests have imported: a load test would unfreeze it, and the next one would collect it."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.hookimpl(trylast=True)  # after the fixtures of the file, whose engines would stay frozen otherwise
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        if not gc.get_freeze_count():  # a server that ended in this process has undone it
            _freeze()
        if sys.platform == "linux":  # threads that have ended leave what they freed with the C library
            ctypes.CDLL(None).malloc_trim(0)


def _freeze() -> None:
    """Excludes what is imported from garbage collections: then they are quick and frequent, and free engines early."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    fork_server.stop()
