"""Random prompts of an exact length, without a tokenizer: token ids for completions, short words for chat.

Prompts of one test are all different, so that no server answers one from what it cached of another. The same
seed gives the same prompts, and asking for more keeps the first ones.
"""

import numpy as np

# Short and frequent, so that most vocabularies hold each (with its leading space) as a single token.
_COMMON_WORDS = """
    the of and to in is for on that by this with you it not or be are from at as your all have new more an was
    we will home can us about if page my has search free but our one other do no time they site he up may what
    which their news out use any there see only so his when here who web also now help get view first been
    would how were me some these its like than find
"""
WORDS = tuple(_COMMON_WORDS.split())


def num_possible_prompts(choices: int, length: int) -> int:
    """How many different prompts of `length` draws from `choices` there are; never mind beyond 64 draws."""
    return int(choices ** min(length, 64))


def random_token_prompts(count: int, length: int, token_range: tuple[int, int], seed: int) -> list[list[int]]:
    """`count` distinct prompts of exactly `length` token ids, each uniform in [low, high)."""
    low, high = token_range
    return [[low + draw for draw in row] for row in _distinct_rows(count, length, high - low, seed)]


def random_word_prompts(count: int, length: int, seed: int) -> list[str]:
    """`count` distinct prompts of exactly `length` words; the server's usage tells how many tokens."""
    return [" ".join(WORDS[draw] for draw in row) for row in _distinct_rows(count, length, len(WORDS), seed)]


def _distinct_rows(count: int, length: int, choices: int, seed: int) -> list[tuple[int, ...]]:
    """Draws from [0, choices), in order of first appearance. The caller makes sure that so many exist."""
    assert num_possible_prompts(choices, length) >= count
    generator = np.random.default_rng(seed)
    rows: dict[tuple[int, ...], None] = {}
    while len(rows) < count:
        row = tuple(generator.integers(choices, size=length).tolist())
        rows.setdefault(row)
    return list(rows)
