"""Leaves out what a request contains and the model does not read, and tells its client.

The model reads text only. A client cannot take back what a tool returned, and would send it with every later request,
so a note stands in place of images and other attachments there. In what a user says they are refused.
"""

from collections.abc import Iterable, Sequence

from pydantic import ConfigDict

from chairlift.api.wire.body import Body

_MAX_TYPES_TOLD = 8
_KINDS = {  # by type, in the words of the three endpoints
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "input_audio": "audio",
}


class Attachment(Body):
    """Something other than text that a tool returned. The model reads a note that it was left out."""

    model_config = ConfigDict(extra="ignore")  # it may be large, and is not read

    type: str

    @property
    def kind(self) -> str:
        """Its name among people."""
        return _KINDS[self.type]

    @property
    def text(self) -> str:
        """The note that the model reads instead."""
        return f"[{self.kind} left out: this model reads text only]"


def is_attachment(type_given: object) -> bool:
    """Returns true for the type of an image, of a document or of another part that is no text."""
    return isinstance(type_given, str) and type_given in _KINDS


def attachments(*types: str) -> dict[str, type[Body]]:
    """The class for attachments of these types, for `by_type`."""
    return dict.fromkeys((each for each in _KINDS if each in types), Attachment)


def attachments_warning(parts: Iterable[object]) -> list[str]:
    """A sentence about the attachments among these parts of what tools returned; none if there are none."""
    kinds = sorted({part.kind for part in parts if isinstance(part, Attachment)})
    if not kinds:
        return []
    return [f"parts of tool results were left out ({', '.join(kinds)}), because this model reads text only"]


def tools_warning(types: Sequence[str], were_all: bool) -> list[str]:
    """A sentence about tools of unsupported types; none if there are none. `were_all`: there are no others."""
    if not types:
        return []
    told = f"tools of type {', '.join(sorted(set(types))[:_MAX_TYPES_TOLD])} are not supported here and were left out"
    return [f"{told}, so the model has no tools" if were_all else told]
