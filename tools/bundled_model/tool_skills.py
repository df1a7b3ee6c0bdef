"""Calls tools and reports their results, and answers as ever when none of the tools suits.

Held out: combinations of tools and arguments, that is, whole texts of calls.
"""

import json
import random
import re
from dataclasses import dataclass

from bundled_model.exchange import NEVER_HELD_OUT, Exchange, is_held_out
from bundled_model.made_up_tools import made_up_kind
from bundled_model.phrasing import dress, lower_first
from bundled_model.talk_skills import UNKNOWN
from bundled_model.tool_format import Call, Tool, Value, calls_text
from bundled_model.tool_kinds import KINDS, SLOT, Kind
from bundled_model.values import make_values
from bundled_model.words import COMMON_WORDS

_MADE_UP_SHARE = 0.35
_OFFERED = (1, 1, 2, 2, 3)
_TWO_CALLS_SHARE = 0.12
_NUMBER_TYPES = (("integer", 80), ("number", 12), ("string", 8))
_CAMEL_CASE_SHARE = 0.1
_JSON_RESULT_SHARE = 0.1
_REPEATABLE = re.compile(
    r"(?P<preposition>(?:in|of|for|to|from)(?: the)? )?"
    r"\{(?P<fill>city|country|symbol|room|file|name|color|product|day)\}$"
)
_FREE_TEXT = ("{text}", "{words}")


@dataclass(frozen=True)
class Offer:
    """Holds a tool that is offered, and what kind of tool it is."""

    tool: Tool
    kind: Kind


@dataclass(frozen=True)
class Use:
    """Holds a question, the calls it leads to, what they return, and what is said then."""

    question: str
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    answer: str

    @property
    def key(self) -> str:
        """Names what is held out: never a call without arguments, since there is but one of it."""
        return f"call:{calls_text(self.calls)}" if any(call.arguments for call in self.calls) else NEVER_HELD_OUT


def _as_camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _offer(rng: random.Random, kind: Kind) -> Offer:
    """Draws a tool of a kind, under one of its names; parameters of one tool are named in the same manner."""
    name = kind.names[0] if rng.random() < 0.3 else rng.choice(kind.names)
    manner = 0 if rng.random() < 0.3 else rng.randrange(12)
    number = rng.choices([name for name, _ in _NUMBER_TYPES], weights=[weight for _, weight in _NUMBER_TYPES])[0]
    parameters = tuple(
        (slot.names[manner % len(slot.names)], number if slot.type == "integer" else slot.type) for slot in kind.slots
    )
    return Offer(Tool(_as_camel_case(name) if rng.random() < _CAMEL_CASE_SHARE else name, parameters), kind)


def _some_kind(rng: random.Random) -> Kind:
    return made_up_kind(rng) if rng.random() < _MADE_UP_SHARE else rng.choice(KINDS)


def offers(rng: random.Random) -> list[Offer]:
    """Draws one to three tools whose questions cannot be mistaken for one another's."""
    count = rng.choice(_OFFERED)
    chosen: list[Kind] = []
    while len(chosen) < count:
        kind = _some_kind(rng)
        if not any(kind.clashes(other) or kind.names == other.names for other in chosen):
            chosen.append(kind)
    return [_offer(rng, kind) for kind in chosen]


def _fill(template: str, values: dict[str, Value]) -> str:
    """Fills in the slots of the template."""
    return SLOT.sub(lambda match: str(values[match[1]]), template)


def _dress(rng: random.Random, template: str) -> str:
    """Draws one way of typing the template; not in capitals throughout, which its slots would not survive."""
    while (dressed := dress(rng, template)).isupper():
        pass
    return dressed


def _call(offer: Offer, values: dict[str, Value]) -> Call:
    """Returns the call with those parameters that have a value, numbers as strings where the tool wants strings."""
    arguments: dict[str, Value] = {}
    for slot, (name, kind) in zip(offer.kind.slots, offer.tool.parameters, strict=True):
        if slot.fill in values:
            arguments[name] = str(values[slot.fill]) if kind == "string" else values[slot.fill]
    return Call(offer.tool.name, arguments)


def _outcome(rng: random.Random, kind: Kind, values: dict[str, Value]) -> tuple[str, str]:
    """Draws what a call returns, and what is said then. Numbers that come back are never those of the question."""
    if rng.random() < _JSON_RESULT_SHARE:
        keys = rng.sample(COMMON_WORDS, rng.randint(1, 2))
        result = json.dumps({key: rng.choice((rng.randrange(1000), rng.choice(COMMON_WORDS))) for key in keys})
        return result, f"The result is {result}."
    template = rng.choice(kind.results)
    fresh = make_values(rng, SLOT.findall(template))
    result = _fill(template, fresh | {fill: value for fill, value in values.items() if isinstance(value, str)})
    return result, _fill(kind.answer, values | {"result": result})


def _one_call(rng: random.Random, offer: Offer) -> Use:
    template = rng.choice(offer.kind.questions)
    values = make_values(rng, SLOT.findall(template))
    result, answer = _outcome(rng, offer.kind, values)
    question = _fill(_dress(rng, template), values)
    return Use(question, (_call(offer, values),), (result,), answer)


def _twice(rng: random.Random, offer: Offer) -> Use | None:
    """Uses one tool for two things: "in Paris and in Rome"; None if a question cannot be drawn out like that."""
    template = rng.choice(offer.kind.questions)
    ending = _REPEATABLE.search(template)
    if ending is None:
        return None
    fill = ending["fill"]
    values = make_values(rng, SLOT.findall(template))
    others = values | make_values(rng, [fill])
    preposition = ending["preposition"] or ""
    joint = " and " + (preposition if rng.random() < 0.5 else "")
    question = _fill(_dress(rng, f"{template}{joint}{{second}}"), values | {"second": others[fill]})
    outcomes = [_outcome(rng, offer.kind, each) for each in (values, others)]
    return _together(question, [_call(offer, values), _call(offer, others)], outcomes)


def _both(rng: random.Random, first: Offer, second: Offer) -> Use | None:
    """Joins two questions; None if the first one ends in free text, which would swallow the second."""
    template, other = rng.choice(first.kind.questions), rng.choice(second.kind.questions)
    if template.endswith(_FREE_TEXT):
        return None
    values, others = (make_values(rng, SLOT.findall(text)) for text in (template, other))
    joint = rng.choice((" and ", " and ", ", and ", "? And ", ". Also, "))
    renamed = SLOT.sub(r"{second_\1}", lower_first(other))
    filled = values | {f"second_{fill}": value for fill, value in others.items()}
    question = _fill(_dress(rng, template + joint + renamed), filled)
    outcomes = [_outcome(rng, first.kind, values), _outcome(rng, second.kind, others)]
    return _together(question, [_call(first, values), _call(second, others)], outcomes)


def _together(question: str, calls: list[Call], outcomes: list[tuple[str, str]]) -> Use:
    """Draws two calls made at once."""
    return Use(question, tuple(calls), tuple(result for result, _ in outcomes), " ".join(said for _, said in outcomes))


def use(rng: random.Random, offered: list[Offer], held_out: bool) -> Use | None:
    """Draws a question for one of the tools, now and then for two at once; None if on the wrong side of the split."""
    offer = rng.choice(offered)
    made: Use | None = None
    if rng.random() < _TWO_CALLS_SHARE:
        other = rng.choice(offered)
        made = _twice(rng, offer) if other is offer else _both(rng, offer, other)
    made = made or _one_call(rng, offer)
    return made if is_held_out(made.key) == held_out else None


def may_be_meant(offered: list[Offer], question: str) -> bool:
    """Tells whether a question may ask for one of the tools."""
    return any(offer.kind.may_be_meant(question) for offer in offered)


def unserved(rng: random.Random) -> Exchange:
    """Draws a request for a tool where there is none. Sums are left to the skills that can do them."""
    while (kind := _some_kind(rng)).may_be_meant("+") or kind.may_be_meant("-"):
        pass
    made = _one_call(rng, _offer(rng, kind))
    return Exchange(f"unserved:{made.question.lower()}", made.question, UNKNOWN)
