"""Reads how a checkpoint's answers are sampled, as its own files specify it."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from chairlift.errors import CheckpointError
from chairlift.models.gguf import is_gguf, open_gguf
from chairlift.models.gguf.families import sampling_of
from chairlift.models.smollm2 import SMOLLM2, SMOLLM2_SAMPLING
from chairlift.models.special_floats import restore_floats
from chairlift.params import SamplingParams

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class CheckpointDefaults(BaseModel):
    """Says how a checkpoint's answers are sampled, as far as the checkpoint specifies it."""

    model_config = ConfigDict(strict=True)

    max_new_tokens: PositiveInt | None = None  # for requests without a limit
    params: SamplingParams = SamplingParams()

    @classmethod
    def read(cls, model: str, path: Path) -> Self:
        """Reads generation_config.json, or a GGUF file's equivalent. CheckpointError if a value is wrong."""
        if is_gguf(path):
            given = SMOLLM2_SAMPLING if model == SMOLLM2 else sampling_of(open_gguf(path))
        else:
            given = read_json(path / "generation_config.json")
        fields = {name: given[name] for name in _SAMPLING_FIELDS if given.get(name) is not None}
        if given.get("do_sample") is False:  # an explicit false means greedy
            fields["temperature"] = 0.0
        try:
            params = SamplingParams(**fields)
            return cls(max_new_tokens=given.get("max_new_tokens"), params=params)
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{path / 'generation_config.json'}: {first['loc'][0]}"
            raise CheckpointError(f"{where}: {first['msg']}, not {first['input']!r}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    try:
        read = TypeAdapter(dict[str, Any]).validate_json(path.read_bytes()) if path.is_file() else {}
    except ValidationError as error:
        raise CheckpointError(f"{path} holds no JSON object: {error.errors()[0]['msg']}") from error
    return {name: restore_floats(value) for name, value in read.items()}
