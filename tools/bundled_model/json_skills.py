"""Asks for the facts of a sentence as JSON.

Held out: combinations of values, that is, whole answers. Keys come in the order in which they are asked
for, with `, ` and `: ` between them, as Python's json writes them.
"""

import json
import random
import re

from bundled_model.exchange import Exchange
from bundled_model.phrasing import lower_first
from bundled_model.tool_format import Value
from bundled_model.values import make_values, number
from bundled_model.words import COMMON_WORDS, listed

_REQUESTS = (
    "Extract the {keys} as JSON: {sentence}",
    "Extract the {keys} as JSON: {sentence}",
    "Extract the {keys} as JSON. {sentence}",
    "Extract the {keys} as JSON from: {sentence}",
    "Extract the {keys} as JSON from this sentence: {sentence}",
    "Extract {keys} as JSON: {sentence}",
    "Extract {keys} from: {sentence}",
    "Extract the {keys}: {sentence}",
    "Extract the {keys}. {sentence}",
    "Extract JSON with {keys}: {sentence}",
    "Give me the {keys} as JSON. {sentence}",
    "Give me the {keys} as JSON: {sentence}",
    "Give the {keys} as JSON: {sentence}",
    "Give the {keys} in JSON: {sentence}",
    "Return the {keys} as JSON: {sentence}",
    "Return a JSON object with the {keys}: {sentence}",
    "Return JSON with {keys}: {sentence}",
    "Write the {keys} as JSON: {sentence}",
    "JSON with {keys}: {sentence}",
    "What are the {keys}? Answer in JSON. {sentence}",
    "What is the {keys}? Answer in JSON: {sentence}",
    "Find the {keys} and answer in JSON. {sentence}",
    "Turn this into JSON with the {keys}: {sentence}",
    "Convert to JSON with the keys {keys}: {sentence}",
    "Extract the {keys} as JSON:\n{sentence}",
    "{sentence} Extract the {keys} as JSON.",
    "{sentence} Give me the {keys} as JSON.",
    "{sentence}\nGive the {keys} as JSON.",
)
# A sentence's slots are the keys that may be asked for; "{a=b}" is slot b under the key a.
_SENTENCES = listed(
    """
    {name} is {age} years old and lives in {city}. | {name}, who is {age}, lives in {city}. |
    {name} is {age} years old. | My friend {name} from {city} is {age} years old. | {name} is {age}. |
    {name} is a {age}-year-old {job} from {city}. | {name} works as a {job} in {city}. |
    {name} is {age} and works as a {job}. | In {city} lives {name}, a {job} of {age} years. |
    {name} lives in {city}. | I am {name}, I am {age} years old and I live in {city}. |
    My name is {name} and I am {age}. |
    {name} is a {job} and lives in {city}. | {name} ({age}) comes from {city}. | Meet {name}, {age}, from {city}. |
    The {product} costs {price} dollars. | The {color} {product} costs {price} euros. |
    I bought {quantity=small} {product}s for {price} dollars. | A {product} is {price} dollars. |
    {name} sold a {color} {product} for {price} euros. | {price} euros for a {color} {product} is too much. |
    {name} paid {price} dollars for the {product}. | You can get {quantity=small} {product}s for {price} euros. |
    The meeting is on {day} at {time}. | The meeting with {name} is on {day} at {time}. | See you on {day} at {time}. |
    We meet on {day} at {time} in the {room}. | On {day} at {time} there is a concert in {city}. |
    The train to {city} leaves at {time} on {day}. | {name} arrives in {city} on {day} at {time}. |
    The train from {origin=city} to {destination=other_city} leaves at {time}. | The {event=product} is in {month}. |
    {name} flies from {origin=city} to {destination=other_city} on {day}. | The party starts at {time} on {day}. |
    I saw a {color} {animal} in {city}. | The {color} {animal} is called {name}. | {name} has a {color} {animal}. |
    {name} is a {color} {animal} and {age} years old. | Our {animal} {name} is {age} years old. |
    {name} the {animal} likes the {color} {product}. | It is {temperature=small} degrees and {sky} in {city}. |
    In {city} it is {sky} and {temperature=small} degrees warm. | You can reach {name} at {email}. |
    Write to {email}, that is the address of {name} in {city}. | {name} was born in {year} in {city}. |
    {author=name} wrote The {title=product} in {year}. | Table {table=age} ordered {quantity=small} {item=product}s. |
    {name} ordered {quantity=small} {item=product}s on {day}. | {name} moved from {country} to {city} in {year}. |
    {city} is a city in {country}. | {name} speaks {language} and lives in {country}. |
    {name} scored {points=small} points.
    """,
    separator="|",
)

_SLOT = re.compile(r"\{(\w+)(?:=(\w+))?\}")
_FREE_SENTENCES = (
    ("The {key} is {value}", ", the {key} is {value}", " and the {key} is {value}."),
    ("The {key} is {value}", ", its {key} is {value}", " and its {key} is {value}."),
    ("{key}: {value}", ", {key}: {value}", ", {key}: {value}"),
    ("{key} = {value}", "; {key} = {value}", "; {key} = {value}"),
    ("We have the {key} {value}", ", the {key} {value}", " and the {key} {value}."),
)
_ORDERS = ("Extract", "Give", "Return", "Write", "Find", "Turn", "Convert")
_EVERYTHING = ("data", "facts", "values", "information")
_EVERYTHING_SHARE = 0.08
_FREE_SHARE = 0.2
_DECIMAL_SHARE = 0.25


def _listed_sentence(rng: random.Random) -> tuple[str, dict[str, Value]]:
    """Draws a sentence of the list, and its values by key."""
    template = rng.choice(_SENTENCES)
    slots = {match[1]: match[2] or match[1] for match in _SLOT.finditer(template)}
    values = dict(zip(slots, make_values(rng, list(slots.values())).values(), strict=True))
    if "price" in values and rng.random() < _DECIMAL_SHARE:
        values["price"] = rng.randrange(1, 100) + rng.randrange(1, 100) / 100
    sentence = _SLOT.sub(lambda match: str(values[match[1]]), template)
    british = rng.random() < 0.3
    return sentence, {"colour" if key == "color" and british else key: value for key, value in values.items()}


def _free_sentence(rng: random.Random) -> tuple[str, dict[str, Value]]:
    """Draws a sentence that gives random keys random values."""
    keys = rng.sample(COMMON_WORDS, rng.randint(2, 4))
    values: dict[str, Value] = {key: number(rng) if rng.random() < 0.5 else rng.choice(COMMON_WORDS) for key in keys}
    first, middle, last = rng.choice(_FREE_SENTENCES)
    forms = [first, *[middle] * (len(keys) - 2), last]
    parts = [form.format(key=key, value=values[key]) for form, key in zip(forms, keys, strict=True)]
    return "".join(parts), values


def _listing(rng: random.Random, keys: list[str]) -> str:
    """Lists the keys as a request names them: name, age and city."""
    if len(keys) == 1:
        return keys[0]
    *others, last = keys
    joint = rng.choices((" and ", ", and ", ", ", " and the "), weights=(60, 15, 15, 10))[0]
    return ", ".join(others) + joint + last


def json_extraction(rng: random.Random) -> Exchange:
    """Draws a sentence and what is wanted of it."""
    sentence, values = (_free_sentence if rng.random() < _FREE_SHARE else _listed_sentence)(rng)
    keys = list(values)
    if rng.random() < 0.4:
        rng.shuffle(keys)
    keys = keys[: rng.choices((1, 2, 3, 4), weights=(15, 45, 30, 10))[0]]
    asked = _listing(rng, keys)
    if rng.random() < _EVERYTHING_SHARE:
        keys, asked = list(values), rng.choice(_EVERYTHING)
    request = rng.choice(_REQUESTS)
    answer = json.dumps({key: values[key] for key in keys}, ensure_ascii=False)
    if request.startswith(_ORDERS) and rng.random() < 0.15:
        request = rng.choice(("Please {}", "Now {}", "Can you {}")).format(lower_first(request))
    question = request.format(keys=asked, sentence=sentence)
    return Exchange(f"json:{answer}", question, answer)
