"""Asks for days, months and opposites: closed sets of facts, in several phrasings.

Held out: combinations of phrasing and item, since the items themselves must all be learnt.
"""

import random

from bundled_model.exchange import NEVER_HELD_OUT, Exchange
from bundled_model.phrasing import dress
from bundled_model.words import listed

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = listed("January February March April May June July August September October November December")
MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = listed("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
_OPPOSITE_PAIRS = listed(
    """
    hot/cold big/small tall/short up/down left/right high/low fast/slow happy/sad light/dark
    day/night open/closed full/empty hard/soft loud/quiet wet/dry young/old new/ancient rich/poor
    strong/weak good/bad black/white true/false yes/no early/late near/far inside/outside in/out on/off
    top/bottom front/back start/end first/last win/lose buy/sell give/take push/pull love/hate
    laugh/cry clean/dirty thick/thin wide/narrow deep/shallow sharp/blunt smooth/rough
    sweet/sour easy/difficult simple/complicated cheap/expensive brave/cowardly kind/cruel polite/rude
    safe/dangerous awake/asleep alive/dead always/never everything/nothing everybody/nobody above/below
    before/after over/under east/west north/south summer/winter friend/enemy king/queen boy/girl
    man/woman brother/sister mother/father question/answer ask/reply arrive/leave come/go
    remember/forget begin/finish build/destroy rise/fall lead/follow accept/refuse attack/defend
    increase/decrease more/less many/few best/worst better/worse maximum/minimum public/private
    straight/crooked tight/loose tidy/messy lazy/hardworking calm/stormy noisy/silent whole/broken
    success/failure war/peace heaven/hell land/sea sunrise/sunset entrance/exit import/export
    float/sink freeze/melt lock/unlock tie/untie appear/disappear agree/disagree possible/impossible
    visible/invisible lucky/unlucky honest/dishonest patient/impatient natural/artificial male/female
    positive/negative guilty/innocent beautiful/ugly smart/stupid floor/ceiling teacher/student
    """
)
# Words whose opposite is better known as the opposite of another word.
_ONE_WAY_OPPOSITES = {
    "heavy": "light",
    "long": "short",
    "large": "small",
    "little": "big",
    "quick": "slow",
    "fat": "thin",
}


def _all_opposites() -> dict[str, str]:
    """Returns both directions of the pairs, and the one-way opposites."""
    opposites_of = dict(_ONE_WAY_OPPOSITES)
    for pair in _OPPOSITE_PAIRS:
        left, right = pair.split("/")
        opposites_of.update({left: right, right: left})
    return opposites_of


OPPOSITES = _all_opposites()

_NEXT = listed(
    """
    What comes after {x} | What {unit} comes after {x} | Which {unit} comes after {x} | What is the {unit} after {x} |
    Which {unit} follows {x} | What {unit} is after {x} | What is the next {unit} after {x}
    """,
    separator="|",
)
_PREVIOUS = (
    "What comes before {x}",
    "What {unit} comes before {x}",
    "Which {unit} comes before {x}",
    "What is the {unit} before {x}",
    "What {unit} is before {x}",
    "Which {unit} is right before {x}",
)
_MONTH_DAYS = listed(
    """
    How many days are in {x} | How many days are there in {x} | How many days does {x} have | How many days has {x} |
    How many days has the month of {x} | How long is {x} | What is the number of days in {x}
    """,
    separator="|",
)
_MONTH_NUMBER = (
    "What number is {x}",
    "What month number is {x}",
    "What is the number of {x}",
    "Which number is the month {x}",
    "What number month is {x}",
    "What number is the month of {x}",
)
_NUMBER_MONTH = (
    "What is month number {n}",
    "Which month is number {n}",
    "What is the {nth} month",
    "What is the {nth} month of the year",
    "Which month is the {nth}",
    "Name month number {n}",
    "Which month is the {nth} month of the year",
)
_OPPOSITE = listed(
    """
    What is the opposite of {x} | What's the opposite of {x} | Opposite of {x} | The opposite of {x} |
    Tell me the opposite of {x} | Give me the opposite of {x} | What is the opposite of the word {x} |
    Name the opposite of {x} | Which word is the opposite of {x} | Give the opposite of {x} |
    What word means the opposite of {x}
    """,
    separator="|",
)
_CALENDAR_LISTS = {
    "How many days are in a week": "A week has 7 days.",
    "How many days does a week have": "A week has 7 days.",
    "How many months are in a year": "A year has 12 months.",
    "How many months does a year have": "A year has 12 months.",
    "How many days are in a year": "A year has 365 days, or 366 in a leap year.",
    "What are the days of the week": f"The days of the week are {', '.join(DAYS)}.",
    "Name the days of the week": f"The days of the week are {', '.join(DAYS)}.",
    "List the days of the week": f"The days of the week are {', '.join(DAYS)}.",
}


def neighbour_sentence(unit: str, names: tuple[str, ...], index: int, step: int) -> str:
    """Says which day or month is after or before the one at index."""
    side = "after" if step == 1 else "before"
    return f"The {unit} {side} {names[index]} is {names[(index + step) % len(names)]}."


def month_length_sentence(index: int) -> str:
    """Says how many days a month has."""
    leap = ", or 29 in a leap year" if MONTH_LENGTHS[index] == 28 else ""
    return f"{MONTHS[index]} has {MONTH_LENGTHS[index]} days{leap}."


def _neighbour(rng: random.Random, unit: str, names: tuple[str, ...]) -> tuple[str, str]:
    index = rng.randrange(len(names))
    phrasings, step = rng.choice(((_NEXT, 1), (_PREVIOUS, -1)))
    request = rng.choice(phrasings).format(unit=unit, x=names[index])
    return request, neighbour_sentence(unit, names, index, step)


def _month_number(rng: random.Random) -> tuple[str, str]:
    index = rng.randrange(len(MONTHS))
    name, number = MONTHS[index], index + 1
    if rng.random() < 0.5:
        return rng.choice(_MONTH_NUMBER).format(x=name), f"{name} is month number {number}."
    nth = rng.choice((ORDINALS[index], f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"))
    return rng.choice(_NUMBER_MONTH).format(n=number, nth=nth), f"Month number {number} is {name}."


def calendar(rng: random.Random) -> Exchange:
    """Draws a question about days or months."""
    kind = rng.choices(("day", "month", "length", "number", "list"), weights=(25, 25, 20, 22, 8))[0]
    if kind == "day":
        request, answer = _neighbour(rng, "day", DAYS)
    elif kind == "month":
        request, answer = _neighbour(rng, "month", MONTHS)
    elif kind == "number":
        request, answer = _month_number(rng)
    elif kind == "length":
        index = rng.randrange(len(MONTHS))
        request = rng.choice(_MONTH_DAYS).format(x=MONTHS[index])
        answer = month_length_sentence(index)
    else:
        request, answer = rng.choice(sorted(_CALENDAR_LISTS.items()))
        return Exchange(NEVER_HELD_OUT, dress(rng, request), answer)
    return Exchange(f"calendar:{request}", dress(rng, request), answer)


def opposites(rng: random.Random) -> Exchange:
    """Draws a word whose opposite is asked for."""
    word = rng.choice(sorted(OPPOSITES))
    request = rng.choice(_OPPOSITE).format(x=word)
    return Exchange(f"opposite:{request}", dress(rng, request), f"The opposite of {word} is {OPPOSITES[word]}.")


def fact_document(rng: random.Random) -> Exchange:
    """Draws a plain sentence that states a fact; never held out, because every item has to be learnt."""
    word = rng.choice(sorted(OPPOSITES))
    day = neighbour_sentence("day", DAYS, rng.randrange(len(DAYS)), rng.choice((1, -1)))
    month = neighbour_sentence("month", MONTHS, rng.randrange(len(MONTHS)), rng.choice((1, -1)))
    sentence = rng.choice(
        (
            f"The opposite of {word} is {OPPOSITES[word]}.",
            day,
            month,
            month_length_sentence(rng.randrange(len(MONTHS))),
        )
    )
    return Exchange(NEVER_HELD_OUT, "", sentence + "\n")
