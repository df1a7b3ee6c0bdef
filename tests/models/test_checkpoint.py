"""Finding a checkpoint: a directory, a hub id (here in the local cache, as tests are offline), or the bundled one."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from chairlift.errors import CheckpointError
from chairlift.models.checkpoint import find_model, open_checkpoint
from tests.support.checkpoints import make_checkpoint

COMMIT = "0" * 40


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--somebody--tiny"
    snapshot = repository / "snapshots" / COMMIT
    make_checkpoint(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    checkpoint = open_checkpoint("somebody/tiny")
    assert checkpoint.path == snapshot
    assert checkpoint.config.num_layers == 3


def test_a_hub_id_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="'somebody/nothing' is not a directory, and fetching it") as caught:
        find_model("somebody/nothing")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["nowhere", "./nowhere", "/no/where", "a/b/c", "~/nowhere", ""])
def test_what_is_neither_directory_nor_hub_id_is_said(model: str) -> None:
    with pytest.raises(CheckpointError, match="is neither a directory nor a hub id"):
        find_model(model)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointError, match="is neither a directory"):
        find_model(str(path))


def test_the_bundled_model_is_a_llama_of_at_most_8_mb() -> None:
    checkpoint = open_checkpoint("bundled")
    assert checkpoint.config.dtype == "bfloat16"
    assert sum(path.stat().st_size for path in checkpoint.weight_files) <= 8_000_000


def test_the_directory_of_the_bundled_model_loads_like_any_other(tmp_path: Path) -> None:
    copied = shutil.copytree(find_model("bundled"), tmp_path / "copy")
    assert open_checkpoint(str(copied)).config == open_checkpoint("bundled").config


def write_index(directory: Path, file_name: object) -> None:
    index = {"weight_map": {"lm_head.weight": file_name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/other/model.safetensors",
        "folder/model.safetensors",
        "folder/../../model.safetensors",
        "..",
        ".",
        "",
        ".safetensors",
        "..\\model.safetensors",
        "model.safetensors\x00",
        "config.json",
        "model.bin",
        3,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_names_nothing_but_weights_beside_it(tmp_path: Path, name: object) -> None:
    directory = shutil.copytree(find_model("bundled"), tmp_path / "model")
    other = shutil.copytree(directory, tmp_path / "other")
    shutil.copy(other / "model.safetensors", tmp_path)
    write_index(directory, name)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        _ = open_checkpoint(str(directory)).weight_files


def test_weights_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = shutil.copytree(find_model("bundled"), tmp_path / "snapshots" / COMMIT)
    (tmp_path / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(tmp_path / "blobs" / "0123")
    (snapshot / "model-00001-of-00001.safetensors").symlink_to(Path("../../blobs/0123"))
    write_index(snapshot, "model-00001-of-00001.safetensors")
    (path,) = open_checkpoint(str(snapshot)).weight_files
    assert path.resolve() == tmp_path / "blobs" / "0123"
