"""Spells the tensors of a checkpoint as its family does, where that differs from Llama's way."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from chairlift.models.blocks.block import Weight

_BODY, _HEAD = "model.", "lm_head"
_BODIES = (  # and the head's name beside each
    (_BODY, _HEAD),
    ("model.language_model.", _HEAD),
    ("language_model.model.", f"language_model.{_HEAD}"),
    ("", _HEAD),
)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Names the tensors in which a family's checkpoints stack the matrices of a layer's experts.

    `[experts, 2 inner, hidden]` holds an expert's gate and then its up, and `[experts, hidden, inner]` its down.
    """

    within: str  # stands before both, and where each expert has tensors of its own before the expert's number
    gate_up: str
    down: str


@dataclass(frozen=True, slots=True)
class AlternatingExperts:
    """Names the place of stacked experts whose gate and up alternate, output by output, as gpt-oss has them.

    `gate_up_proj` is `[experts, hidden, 2 inner]` and `down_proj` `[experts, inner, hidden]`, or each is in MXFP4 with
    outputs first. Their biases stand beside them.
    """

    within: str  # as above


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names in a family's checkpoints."""

    spellings: tuple[tuple[str, str], ...] = ()  # beginnings of names within a layer or the body: ours, theirs
    endings: tuple[tuple[str, str], ...] = ()  # of names, likewise
    stacked: StackedExperts | AlternatingExperts | None = None  # None: each expert has tensors of its own
    body: str = _BODY  # stands before the names of the embedding, the layers and the last norm
    head: str = _HEAD
    rotates_neighbours: bool = False  # rows of queries and keys that rotate together are not half a head apart
    skipped: tuple[str, ...] = ()  # beginnings of tensors that the text model does without
    skipped_in_body: tuple[str, ...] = ()  # the same within the body

    @property
    def embedding(self) -> str:
        """Names the tensor of the embedding."""
        return f"{self.body}{self._spell('embed_tokens')}.weight"

    @property
    def head_weight(self) -> str:
        """Names the tensor of the head."""
        return f"{self.head}.weight"

    def of_body(self, weight: Weight, prefix: str = "") -> Weight:
        """Respells a weight whose names are within the body, behind `prefix`."""
        parts = (replace(part, name=f"{self.body}{prefix}{self._spell(part.name)}") for part in weight.parts)
        return replace(weight, parts=tuple(parts))

    def of_head(self, weight: Weight) -> Weight:
        """Respells the head."""
        return replace(weight, parts=tuple(replace(part, name=self.head) for part in weight.parts))

    def found_in(self, names: Iterable[str]) -> "TensorNames":
        """The same with the body's name in a checkpoint, which may hold a text model as a part of another."""
        given = set(names)
        spelled = (replace(self, body=body, head=head) for body, head in ((self.body, self.head), *_BODIES))
        return next((each for each in spelled if each.embedding in given), self)

    def is_skipped(self, name: str) -> bool:
        """True for a tensor that the text model does without."""
        is_within = name.startswith(self.body) and name.removeprefix(self.body).startswith(self.skipped_in_body)
        return is_within or name.startswith(self.skipped)

    def _spell(self, name: str) -> str:
        begin = next((pair for pair in self.spellings if name.startswith(pair[0])), ("", ""))
        name = begin[1] + name.removeprefix(begin[0])
        end = next((pair for pair in self.endings if name.endswith(pair[0])), ("", ""))
        return name.removesuffix(end[0]) + end[1]


AS_LLAMA = TensorNames()
"""The names of most families."""
