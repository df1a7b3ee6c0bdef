"""Makes up kinds of tools, so that names are copied from the system turn and not known by heart.

Some are called for by name ("Use blorp with 12"), some by what their name says ("What is the price of milk"
for `get_price`).
"""

import random

from bundled_model.tool_kinds import INTEGER_FILLS, Kind, Slot
from bundled_model.words import COMMON_WORDS, listed, made_up_word

_VERBS = listed(
    """
    get find show check open close start stop clean paint buy sell count move fix wash lock unlock print draw build
    load save cancel update create remove measure cook feed water watch order pay rent test scan sort mix order
    """
)
_LOOK_UPS = ("get", "find", "fetch", "lookup", "show", "check", "read")
_PARAMETERS = listed(
    "id name value item key amount level count size code text mode type kind place target source user label input"
)
_FILLS = ("number", "small", "word", "words", "name", "city", "color", "product", "day", "time", "file")
_RESULTS = ("{number}", "{words}", "{name}", "{color}", "{time}", "{number} {product}", "ok", "done", "{product}")
_ANSWER = "The result is {result}."


def _slots(rng: random.Random, count: int) -> tuple[Slot, ...]:
    """Draws different parameters with random names."""
    fills = rng.sample(_FILLS, count)
    names = rng.sample([*_PARAMETERS, *rng.sample(COMMON_WORDS, len(_PARAMETERS))], count)
    return tuple(
        Slot(fill, (name,), "integer" if fill in INTEGER_FILLS else "string")
        for fill, name in zip(fills, names, strict=True)
    )


def _called_by_name(rng: random.Random) -> Kind:
    """Draws a tool whose questions say its name, as they have nothing else to go by."""
    parts = [made_up_word(rng), rng.choice((made_up_word(rng), rng.choice(COMMON_WORDS)))]
    name = parts[0] if rng.random() < 0.6 else "_".join(parts)
    slots = _slots(rng, rng.choice((0, 1, 1, 1, 2)))
    if len(slots) == 2:
        first, second = slots
        with_both = f"with {first.names[0]} {{{first.fill}}} and {second.names[0]} {{{second.fill}}}"
        questions = [f"Call {name} {with_both}", f"Use {name} {with_both}", f"Run {name} {with_both}"]
    elif slots:
        fill, parameter = f"{{{slots[0].fill}}}", slots[0].names[0]
        questions = [
            f"Use {name} with {fill}",
            f"Call {name} with {parameter} {fill}",
            f"Run {name} on {fill}",
            f"Use the tool {name} on {fill}",
            f"{name} {fill}",
            f"What does {name} say about {fill}",
        ]
    else:
        questions = [f"Call {name}", f"Run {name}", f"Use {name}", f"Use the {name} tool", f"What does {name} say"]
    return Kind((name,), slots, (name,), tuple(questions), _RESULTS, _ANSWER)


def _look_up(rng: random.Random) -> Kind:
    """Draws a tool such as get_price(item), asked for the price of something."""
    noun = rng.choice(COMMON_WORDS)
    slots = _slots(rng, 1)
    fill = f"{{{slots[0].fill}}}"
    questions = (
        f"What is the {noun} of {fill}",
        f"What is the {noun} for {fill}",
        f"Get the {noun} of {fill}",
        f"Tell me the {noun} of {fill}",
        f"Show me the {noun} for {fill}",
        f"Find the {noun} of {fill}",
    )
    return Kind((f"{rng.choice(_LOOK_UPS)}_{noun}",), slots, (noun,), questions, _RESULTS, _ANSWER)


def _action(rng: random.Random) -> Kind:
    """Draws a tool such as paint_fence(color), told to paint the fence."""
    verb, noun = rng.choice(_VERBS), rng.choice(COMMON_WORDS)
    slots = _slots(rng, rng.choice((0, 1, 1)))
    order = f"{verb.capitalize()} the {noun}"
    if slots:
        fill, parameter = f"{{{slots[0].fill}}}", slots[0].names[0]
        endings = (f" {fill}", f" with {fill}", f" with {parameter} {fill}", f": {fill}", f" for {fill}", f" in {fill}")
        questions = tuple(order + ending for ending in endings)
    else:
        questions = (order, f"I want to {verb} the {noun}", f"{order} now")
    return Kind((f"{verb}_{noun}",), slots, (noun,), questions, _RESULTS, _ANSWER)


def made_up_kind(rng: random.Random) -> Kind:
    """Draws a kind of tool that was not there before."""
    return rng.choices((_called_by_name, _look_up, _action), weights=(35, 40, 25))[0](rng)
