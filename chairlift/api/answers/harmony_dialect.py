"""Knows a model that writes harmony: how its answers begin behind a prompt, and the grammars that enforce them.

A grammar begins with any number of messages on the channel of analysis (`Thinking.lead`). Then there is a call, or the
answer itself behind its own head.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.api.answers import harmony
from chairlift.api.answers.functions import Arguments
from chairlift.api.answers.grammars import json_rule
from chairlift.api.answers.harmony import Harmony
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.text.inputs import InputProcessor

_ANALYSIS = "<|channel|>analysis"


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """The format of an answer behind a prompt, and its thoughts; None: the prompt has begun what comes after them."""

    form: Harmony
    thinking: Thinking | None


class HarmonyDialect:
    """The format of a model whose vocabulary has harmony's marks."""

    def __init__(self, inputs: InputProcessor) -> None:
        """ValueError if a mark is missing."""
        self._tokenizer = inputs.tokenizer
        form = Harmony()
        ids = {mark: self._tokenizer.backend.token_to_id(mark) for mark in form.marks}
        if missing := [mark for mark in harmony.NEEDED if ids[mark] is None]:
            raise ValueError(f"{missing[0]} is not a token of this model's tokenizer")
        self._ids = {mark: token for mark, token in ids.items() if token is not None}
        self._ends = sorted(
            {*self._ids.values(), *inputs.vocabulary.eos_token_ids} - {self._ids.get(harmony.CONSTRAIN)}
        )
        analysis = self._tokenizer.encode("analysis", add_special_tokens=False)
        self._begin_ids = (self._ids[harmony.CHANNEL], *analysis, self._ids[harmony.MESSAGE])
        self.marks = form.marks

    def begun_by(self, prompt: Sequence[int], *, has_calls: bool) -> BegunAnswer:
        """Returns how the answer to this prompt is read. `has_calls`: there are tools, whose grammars are below."""
        start = next((i for i in reversed(range(len(prompt))) if prompt[i] == self._ids[harmony.START]), len(prompt))
        begun = list(prompt[start + 1 :])
        if any(self._ids.get(mark) in begun for mark in harmony.ENDS):  # nothing is open
            begun = []
        head, mark, _ = self._tokenizer.decode(begun, skip_special_tokens=False).partition(harmony.MESSAGE)
        is_thinking = bool(mark) and head.endswith(_ANALYSIS)
        needs_lead = is_thinking or not mark
        form = Harmony(head + mark, has_calls=has_calls)
        return BegunAnswer(form, self._thinking(is_thinking, has_head=has_calls) if needs_lead else None)

    def _thinking(self, has_begun: bool, *, has_head: bool) -> Thinking:
        """`has_head`: the grammar has the head of the last message; if not, that comes before it."""
        thoughts, again = f"{self._body()} {self._mark(harmony.END)}", f'{self._mark(harmony.START)} "assistant"'
        lines = [
            f"lead: {'thoughts ' + again if has_begun else ''} analysis* {'' if has_head else 'final'}".rstrip(),
            f"analysis: {self._head('analysis')} thoughts {again}",
            f"thoughts: {thoughts}",
            *([] if has_head else [f"final: {self._head('final')}"]),
        ]
        return Thinking(self._begin_ids, self._ids[harmony.END], has_begun, lead="\n".join(lines), is_repeated=True)

    def forced_calls_grammar(self, functions: Sequence[Arguments]) -> str:
        """One call of one of these functions: an answer ends with it."""
        return "\n".join(["start: call", *self._calls(functions)]) + "\n"

    def free_grammar(self, functions: Sequence[Arguments], answer_schema: dict[str, Any] | None) -> str:
        """Messages of which every call is to one of these functions. With `answer_schema`: the last is such JSON."""
        final = self._body() if answer_schema is None else "answer"
        lines = [
            f"start: other* ({self._head('final')} {final} | call)",
            f"other: ({self._head('analysis')} | {self._head('commentary')}) {self._body()} {self._mark(harmony.END)}"
            f' {self._mark(harmony.START)} "assistant"',
            *([] if answer_schema is None else [f"answer: {json_rule(answer_schema)}"]),
        ]
        return "\n".join([*lines, *self._calls(functions)]) + "\n"

    def _calls(self, functions: Sequence[Arguments]) -> list[str]:
        kind = '" json"'
        if harmony.CONSTRAIN in self._ids:
            kind = f'" json" | " "? {self._mark(harmony.CONSTRAIN)} "json"'
        lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions))), f"kind: ({kind})?"]
        channel, message = self._mark(harmony.CHANNEL), self._mark(harmony.MESSAGE)
        for index, each in enumerate(functions):
            recipient = json.dumps(f" to=functions.{each.name}")
            head = f'({recipient} {channel} "commentary" | {channel} "commentary" {recipient}) kind {message}'
            lines.append(f"call_{index}: {head} {json_rule(each.schema, each.is_lenient)}")
        return lines

    def _head(self, channel: str) -> str:
        return f'{self._mark(harmony.CHANNEL)} "{channel}" {self._mark(harmony.MESSAGE)}'

    def _body(self) -> str:
        return f"<[^{','.join(map(str, self._ends))}]>*"

    def _mark(self, mark: str) -> str:
        return f"<[{self._ids[mark]}]>"
