"""Reads the file that `--config` names: settings by the names of their flags, in TOML or YAML."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.errors import ConfigurationError

_YAML = (".yaml", ".yml")
_FORMS = (".toml", *_YAML)


def read_settings_file(path: Path) -> dict[str, Any]:
    """Returns the file's settings, each by its name with underscores. `ConfigurationError` if it cannot be read so.

    `max_batch_size` and `max-batch-size` are the same setting, which may stand there once.
    """
    if path.suffix.lower() not in _FORMS:
        raise ConfigurationError(f"--config {path} must be a TOML or YAML file: its name ends in {', '.join(_FORMS)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    found = _parse_yaml(path, text) if path.suffix.lower() in _YAML else _parse_toml(path, text)
    settings: dict[str, Any] = {}
    for written, value in found.items():
        name = str(written).replace("-", "_")
        if name in settings:
            raise ConfigurationError(f"{path}: {name} is given twice; leave one of them out")
        if isinstance(value, Mapping):
            raise ConfigurationError(f"{path}: {written} is a table; settings stand at the top, such as port = 8000")
        settings[name] = value
    return settings


def _parse_toml(path: Path, text: str) -> Mapping[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error


def _parse_yaml(path: Path, text: str) -> Mapping[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{path} must hold settings by name, such as 'port: 8000'")
    return found
