"""Models of the hub, as its cache on this machine has them: checkpoints, and GGUF files by their names and types."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from chairlift.models import open_checkpoint
from chairlift.models.checkpoint import find_model
from chairlift.models.hub import parse_hub_model
from tests.models.support import refusal
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import Kind, write_model

SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 96}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_model(make_checkpoint(directory, seed=1, **SHAPE), directory / "model.gguf", Kind.Q4_0)


@pytest.fixture
def snapshot(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache where a repository's files are: one model in several types, one of them in parts."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / f"models--owner--{tmp_path.name}"
    snapshot = repository / "snapshots" / "0123abc"
    (snapshot / "BF16").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    parts = ("BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf")
    for name in ("m-Q4_0.gguf", "m-q8_0.gguf", "m-IQ4_0.gguf", "more-Q6_K.gguf", "m-Q6_K.gguf", *parts):
        shutil.copy(file, snapshot / name)
    return snapshot


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (":Q4_0", "m-Q4_0.gguf"),
        (":Q8_0", "m-q8_0.gguf"),
        (":bf16", "BF16/m-BF16-00001-of-00002.gguf"),
        ("/m-Q6_K.gguf", "m-Q6_K.gguf"),
        ("/BF16/m-BF16-00002-of-00002.gguf", "BF16/m-BF16-00001-of-00002.gguf"),
    ],
)
def test_a_file_of_a_repository_is_named_by_its_path_or_type(
    snapshot: Path, tmp_path: Path, name: str, found: str
) -> None:
    assert find_model(f"owner/{tmp_path.name}{name}") == snapshot / found


def test_a_file_of_a_repository_is_opened_as_any_other(snapshot: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(f"owner/{tmp_path.name}:Q4_0")
    assert (checkpoint.path.parent, checkpoint.config.num_layers) == (snapshot, 1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "has no config.json; name a GGUF file as {id}/FILE.gguf or by its type as {id}:Q4_K_M"),
        (":Q6_K", "{id} has 2 GGUF files (m-Q6_K.gguf, more-Q6_K.gguf...); name the one to use"),
        (":Q2_K", "the hub's repository {id} has no such GGUF file"),
        ("/none.gguf", "the hub's repository {id} has no such GGUF file"),
    ],
)
def test_what_names_no_file_or_several_is_refused(snapshot: Path, tmp_path: Path, name: str, words: str) -> None:
    assert snapshot.is_dir()
    hub_id = f"owner/{tmp_path.name}"
    assert words.format(id=hub_id) in refusal(f"{hub_id}{name}", open_checkpoint)


@pytest.mark.parametrize("text", ["name", "owner/model.gguf", "owner/name/folder", "owner/name:", "a:b/name", ""])
def test_other_names_are_not_of_the_hub(text: str) -> None:
    assert parse_hub_model(text) is None


def test_a_repository_that_is_not_in_the_cache_is_an_error_of_one_line() -> None:
    assert "fetching it from the hub failed" in refusal("owner/that-nobody-has:Q4_0", open_checkpoint)
