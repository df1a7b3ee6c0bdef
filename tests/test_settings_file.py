"""Settings in a file that `--config` names, and other programs' names of flags."""

from pathlib import Path

import pytest

from chairlift.__main__ import COMMANDS, main
from chairlift.api import ServerConfig
from chairlift.config import EngineConfig
from chairlift.errors import ConfigurationError
from chairlift.flags import read_settings

TOML = 'model = "smollm2"\nport = 9001\nmax-batch-size = 4\nqueue_timeout = 2.5\nserved_model_name = ["a", "b"]\n'
YAML = "model: smollm2\nport: 9001\nmax-batch-size: 4\nqueue_timeout: 2.5\nserved_model_name: [a, b]\n"


def serve_settings(*flags: str) -> tuple[EngineConfig, ServerConfig]:
    engine, server = read_settings(COMMANDS["serve"], flags)
    return engine, server


def write(directory: Path, text: str, suffix: str = ".toml") -> str:
    path = directory / f"settings{suffix}"
    path.write_text(text, encoding="utf-8")
    return str(path)


def complaint(*flags: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        serve_settings(*flags)
    return str(caught.value)


@pytest.mark.parametrize(("text", "suffix"), [(TOML, ".toml"), (YAML, ".yaml"), (YAML, ".yml")])
def test_a_file_has_settings_by_the_names_of_flags(text: str, suffix: str, tmp_path: Path) -> None:
    engine, server = serve_settings("--config", write(tmp_path, text, suffix))
    assert (engine.model, engine.max_batch_size, engine.queue_timeout) == ("smollm2", 4, 2.5)
    assert (server.port, server.served_model_name) == (9001, ["a", "b"])


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "port = 1\nmax_batch_size = 1\nmax_queue_size = 1\n")
    monkeypatch.setenv("CHAIRLIFT_SERVE__MAX_BATCH_SIZE", "2")
    monkeypatch.setenv("CHAIRLIFT_SERVE__PORT", "2")
    monkeypatch.setenv("CHAIRLIFT_SERVE__CONFIG", path)
    engine, server = serve_settings("--port", "3")
    assert (server.port, engine.max_batch_size, engine.max_queue_size) == (3, 2, 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prot = 1", "{path}: unknown setting prot; did you mean port?"),
        ("port = 70000", "{path}: port must be at most 65535, not '70000'"),
        ("port = true\nlog_format = 'xml'", "{path}: log_format must be text or json, not 'xml'"),
        ("port = 1\nport = 2", "{path} is not valid TOML: "),
        ("max_batch_size = 1\nmax-batch-size = 2", "{path}: max_batch_size is given twice; leave one of them out"),
        ("max_batch_size = 1\nmax_num_seqs = 2", "{path}: max_num_seqs and max_batch_size are the same"),
        ("[server]\nport = 1", "{path}: server is a table; settings stand at the top, such as port = 8000"),
        ("config = 'other.toml'", "{path}: unknown setting config"),
    ],
)
def test_a_mistake_names_the_file(text: str, line: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    assert line.format(path=path) in complaint("--config", path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: b: c", "is not valid YAML: mapping values are not allowed here"),
        ("- 1", "must hold settings by name, such as 'port: 8000'"),
        ("port: {a: 1}", "port is a table"),
    ],
)
def test_a_mistake_in_yaml_names_the_file(text: str, line: str, tmp_path: Path) -> None:
    path = write(tmp_path, text, ".yaml")
    assert f"{path}" in complaint("--config", path)
    assert line in complaint("--config", path)


def test_an_empty_file_has_no_settings(tmp_path: Path) -> None:
    assert serve_settings("--config", write(tmp_path, "", ".yaml")) == serve_settings()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.toml"
    assert main(["serve", "--config", str(missing)]) == 2
    line = f"chairlift: error: --config {missing} cannot be read: No such file or directory\n"
    assert capsys.readouterr().err == line
    assert "its name ends in .toml, .yaml, .yml" in complaint("--config", str(tmp_path / "settings.ini"))


def test_other_programs_names_are_taken_with_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "max-num-seqs = 3")
    flags = ["--max-model-len", "512", "--gpu-memory-utilization=0.5", "--enable-auto-tool-choice", "--config", path]
    engine, _ = serve_settings(*flags)
    assert (engine.max_seq_len, engine.memory_fraction, engine.max_batch_size) == (512, 0.5, 3)
    assert caplog.messages == [
        "--max-model-len is another program's name for --max-seq-len",
        "--gpu-memory-utilization is another program's name for --memory-fraction",
        "--enable-auto-tool-choice is not needed: tool calls are always read",
        f"{path}: max_num_seqs is another program's name for max_batch_size",
    ]
    assert "--max-seq-len is given twice" in complaint("--max-model-len", "1", "--max-seq-len", "2")
