"""Reads one answer as a response template declares it.

Text and thoughts are passed on as they arrive. Arguments are passed on while they are written if they are JSON, or
Python's, and the name comes before them; all other calls are passed on when their region ends. What a template calls a
call but cannot be read as one is content, with its marks. Thoughts and content that come in several regions are joined.
"""

import re
from collections.abc import Callable, Mapping

from chairlift.api.answers.code_calls import Pythonic
from chairlift.api.answers.declared.anchors import Anchor, Anchors, Searches
from chairlift.api.answers.declared.regions import Closing, FoundMark, Opening, Region, Regions
from chairlift.api.answers.declared.template import ContentParser, Purpose, TemplateField
from chairlift.api.answers.declared.values import calls_in
from chairlift.api.answers.formats import CallFormat, Schemas
from chairlift.api.answers.json_calls import JsonCallFormat
from chairlift.api.answers.text import PieceBuffer, Reading, Text, is_sendable

_EXCESS = re.compile(r"[\s}\])]*")
_BETWEEN_OBJECTS = re.compile(r"[ \t\n\r},]*")
_MAX_OPEN_ENDS = 8  # lists of calls in which an object has no end; each is read up to the end of the answer


class AnswerRun:
    """Reads one answer."""

    def __init__(self, regions: Regions, text: Text, out: PieceBuffer, schemas: Schemas) -> None:
        self._regions = regions
        self._text = text
        self._out = out
        self._schemas = schemas
        self._searches = Searches()
        self._num_open_ends = 0
        self._unclosed: Region | None = None  # whose calls were read, but not the mark that ends it
        self._sinks = {Purpose.CONTENT: _Sink(out.content), Purpose.THOUGHTS: _Sink(out.reasoning)}

    def read(self, begun: FoundMark | None) -> Reading[None]:
        """Reads up to the end, or to the last wanted call. `begun`: what began a region at the end of the prompt."""
        mark = begun
        while not self._out.is_full:
            region = None if mark is None or not isinstance(mark.meaning, Opening) else mark.meaning.region
            if mark is not None and region is not None and region.purpose is Purpose.CALLS:
                yield from self._read_calls(region, mark.captures)
                mark = None
                continue
            self._text.take()
            mark = yield from self._pass_on(region)
            if mark is None:
                return

    def _pass_on(self, region: Region | None) -> Reading[FoundMark | None]:
        """Passes the text of a region on (None: text outside of all), up to the next mark, which is read."""
        current = region or self._regions.implicit
        sink = None if current is None else self._sinks.get(current.purpose)
        if sink is None or current is None:
            return (yield from self._seek(region, _drop))
        sink.begin(current.field, is_after_call=self._unclosed is not None)
        mark = yield from self._seek(region, sink.add)
        if mark is None or mark.meaning.region.purpose is not Purpose.NOTHING:
            sink.end(mark is not None and mark.drops_space)
        return mark

    def _seek(self, region: Region | None, add: Callable[[str], None]) -> Reading[FoundMark | None]:
        anchors = self._regions.anchors_in(region)
        if region is None and self._unclosed is not None and self._unclosed.close is not None:
            anchors.append(Anchor(self._unclosed.close, Closing(self._unclosed)))
        self._unclosed = None
        return (yield from self._text.pass_on_up_to_sight(Anchors(anchors, self._searches).look, add))

    def _read_calls(self, region: Region, captures: Mapping[str, str]) -> Reading[None]:
        """Reads a region of calls, whose mark was read but not taken."""
        form = _Objects(region)
        name = captures.get(region.name_group or "", "").strip()
        if name and is_sendable(name):
            self._text.take()
            self._out.begin_call(name)
            yield from form.read_arguments(self._text, self._out)
            self._out.end_call()
        elif region.has_objects or region.field.content is ContentParser.PYTHON_CALLS:
            calls: CallFormat = form if region.has_objects else _PythonCalls()
            may_be_calls = self._num_open_ends < _MAX_OPEN_ENDS
            if not (may_be_calls and (yield from calls.read_calls(self._text, self._out, self._schemas))):
                self._sinks[Purpose.CONTENT].resume(self._text.take())
                return
            self._num_open_ends += form.has_open_end
        else:
            yield from self._read_whole(region, captures)
            return
        self._unclosed = region

    def _read_whole(self, region: Region, captures: Mapping[str, str]) -> Reading[None]:
        """Reads a region that has to be complete before anything is known of its calls."""
        opening = self._text.take()
        parts: list[str] = []
        mark, closing, calls = None, "", []
        try:
            mark = yield from self._seek(region, parts.append)
            closing = self._text.take()
            calls = calls_in(region.field, "".join(parts), captures, self._schemas)
        except ValueError:
            calls = []
        except TimeoutError:
            self._sinks[Purpose.CONTENT].resume(opening + "".join(parts) + closing)
            raise
        may_be_cut = mark is None and region.close is not None and not self._text.is_whole
        is_cut = may_be_cut and any(call.arguments == "{}" for call in calls)
        if not calls or is_cut:
            self._sinks[Purpose.CONTENT].resume(opening + "".join(parts) + closing)
            return
        for call in calls:
            if not self._out.is_full:
                self._out.begin_call(call.name, call.arguments)
                self._out.end_call()


class _Sink:
    """Receives the text of regions: drops whitespace around all of it, unless the field keeps it."""

    def __init__(self, add: Callable[[str], None]) -> None:
        self._add = add
        self._strips = True
        self._join = ""
        self._may_be_excess = False  # all text of the region so far
        self._is_empty = True
        self._held = ""  # whitespace, until text follows
        self._dropped = ""  # whitespace before the mark that ended the last region

    def begin(self, field: TemplateField, is_after_call: bool) -> None:
        """Begins a region of this field. After a call, brackets that close nothing are dropped."""
        self._may_be_excess = is_after_call
        self._strips = field.strips
        self._join = "" if self._is_empty else field.join or ""
        self._dropped = ""

    def add(self, text: str) -> None:
        """Adds text of the region."""
        text = self._held + text
        if self._may_be_excess and _EXCESS.fullmatch(text):
            self._held = text
            return
        self._may_be_excess = False
        if self._strips and (self._is_empty or self._join):
            text = text.lstrip()
        body = text.rstrip()
        self._held = text[len(body) :]
        if body:
            self._add(self._join + body)
            self._join, self._is_empty = "", False

    def end(self, drops_space: bool) -> None:
        """Ends the region; `drops_space`: the mark includes whitespace before it."""
        if self._held and not self._strips and not drops_space and not self._may_be_excess:
            self._add(self._held)
            self._is_empty, self._held = False, ""
        self._dropped, self._held = self._held, ""

    def resume(self, text: str) -> None:
        """Resumes the last region, because what seemed to begin another is this text."""
        self._held = self._dropped
        self.add(text)


class _Objects(JsonCallFormat):
    """Calls that are JSON objects, within a region, at whose end malformed arguments end as well."""

    opening = ""
    between = ""

    def __init__(self, region: Region) -> None:
        self._closings = () if region.close is None else region.close.literals
        self.has_open_end = False  # an object of a list extends to the end of the answer, and is none

    @property
    def closings(self) -> tuple[str, ...]:
        return self._closings

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        if (yield from text.accept("[")):
            return (yield from self.read_list(text, out, self.read_next))
        return (yield from self.read_object(text, out))

    def read_next(self, text: Text, out: PieceBuffer) -> Reading[bool]:
        """Reads an object of a list, after brackets of the last one that close nothing."""
        yield from text.skip(_BETWEEN_OBJECTS)
        is_call = yield from self.read_object(text, out)
        self.has_open_end = not is_call and text.is_at_end
        return is_call


class _PythonCalls(Pythonic):
    """Calls as Python writes them, in a list or without its brackets."""

    def read_calls(self, text: Text, out: PieceBuffer, schemas: Schemas) -> Reading[bool]:  # noqa: ARG002
        yield from text.accept("[")
        return (yield from self.read_list(text, out, self._read_call))


def _drop(text: str) -> None:
    """Text outside of all regions, or of one that replies have no place for."""
