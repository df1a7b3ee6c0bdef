"""Files of one JSON value per line, each checked by a pydantic model; a bad line is told by its number and text."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from chairlift.bench.failures import BenchError, one_line

Line = TypeVar("Line", bound=BaseModel)


def read_json_lines(path: Path, model: type[Line]) -> list[Line]:
    """Every line that is not blank. Raises `BenchError` if there is none, or one that does not fit the model."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise BenchError(f"cannot read {path}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"cannot read {path}: it must be text in UTF-8, one JSON value per line") from None
    # Not `splitlines`: a JSON string may hold such separators as U+2028.
    lines = [_parse(path, number, line, model) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise BenchError(f"{path} is empty: it must have one JSON value per line")
    return lines


def _parse(path: Path, number: int, line: str, model: type[Line]) -> Line:
    try:
        return model.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise BenchError(f"{path}, line {number}: {where}{first['msg']}: {one_line(line)}") from None
