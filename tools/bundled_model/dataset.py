"""Endless training batches made from the skills.

A row is one conversation or a run of plain documents. `batches` yields (ids, targets) tensors of equal
shape [rows, length]; targets are shifted by one and hold IGNORED wherever nothing is to be learnt: in
system and user turns and in padding. Rows are padded on the right, so a causal model needs no mask.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from bundled_model.exchange import Exchange, Maker, draw
from bundled_model.fact_skills import calendar, fact_document, opposites
from bundled_model.number_skills import addition, subtraction, sum_document
from bundled_model.story_skills import stories, story_document
from bundled_model.talk_skills import FIXED_ANSWERS, small_talk
from bundled_model.unknown_skills import SYSTEM_TEXTS, random_words, unknown
from bundled_model.vocabulary import END_OF_TEXT_ID, ROLE_IDS, TURN_END_ID, encode_text, encode_turn
from bundled_model.word_skills import counting, occurrences, reversing, spelling, word_document

IGNORED = -100
MAX_ROW_TOKENS = 1536
_POOL_ROWS = 1024
_DOCUMENT_ROW_SHARE = 0.1
_MAX_DOCUMENTS = 8
_SYSTEM_SHARE = 0.3
_CUT_SHARE = 0.75
_CUT_CHARACTERS = 20

CHAT_MIXTURE: tuple[tuple[Maker, float], ...] = (
    (addition, 18),
    (subtraction, 24),
    (spelling, 6),
    (reversing, 12),
    (counting, 6),
    (occurrences, 8),
    (calendar, 5),
    (opposites, 6),
    (stories, 1.5),
    (small_talk, 4),
    (unknown, 9.5),
)
DOCUMENT_MIXTURE: tuple[tuple[Maker, float], ...] = (
    (sum_document, 60),
    (word_document, 20),
    (fact_document, 16),
    (story_document, 4),
)
_TURN_COUNTS = ((1, 36), (2, 30), (3, 18), (4, 11), (8, 4), (16, 1))


@dataclass
class Row:
    """Token ids of a row and, for each, whether the model is to learn to produce it."""

    ids: list[int] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], learnt: bool) -> None:
        """Append tokens."""
        self.ids += ids
        self.learnt += [learnt] * len(ids)

    def targets(self) -> list[int]:
        """For each token the next one, or IGNORED."""
        following = zip(self.ids[1:], self.learnt[1:], strict=True)
        return [token if learnt else IGNORED for token, learnt in following] + [IGNORED]


def _pick(rng: random.Random, mixture: tuple[tuple[Maker, float], ...]) -> Exchange:
    """One training exchange from a mixture."""
    maker = rng.choices([maker for maker, _ in mixture], weights=[weight for _, weight in mixture])[0]
    return draw(maker, rng, held_out=False)


def _add_system(rng: random.Random, row: Row) -> None:
    """Begin the row with a system message that has no bearing on the answers."""
    text = rng.choice(SYSTEM_TEXTS) if rng.random() < 0.8 else random_words(rng)
    row.add(encode_turn("system", text), learnt=False)


def conversation(rng: random.Random) -> Row:
    """A chat of one or more turns.

    Most rows end inside a fixed long answer once one begins: its beginning is what has to be learnt,
    the rest is the same every time and would take a large share of the training time.
    """
    row = Row()
    if rng.random() < _SYSTEM_SHARE:
        _add_system(rng, row)
    turns = rng.choices([count for count, _ in _TURN_COUNTS], weights=[weight for _, weight in _TURN_COUNTS])[0]
    for _ in range(turns):
        exchange = _pick(rng, CHAT_MIXTURE)
        row.add(encode_turn("user", exchange.question), learnt=False)
        row.add([ROLE_IDS["assistant"]], learnt=False)
        if exchange.answer in FIXED_ANSWERS and rng.random() < _CUT_SHARE:
            row.add(encode_text(exchange.answer[:_CUT_CHARACTERS]), learnt=True)
            break
        row.add([*encode_text(exchange.answer), TURN_END_ID], learnt=True)
    return row


def documents(rng: random.Random) -> Row:
    """A few plain documents, each closed by the end-of-text token.

    Operands and words at the head of a document are random, so there is nothing to learn in them.
    """
    row = Row()
    for _ in range(rng.randint(1, _MAX_DOCUMENTS)):
        exchange = _pick(rng, DOCUMENT_MIXTURE)
        row.add(encode_text(exchange.question), learnt=False)
        row.add([*encode_text(exchange.answer), END_OF_TEXT_ID], learnt=True)
    return row


def random_row(rng: random.Random) -> Row:
    """A conversation, or now and then plain documents."""
    row = documents(rng) if rng.random() < _DOCUMENT_ROW_SHARE else conversation(rng)
    return Row(row.ids[:MAX_ROW_TOKENS], row.learnt[:MAX_ROW_TOKENS])


def _stack(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded to the longest of them."""
    length = max(len(row.ids) for row in rows)
    ids = [row.ids + [END_OF_TEXT_ID] * (length - len(row.ids)) for row in rows]
    targets = [row.targets() + [IGNORED] * (length - len(row.ids)) for row in rows]
    return torch.tensor(ids), torch.tensor(targets)


def _split(rows: list[Row], tokens_per_batch: int) -> Iterator[list[Row]]:
    """Groups of rows of similar length, each of about tokens_per_batch tokens with its padding."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if group and (len(group) + 1) * len(row.ids) > tokens_per_batch:
            yield group
            group = []
        group.append(row)
    yield group


def batches(seed: int, tokens_per_batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end; the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        groups = list(_split([random_row(rng) for _ in range(_POOL_ROWS)], tokens_per_batch))
        rng.shuffle(groups)
        for group in groups:
            yield _stack(group)
