"""`chairlift models`: what it finds on a machine, and what it says of each."""

import json
from pathlib import Path

import pytest

from chairlift.__main__ import main
from chairlift.local_models import LocalModel, find_models
from chairlift.models.checkpoint import find_model
from chairlift.models.smollm2 import SMOLLM2

NUM_BYTES = (find_model("bundled") / "model.safetensors").stat().st_size


def link_bundled(directory: Path) -> None:
    directory.mkdir(parents=True)
    for path in find_model("bundled").iterdir():
        (directory / path.name).symlink_to(path)


def found(folder: Path, cache: Path) -> dict[str, LocalModel]:
    return {model.name: model for model in find_models(folder, cache)}


def test_packages_caches_and_folders_are_looked_into(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--one"
    link_bundled(repository / "snapshots" / "old")
    (repository / "snapshots" / "new").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("old")
    link_bundled(tmp_path / "here" / "in" / "it")
    models = found(tmp_path / "here", tmp_path / "hub")
    names = ["bundled", SMOLLM2, "some/one", str(tmp_path / "here" / "in" / "it")]
    assert list(models) == names
    assert {model.served for model in models.values()} == {"yes"}
    assert models["some/one"].num_bytes == NUM_BYTES


def test_what_cannot_be_served_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    snapshot = tmp_path / "hub" / "models--half--loaded" / "snapshots" / "a"
    snapshot.mkdir(parents=True)
    config = json.loads((find_model("bundled") / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config))
    models = found(tmp_path, tmp_path / "hub")
    assert models["half/loaded"].served == f"no: {snapshot} lacks model.safetensors (weights must be safetensors)"
    assert models[str(tmp_path / "broken.gguf")].served.startswith("no: ")


def test_a_table_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nothing"))
    assert main(["models", str(tmp_path)]) == 0
    heading, bundled, _ = capsys.readouterr().out.splitlines()
    assert (heading.split(), bundled.split()) == (["MODEL", "SIZE", "SERVED"], ["bundled", "5.39", "MiB", "yes"])
    assert main(["models", str(tmp_path / "nowhere")]) == 2
