"""Tells very short stories from a small grammar, in chat and as plain text.

Held out: subjects (what the story is about). A story has one sentence from each of `_PARTS`, in order;
`is_story_like` checks a text against that grammar, since a story has no single right answer.
"""

import random
import re

from bundled_model.exchange import Exchange
from bundled_model.phrasing import dress
from bundled_model.words import COMMON_WORDS, listed

_SUBJECTS = listed(
    """
    fox dog cat bear rabbit mouse lion tiger elephant owl frog horse cow pig sheep goat duck hen wolf deer monkey
    penguin whale dolphin turtle snail bee ant butterfly spider hedgehog squirrel beaver badger otter panda koala
    kangaroo giraffe zebra hippo crocodile camel donkey pony kitten puppy swan goose crow parrot robin eagle shark
    fish crab octopus dinosaur dragon unicorn robot pirate princess prince king queen wizard witch knight giant
    ghost fairy farmer teacher baker sailor doctor nurse pilot astronaut boy girl child cloud star tree flower
    train boat rocket snowman teddy doll kite lamp teapot chair spoon mountain river moon mole bat
    """
)
_ADJECTIVES = listed(
    """
    little small brave happy lonely clever lazy old young red tiny sleepy
    """
)
_NAMES = listed(
    """
    Ruby Max Lily Tom Anna Ben Mia Leo Sam Ella Oscar Nora Jack Rosie Finn Daisy Hugo Clara Otto Alice Theo Poppy
    Emma Noah Luna Felix Ivy Toby Pip Bella
    """
)
_PLACES = (
    "in a green forest",
    "by the sea",
    "on a small hill",
    "near an old mill",
    "at the edge of a quiet town",
)
_HOBBIES = (
    "sing songs",
    "look at the clouds",
    "collect round stones",
    "bake little cakes",
    "count the stars",
)
_FINDS = ("a golden key", "a lost mitten", "a shiny red ball", "a tiny blue door", "an old map")
_FRIENDS = ("a kind owl", "a small mouse", "a wise old turtle", "a cheerful robin", "a shy hedgehog")

_PARTS: tuple[tuple[str, ...], ...] = (
    (
        "Once upon a time, there was {subject}{called} who lived {place}.",
        "Once upon a time there was {subject}{called} who lived {place}.",
    ),
    ("Every day {who} liked to {hobby}.", "Every morning {who} went out to {hobby}."),
    (
        "One day {who} found {find} and did not know what to do with it.",
        "One evening {who} found {find} on the path.",
    ),
    ("{friend} came by and offered to help.", "Then {friend} came along and they looked at it together."),
    ("From that day on they were best friends.", "They laughed, shared a cake and went home happy. The end."),
)
_OPENING = re.compile(
    r"Once upon a time,? there was (?P<subject>an? [a-z ]+?)(?: named (?P<name>[A-Z][a-z]+))? who lived"
)
_FILLERS = {"place": _PLACES, "hobby": _HOBBIES, "find": _FINDS, "friend": _FRIENDS}
_REQUESTS = listed(
    """
    Tell me a story about {s} | Tell me a story about {s} | Tell me a short story about {s} | Tell a story about {s} |
    Write a story about {s} | Write a short story about {s} | Write me a story about {s} | Make up a story about {s} |
    Give me a short story about {s} | I want a story about {s} | I would like to hear a story about {s} |
    A story about {s}
    """,
    separator="|",
)
_OPEN_REQUESTS = (
    "Tell me a story",
    "Tell me a short story",
    "Write a story",
    "Tell a short story",
    "Once upon a time",
)


def with_article(noun: str) -> str:
    """Returns the noun with a or an before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def random_subject(rng: random.Random) -> str:
    """Draws what a story is about, without its article."""
    noun = rng.choice(_SUBJECTS) if rng.random() < 0.75 else rng.choice(COMMON_WORDS)
    return f"{rng.choice(_ADJECTIVES)} {noun}" if rng.random() < 0.35 else noun


def _key(subject: str) -> str:
    """Names the noun alone, so that no adjective brings a held-out noun into training."""
    return f"story:{subject.split(' ')[-1]}"


def story(rng: random.Random, subject: str, name: str | None) -> str:
    """Draws a story of five sentences, or six where the last part has two."""
    values = {slot: rng.choice(choices) for slot, choices in _FILLERS.items()}
    values.update(
        subject=with_article(subject),
        called=f" named {name}" if name else "",
        who=name or f"the {subject}",
    )
    return " ".join(_capital(rng.choice(part).format(**values)) for part in _PARTS)


def is_story_like(text: str, example: str) -> bool:
    """Tells whether the text is a whole story of this grammar about the same subject as the example."""
    opening, wanted = _OPENING.match(text), _OPENING.match(example)
    if opening is None or wanted is None or opening["subject"] != wanted["subject"]:
        return False
    slots = {slot: f"(?i:{'|'.join(map(re.escape, choices))})" for slot, choices in _FILLERS.items()}
    who = opening["name"] or f"the {opening['subject'].split(' ', 1)[1]}"
    slots.update(subject=opening["subject"], called="( named [A-Z][a-z]+)?", who=re.escape(who))
    parts = (f"({'|'.join(_pattern(sentence, slots) for sentence in part)})" for part in _PARTS)
    return re.fullmatch(" ".join(parts), text) is not None


def _pattern(sentence: str, slots: dict[str, str]) -> str:
    """Returns a regular expression for one sentence of the grammar."""
    pieces = re.split(r"\{(\w+)\}", sentence)
    return "".join(slots[piece] if index % 2 else re.escape(piece) for index, piece in enumerate(pieces))


def stories(rng: random.Random) -> Exchange:
    """Draws a request for a story about something, sometimes with a name, sometimes leaving both open."""
    subject = random_subject(rng)
    if rng.random() < 0.12:
        subject = rng.choice(_SUBJECTS)
        name = rng.choice(_NAMES) if rng.random() < 0.3 else None
        return Exchange(_key(subject), dress(rng, rng.choice(_OPEN_REQUESTS)), story(rng, subject, name))
    return _story_about(rng, subject)


def story_questions(rng: random.Random) -> Exchange:
    """Draws a request that says what the story is to be about, as the evaluation needs."""
    return _story_about(rng, random_subject(rng))


def _story_about(rng: random.Random, subject: str) -> Exchange:
    asked_name = rng.choice(_NAMES) if rng.random() < 0.25 else None
    name = asked_name or (rng.choice(_NAMES) if rng.random() < 0.3 else None)
    about = with_article(subject) + (f" named {asked_name}" if asked_name else "")
    request = dress(rng, rng.choice(_REQUESTS).format(s=about))
    return Exchange(_key(subject), request, story(rng, subject, name))


def story_document(rng: random.Random) -> Exchange:
    """Draws a story as plain text."""
    subject = random_subject(rng)
    name = rng.choice(_NAMES) if rng.random() < 0.4 else None
    return Exchange(_key(subject), "", story(rng, subject, name) + "\n")
