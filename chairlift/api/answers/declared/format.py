"""A format of answers that a response template declares."""

import logging
from collections.abc import Iterable

from chairlift.api.answers.declared.anchors import Anchors, Searches
from chairlift.api.answers.declared.reader import AnswerRun
from chairlift.api.answers.declared.regions import FoundMark, Opening, Region, Regions, pattern_of
from chairlift.api.answers.declared.template import ContentParser, Purpose, ResponseTemplate
from chairlift.api.answers.formats import Schemas
from chairlift.api.answers.text import CallPiece, PieceBuffer, Reading, Sighting, Text

logger = logging.getLogger(__name__)

_MIN_MARK = 4  # characters; shorter ones stand in ordinary text
_UNTYPED = (ContentParser.XML_INLINE, ContentParser.KV_LINES)  # the types of arguments are in the tools' schemas


class Declared:
    """Describes how answers are written, as a response template declares it. Does not change; readers share it."""

    def __init__(self, template: ResponseTemplate) -> None:
        """ValueError, of one line, if a pattern or parser of the template cannot be used."""
        self.template = template
        self._regions = Regions([Region.of(name, field) for name, field in template.fields_.items()])
        anchor = pattern_of("start_anchor", template.start_anchor, template.start_anchor_pattern)
        assert anchor is not None, "a template has one"
        self._start_anchor = anchor
        self._begun: FoundMark | None = None

    @property
    def is_bare(self) -> bool:
        """True if calls need no marks: a template declares some."""
        return False

    @property
    def has_types(self) -> bool:
        """True if arguments show their types without the tools' schemas."""
        return not any(region.field.content in _UNTYPED for region in self._regions.of(Purpose.CALLS))

    @property
    def has_calls(self) -> bool:
        """True if the template declares calls."""
        return bool(self._regions.of(Purpose.CALLS))

    @property
    def has_thoughts(self) -> bool:
        """True if the template declares thoughts."""
        return bool(self._regions.of(Purpose.THOUGHTS))

    @property
    def thought_marks(self) -> tuple[str, str] | None:
        """The marks around thoughts, if each is a single text."""
        for region in self._regions.of(Purpose.THOUGHTS):
            begin, end = region.field.open, region.field.close
            if isinstance(begin, str) and isinstance(end, str):
                return begin, end
        return None

    @property
    def opening_marks(self) -> tuple[str, ...]:
        """The marks with which calls, or a group of them, begin, as far as a text of some length is sure to."""
        implicit = self._regions.implicit
        patterns = [region.open for region in self._regions.of(Purpose.CALLS)]
        if patterns and implicit is not None:
            patterns.append(implicit.close)
        begins = (mark for pattern in patterns if pattern is not None for mark in pattern.begins)
        return tuple(mark for mark in begins if len(mark) >= _MIN_MARK)

    @property
    def is_steady(self) -> bool:
        """True if answers can be read before they are complete; see `anchors`."""
        return self._regions.is_steady

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        return not any(self._regions.anchors_in(None))

    @property
    def unused_fields(self) -> list[str]:
        """The fields that replies have no place for."""
        return [region.name for region in self._regions.of(Purpose.NOTHING)]

    def marks_among(self, texts: Iterable[str]) -> tuple[str, ...]:
        """Returns those of these texts, which are special tokens, that the regions mention."""
        spelled = [spelling for region in self._regions.all for spelling in region.field.spellings()]
        return tuple(text for text in texts if any(text in each for each in spelled))

    def reading(self, calls: bool, thoughts: bool) -> "Declared":
        """The same format where the marks of calls, or of thoughts, are text like any other."""
        passed = {Purpose.CALLS: calls, Purpose.THOUGHTS: thoughts}
        return self._with(self._regions.without([purpose for purpose, is_read in passed.items() if not is_read]))

    def after(self, prompt: str) -> "Declared | None":
        """The format of an answer to this prompt, which may have begun a region; None if it has no `start_anchor`."""
        try:
            begin = 0
            while (match := self._start_anchor.search(prompt, begin)) is not None and match.end() > begin:
                begin = match.end()
            return self._with(self._regions, self._open_at_end(prompt, begin)) if begin else None
        except TimeoutError:
            _report_timeout()
            return self

    def read(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[None]:
        """Reads an answer. All text after the last wanted call is dropped."""
        if not self._regions.is_steady:
            yield from text.pass_on_up_to_sight(_look_for_end, out.content)
        try:
            yield from AnswerRun(self._regions, text, out, schemas).read(self._begun)
        except TimeoutError:
            _report_timeout()
            yield from text.pass_on_up_to((), out.content)

    def reads(self, answer: str, name: str, arguments: str) -> bool:
        """True if this is an answer that calls this function with these arguments, and nothing else."""
        text, out = Text(), PieceBuffer(None)
        text.feed(answer, True)
        next(self.read(text, out, {}), None)
        pieces = out.empty()
        calls = [piece for piece in pieces if isinstance(piece, CallPiece)]
        written = "".join(call.text for call in calls)
        return (
            len(calls) == len(pieces) and [each.name for each in calls if each.name] == [name] and written == arguments
        )

    def _with(self, regions: Regions, begun: FoundMark | None = None) -> "Declared":
        other = object.__new__(Declared)
        other.template, other._start_anchor = self.template, self._start_anchor
        other._regions, other._begun = regions, begun
        return other

    def _open_at_end(self, prompt: str, at: int) -> FoundMark | None:
        """The mark of the region that is open at the end of the prompt, whose text from `at` on is the answer's."""
        begun: FoundMark | None = None
        searches = Searches()
        while True:
            anchors = self._regions.anchors_in(None if begun is None else begun.meaning.region)
            seen = Anchors(anchors, searches).look(prompt, at, True)
            if seen.found is None:
                return begun
            begun = seen.found if isinstance(seen.found.meaning, Opening) else None
            at = max(seen.end, at)


def _look_for_end(text: str, at: int, is_over: bool) -> Sighting[bool]:  # noqa: ARG001
    return Sighting(at, at, True if is_over else None)


def _report_timeout() -> None:
    logger.error("a pattern of the response template takes too long; the rest of the answer is shown as it is")
