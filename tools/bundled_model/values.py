"""Makes the values that sentences and tool calls are about: names, places, times, things, and made-up ones.

Each maker is known by the name of the slot that it fills. About one proper name in three is made up, so that
copying is learnt as an operation on characters, not as a table of known names.
"""

import random
from collections.abc import Callable

from bundled_model.fact_skills import DAYS, MONTHS
from bundled_model.tool_format import Value
from bundled_model.words import COMMON_WORDS, listed, made_up_word, random_word

_NAMES = listed(
    """
    Maria Tom Anna Ben Ruby Max Lily Mia Leo Sam Ella Oscar Nora Jack Rosie Finn Daisy Hugo Clara Otto Alice Theo
    Emma Noah Luna Felix Ivy Toby Bella John Mary Peter Paul Laura Ahmed Yuki Chen Priya Olga Ivan Carlos Sofia
    Fatima Lars Ingrid Pierre Julia Marco Kofi Amara Bob Dave Eve Frank Grace Helen Igor Jane Kate Liam Zoë José
    Mike Nina Omar Rita Steve Tina Uma Victor Wendy Xavier Yara Zach Sara David Linda George Susan Karl Martin
    """
)
_CITIES = listed(
    """
    Paris | London | Berlin | Rome | Madrid | Tokyo | Cairo | Oslo | Boston | Chicago | Sydney | Lima | Vienna |
    Dublin | Lisbon | Athens | Prague | Warsaw | Helsinki | Stockholm | Copenhagen | Amsterdam | Brussels | Zürich |
    Geneva | Milan | Naples | Munich | Hamburg | Lyon | Nice | Porto | Seville | Barcelona | Seoul | Beijing |
    Shanghai | Delhi | Mumbai | Bangkok | Hanoi | Jakarta | Manila | Nairobi | Lagos | Accra | Toronto | Montreal |
    Vancouver | Seattle | Denver | Miami | Houston | Dallas | Austin | San Francisco | New York | Los Angeles |
    San Diego | New Orleans | Buenos Aires | Rio de Janeiro | São Paulo | Mexico City | Cape Town | Hong Kong |
    Santiago | Bogotá | Quito | Havana | Istanbul | Moscow | Kyiv | Riga | Dubai | Perth | Auckland | Melbourne
    """,
    separator="|",
)
_COUNTRIES = listed(
    """
    France Germany Spain Italy Poland Japan China India Brazil Canada Mexico Egypt Kenya Norway Sweden Greece
    Turkey Peru Chile Ireland Australia Russia Portugal Austria Finland Denmark Iceland Cuba Ghana Nepal
    """
)
_LANGUAGES = listed("French German Spanish Italian Japanese Latin Dutch Greek Polish Swedish Russian Chinese Turkish")
_COLOURS = listed("red blue green yellow black white brown grey orange purple pink golden silver")
_ANIMALS = listed("dog cat horse rabbit fox bear parrot hamster turtle cow pig sheep goat duck mouse lion tiger owl")
_JOBS = listed("teacher doctor baker nurse pilot farmer painter lawyer singer writer cook driver dentist engineer")
_ROOMS = listed("kitchen bedroom bathroom office garage hall cellar garden attic balcony library nursery")
_SKIES = listed("sunny cloudy rainy windy foggy snowy stormy clear dry warm cold")
_UNITS = listed("miles kilometers meters feet inches pounds kilograms grams liters gallons euros dollars yen ounces")
_SYMBOLS = listed("AAPL GOOG MSFT TSLA AMZN NVDA IBM META NFLX INTC AMD ORCL SAP ASML")
_SUFFIXES = listed("txt md py csv json log pdf png")
_MAKE_UP_SHARE = 0.3


def _proper(rng: random.Random, known: tuple[str, ...]) -> str:
    """Draws a proper name of a list, or a made-up one."""
    return made_up_word(rng).capitalize() if rng.random() < _MAKE_UP_SHARE else rng.choice(known)


def _thing(rng: random.Random) -> str:
    return rng.choice(COMMON_WORDS)


def words(rng: random.Random, most: int) -> str:
    """Draws one word or a few."""
    return " ".join(_thing(rng) for _ in range(rng.randint(1, most)))


def number(rng: random.Random) -> int:
    """Draws a whole number, short ones more often."""
    return rng.randrange(10 ** rng.choice((1, 2, 2, 2, 3, 4)))


def clock(rng: random.Random) -> str:
    """Draws a time of day such as 7:05 or 18:30."""
    return f"{rng.randrange(24)}:{rng.choice((0, 0, 15, 30, 45, rng.randrange(60))):02}"


def _sum(rng: random.Random) -> str:
    """Draws a sum to be worked out, in figures."""
    sign = rng.choice("+-*/")
    return f"{number(rng)}{sign}{number(rng)}" if rng.random() < 0.2 else f"{number(rng)} {sign} {number(rng)}"


def _email(rng: random.Random) -> str:
    return f"{_proper(rng, _NAMES).lower()}@{_thing(rng)}.{rng.choice(('com', 'org', 'net'))}"


MAKERS: dict[str, Callable[[random.Random], Value]] = {
    "name": lambda rng: _proper(rng, _NAMES),
    "city": lambda rng: _proper(rng, _CITIES),
    "other_city": lambda rng: _proper(rng, _CITIES),
    "country": lambda rng: _proper(rng, _COUNTRIES),
    "language": lambda rng: rng.choice(_LANGUAGES),
    "color": lambda rng: rng.choice(_COLOURS),
    "animal": lambda rng: rng.choice(_ANIMALS),
    "job": lambda rng: rng.choice(_JOBS),
    "room": lambda rng: rng.choice(_ROOMS),
    "sky": lambda rng: rng.choice(_SKIES),
    "unit": lambda rng: rng.choice(_UNITS),
    "other_unit": lambda rng: rng.choice(_UNITS),
    "degree_unit": lambda rng: rng.choice(("celsius", "fahrenheit")),
    "symbol": lambda rng: rng.choice(_SYMBOLS),
    "file": lambda rng: f"{_thing(rng)}.{rng.choice(_SUFFIXES)}",
    "email": _email,
    "day": lambda rng: rng.choice(DAYS),
    "month": lambda rng: rng.choice(MONTHS),
    "time": clock,
    "year": lambda rng: rng.randrange(1800, 2100),
    "age": lambda rng: rng.randrange(1, 100),
    "small": lambda rng: rng.randrange(1, 31),
    "number": number,
    "other_number": number,
    "price": lambda rng: rng.choice((number(rng) + 1, rng.randrange(1, 100))),
    "sum": _sum,
    "product": _thing,
    "word": random_word,
    "words": lambda rng: words(rng, 4),
    "text": lambda rng: words(rng, 6),
}


def make_values(rng: random.Random, slots: list[str]) -> dict[str, Value]:
    """Draws a fresh value for every slot; proper names are now and then typed in small letters."""
    values = {slot: MAKERS[slot](rng) for slot in slots}
    if rng.random() < 0.07:
        return {slot: value.lower() if isinstance(value, str) else value for slot, value in values.items()}
    return values
