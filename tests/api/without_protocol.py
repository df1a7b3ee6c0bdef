"""Takes a protocol out of a copy of the package and its tests. As a plugin of pytest, it leaves out its tests."""

import importlib
import inspect
import os
import re
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("openai", "responses", "anthropic", "rerank")
VARIABLE = "REMOVED_PROTOCOL"  # a regular expression of what a test speaks of that cannot go without it
_LIST = Path("chairlift/api/protocols.py")
_CLIENTS = {  # how a test names the protocol without a path: by the attribute of an official client, or by a header
    "openai": r"\bcompletions\b|\.embeddings\b",
    "responses": r"\.responses\.",
    "anthropic": r"anthropic|x-api-key",
    "rerank": "rerank",
}


def remove(folder: str, target: Path) -> Path:
    """Copies the package, its tests and what they read, without a protocol's folders and what imports it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for each in ("chairlift", "tests", "docs", "examples", "tools"):
        shutil.copytree(ROOT / each, target / each, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)
    for each in ("chairlift", "tests"):
        shutil.rmtree(target / each / "api" / folder)
    lines = (ROOT / _LIST).read_text(encoding="utf-8").splitlines(keepends=True)
    left = "".join(line for line in lines if not re.search(rf"\b{folder}|\b{folder.upper()}", line))
    (target / _LIST).write_text(left, encoding="utf-8")
    for path in (target / "tests").rglob("*.py"):
        if re.search(rf"^from chairlift\.api\.{folder}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            path.unlink()
    return target


def paths_of(folder: str) -> list[str]:
    """Returns the paths of a protocol's routes."""
    return sorted({route.path for route in importlib.import_module(f"chairlift.api.{folder}.routes").ROUTES})


def words_of(folder: str) -> str:
    """Returns the regular expression of what names a protocol: its paths and its client."""
    paths = [rf"{re.escape(path)}(?![\w/])" for path in paths_of(folder)]
    return "|".join([*paths, _CLIENTS[folder]])


def speaks(function: Any, words: re.Pattern[str], seen: set[str]) -> bool:
    """Tells whether the source of a function, or a function or constant of the tests that it names, has these words."""
    function = inspect.unwrap(function)
    source = inspect.getsource(function)
    if words.search(source):
        return True
    for name in set(re.findall(r"\w+", source)) - seen:
        seen.add(name)
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and (value.__module__ or "").startswith("tests."):
            if speaks(value, words, seen):
                return True
        elif isinstance(value, str | bytes | dict | list | tuple) and words.search(repr(value)):
            return True
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that speak the protocol that was removed."""
    words = re.compile(os.environ[VARIABLE])
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        assert isinstance(item, pytest.Function)
        is_named = words.search(item.nodeid) is not None
        (left_out if is_named or speaks(item.function, words, set()) else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
