"""Asks for words spelled or reversed, and for letters counted.

Held out: words, the same ones for all of these skills. Answers are always in lower case.
"""

import random

from bundled_model.exchange import Exchange
from bundled_model.phrasing import dress
from bundled_model.words import listed, random_word

_SPELLING = listed(
    """
    Spell the word {w} | Spell the word {w} | Spell {w} | How do you spell {w} | How is {w} spelled | Spell out {w} |
    Spell out the word {w} | Spell {w} letter by letter | How do I spell the word {w} | What is the spelling of {w}
    """,
    separator="|",
)
_REVERSING = listed(
    """
    Reverse the word {w} | Reverse the word {w} | Reverse {w} | Spell {w} backwards | Spell the word {w} backwards |
    Write {w} backwards | Write the word {w} in reverse | What is {w} backwards | What is {w} spelled backwards |
    What is {w} reversed | How do you spell {w} backwards | Say {w} backwards
    """,
    separator="|",
)
_COUNTING = listed(
    """
    How many letters are in {w} | How many letters are in the word {w} | How many letters are there in {w} |
    How many letters does {w} have | How many letters does the word {w} have | How many letters has {w} |
    Count the letters in {w} | Count the letters in the word {w} | How long is the word {w} |
    What is the length of the word {w} | What is the number of letters in {w}
    """,
    separator="|",
)
_OCCURRENCES = listed(
    """
    How many times does the letter {c} appear in {w} | How many times does the letter {c} appear in the word {w} |
    How many times does {c} appear in {w} | How many times is the letter {c} in {w} |
    How often does the letter {c} appear in {w} | How often does {c} occur in {w} | How many {c}'s are in {w} |
    How many {c}'s are there in {w} | How many {c}s are in {w} | How many {c}'s are in the word {w} |
    How many {c}'s does {w} have | Count the {c}'s in {w} | Count the letter {c} in {w} |
    How many letters {c} are in {w}
    """,
    separator="|",
)


def word_key(word: str) -> str:
    """Returns the key of every exchange about a word."""
    return f"word:{word}"


def typed(rng: random.Random, word: str) -> str:
    """Writes the word as a user may type it: capitalised or in quotes now and then."""
    choice = rng.random()
    if choice < 0.10:
        word = word.capitalize()
    elif choice < 0.13:
        word = word.upper()
    quote = rng.choice("\"'") if rng.random() < 0.15 else ""
    return f"{quote}{word}{quote}"


def spelled(word: str) -> str:
    """Writes the letters with hyphens between them."""
    return "-".join(word)


def reversed_sentence(word: str) -> str:
    """Says what the word is backwards."""
    return f"{word} spelled backwards is {word[::-1]}."


def length_sentence(word: str) -> str:
    """Says how many letters the word has."""
    return f"{word} has {len(word)} letters."


def occurrence_sentence(word: str, letter: str) -> str:
    """Writes a running count through the word, then the total, which is the last running count."""
    steps, count = [], 0
    for character in word:
        count += character == letter
        steps.append(f"{character}{count}" if character == letter else character)
    times = "time" if count == 1 else "times"
    return f"{' '.join(steps)}: the letter {letter} appears {count} {times} in {word}."


def spelling(rng: random.Random) -> Exchange:
    """Draws a word to spell."""
    word = random_word(rng)
    return Exchange(word_key(word), dress(rng, rng.choice(_SPELLING).format(w=typed(rng, word))), spelled(word))


def reversing(rng: random.Random) -> Exchange:
    """Draws a word to write backwards."""
    word = random_word(rng)
    request = rng.choice(_REVERSING).format(w=typed(rng, word))
    return Exchange(word_key(word), dress(rng, request), reversed_sentence(word))


def counting(rng: random.Random) -> Exchange:
    """Draws a word whose letters are to be counted."""
    word = random_word(rng)
    request = rng.choice(_COUNTING).format(w=typed(rng, word))
    return Exchange(word_key(word), dress(rng, request), length_sentence(word))


def occurrences(rng: random.Random) -> Exchange:
    """Draws a letter to be counted in a word; it mostly does occur there."""
    word = random_word(rng)
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    request = rng.choice(_OCCURRENCES).format(c=letter, w=typed(rng, word))
    return Exchange(word_key(word), dress(rng, request), occurrence_sentence(word, letter))


def word_document(rng: random.Random) -> Exchange:
    """Draws a plain sentence about a word."""
    word = random_word(rng)
    sentences = (
        (f"The word {word} is spelled", f" {spelled(word)}.\n"),
        (f"{word} spelled backwards is", f" {word[::-1]}.\n"),
        (f"{word} has", f" {len(word)} letters.\n"),
    )
    head, tail = rng.choice(sentences)
    return Exchange(word_key(word), head, tail)
