"""Makes vectors of what a model computes of texts, as the checkpoint's own files specify it.

These are the files of sentence-transformers: modules.json says which hidden states become the vector,
sentence_bert_config.json how long a text may be, and config_sentence_transformers.json which prompts precede texts. A
GGUF file has the first in its metadata. Without them a vector is the last hidden state of the last token. Vectors have
length one unless a caller wants otherwise.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from chairlift.engine.text.defaults import read_json
from chairlift.errors import CheckpointError, InvalidRequest, named, shown
from chairlift.models.gguf import is_gguf, open_gguf
from chairlift.prompt_work import PooledStates, Pooling, PoolTask, PromptResult

if TYPE_CHECKING:
    from chairlift.engine.text.deltas import RequestDelta

Vector = npt.NDArray[np.float32]

_READ_MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")
_POOLINGS = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
_POOLINGS_OF_GGUF = {0: Pooling.LAST, 1: Pooling.MEAN, 3: Pooling.LAST, 4: Pooling.LAST}  # 4: it scores pairs
_OLD_FLAG = re.compile(r"pooling_mode_(\w+)")
_FOLDER = re.compile(r"\w[\w.-]*")
_MODULES = TypeAdapter(list[dict[str, Any]])


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Says how texts become vectors."""

    pooling: Pooling = Pooling.LAST
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that precede others, by name
    default_prompt: str | None = None  # the name of the one for texts without
    max_seq_length: int | None = None  # tokens of a text with its prompt; None: as many as the model takes

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a checkpoint's files. CheckpointError if they ask for what is not supported."""
        if is_gguf(path):
            return cls(_pooling_of_gguf(path))
        modules = dict(read_modules(path))
        pooling = _read_pooling(modules["Pooling"]) if "Pooling" in modules else Pooling.LAST
        longest = _read_max_seq_length(modules["Transformer"]) if "Transformer" in modules else None
        given = read_json(path / "config_sentence_transformers.json")
        prompts, default = given.get("prompts") or {}, given.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise CheckpointError(f"{path}: prompts of config_sentence_transformers.json are no texts")
        if default is not None and default not in prompts:
            raise CheckpointError(f"{path}: default_prompt_name {shown(default)} names none of the prompts")
        return cls(pooling, prompts, default, longest)

    @property
    def task(self) -> PoolTask:
        """The work on a text."""
        return PoolTask(self.pooling)

    def with_prompt(self, text: str, prompt_name: str | None = None) -> str:
        """Puts the prompt of that name before a text; None: the checkpoint's default, if it has one.

        InvalidRequest if there is no such prompt.
        """
        name = self.default_prompt if prompt_name is None else prompt_name
        if name is None:
            return text
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InvalidRequest(f"prompt_name: the checkpoint has no prompt {name!r}, only {known}", "prompt_name")
        return self.prompts[name] + text

    def with_first_of(self, text: str, *names: str) -> str:
        """Puts the first of these prompts that the checkpoint has before a text."""
        return self.with_prompt(text, next((name for name in names if name in self.prompts), None))


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text, and what was computed for it."""

    embedding: list[float]
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were reused from another request

    @classmethod
    def of(cls, delta: "RequestDelta", dimensions: int | None, *, is_normalized: bool) -> Self:
        """Makes the vector of what was computed; see `vector_of`."""
        vector = vector_of(delta.prompt_result, dimensions, is_normalized=is_normalized)
        return cls(vector.tolist(), delta.prompt_token_ids, delta.num_cached_tokens)


def vector_of(result: PromptResult | None, dimensions: int | None = None, *, is_normalized: bool = True) -> Vector:
    """Makes the vector of a whole prompt, float32 `[dimensions]`, by default of length one.

    `dimensions`: only the first ones, as models allow that were trained so (Kusupati et al., "Matryoshka Representation
    Learning", 2022). InvalidRequest if there are not so many.
    """
    assert isinstance(result, PooledStates), "that is what a PoolTask ends with"
    sums = np.frombuffer(result.sums, np.float32 if result.sums.typecode == "f" else np.int64).astype(np.float64)
    if dimensions is not None and not 1 <= dimensions <= len(sums):
        raise InvalidRequest(f"dimensions: {dimensions} is not between 1 and the vector's {len(sums)}", "dimensions")
    mean = sums[:dimensions] * (result.unit / result.num_tokens)
    length = np.sqrt(np.square(mean).sum()) if is_normalized else 1.0
    return (mean / (length or 1.0)).astype(np.float32)


def read_modules(path: Path) -> Iterator[tuple[str, Path]]:
    """Yields the kind of each module in modules.json, and its folder; none if there is no such file.

    CheckpointError for a module that is not supported.
    """
    file = path / "modules.json"
    if not file.is_file():
        return
    try:
        modules = _MODULES.validate_json(file.read_bytes())
    except ValidationError as error:
        raise CheckpointError(f"{file} is no list of modules: {error.errors()[0]['msg']}") from error
    for module in modules:
        kind, folder = str(module.get("type")).rpartition(".")[2], module.get("path")
        if kind not in _READ_MODULES:
            raise CheckpointError(f"{file}: modules of type {named(kind)} are not supported, only {_listed()}")
        if folder != "" and not (isinstance(folder, str) and _FOLDER.fullmatch(folder)):
            raise CheckpointError(f"{file}: {shown(folder)} is no folder beside it")
        yield kind, path / str(folder)


def _listed() -> str:
    return ", ".join(_READ_MODULES)


def _read_pooling(folder: Path) -> Pooling:
    """Reads a pooling module's config, of which older ones have a flag for each mode. CheckpointError for others."""
    given = read_json(folder / "config.json")
    flags = {match[1]: value for name, value in given.items() if (match := _OLD_FLAG.fullmatch(name))}
    modes = [name.removesuffix("_tokens") for name, is_set in flags.items() if is_set is True]
    mode = given.get("pooling_mode") or modes
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    if not isinstance(mode, str) or mode not in _POOLINGS:
        raise CheckpointError(f"{folder}: pooling {shown(mode)} is not supported, only {', '.join(_POOLINGS)}")
    if given.get("include_prompt", True) is not True and _POOLINGS[mode] is Pooling.MEAN:
        raise CheckpointError(f"{folder}: a mean without the prompt (include_prompt) is not supported")
    return _POOLINGS[mode]


def _read_max_seq_length(folder: Path) -> int | None:
    """Reads the limit of a transformer module's config. CheckpointError if the config wants letters made small."""
    file = folder / "sentence_bert_config.json"
    given = read_json(file)
    if given.get("do_lower_case"):
        raise CheckpointError(f"{file}: do_lower_case is not supported")
    longest = given.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise CheckpointError(f"{file}: max_seq_length {shown(longest)} is no number of tokens")
    return longest


def _pooling_of_gguf(path: Path) -> Pooling:
    metadata = open_gguf(path).metadata
    given = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if given not in _POOLINGS_OF_GGUF:
        raise CheckpointError(f"{path}: pooling_type {shown(given)} is not supported, only {sorted(_POOLINGS_OF_GGUF)}")
    return _POOLINGS_OF_GGUF[given]
