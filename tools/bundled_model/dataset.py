"""Makes endless training batches from the skills.

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
from bundled_model.json_skills import json_extraction
from bundled_model.number_skills import addition, single_digits, subtraction, sum_document
from bundled_model.story_skills import stories, story_document
from bundled_model.talk_skills import FIXED_ANSWERS, small_talk
from bundled_model.tool_format import calls_text, response_text, system_text
from bundled_model.tool_skills import Offer, may_be_meant, offers, unserved, use
from bundled_model.unknown_skills import SYSTEM_TEXTS, random_words, unknown
from bundled_model.vocabulary import END_OF_TEXT_ID, ROLE_IDS, TURN_END_ID, encode_text, encode_turn
from bundled_model.word_skills import counting, occurrences, reversing, spelling, word_document

IGNORED = -100
MAX_ROW_TOKENS = 1536
_POOL_ROWS = 1024
_MAX_DOCUMENTS = 8
_SYSTEM_SHARE = 0.3
_CUT_SHARE = 0.75
_CUT_CHARACTERS = 20

CHAT_MIXTURE: tuple[tuple[Maker, float], ...] = (
    (addition, 18),
    (subtraction, 0),  # its weight depends on the stage
    (single_digits, 4),
    (spelling, 6),
    (reversing, 12),
    (counting, 6),
    (occurrences, 8),
    (calendar, 5),
    (opposites, 6),
    (stories, 1.5),
    (small_talk, 4),
    (unknown, 9.5),
    (json_extraction, 14),
    (unserved, 3),
)
DOCUMENT_MIXTURE: tuple[tuple[Maker, float], ...] = (
    (sum_document, 45),
    (word_document, 35),
    (fact_document, 16),
    (story_document, 4),
)
_RESULT_SHARE = 0.6  # of calls, those that are followed up
_INSTRUCTIONS_SHARE = 0.4
_TOOL_TURNS = (1, 1, 1, 2, 2, 3)
_TURN_COUNTS = ((1, 36), (2, 30), (3, 18), (4, 11), (8, 4), (16, 1))


@dataclass(frozen=True)
class Stage:
    """Says what a stage of the training makes more or less of.

    `documents` and `tools` are the shares of plain documents and of chats with tools among all rows. `unfit` is the
    share of questions in a chat with tools that fit none of them; `foreign` is the share of those that are for tools
    that are not there. `subtraction` is the weight of that skill among the others.
    """

    documents: float
    tools: float
    unfit: float
    foreign: float
    subtraction: float


FIRST_STAGE = Stage(documents=0.12, tools=0.2, unfit=0.3, foreign=0.3, subtraction=24)
# What the first stage leaves weakest: choosing among tools, leaving them alone, subtraction.
SECOND_STAGE = Stage(documents=0.12, tools=0.33, unfit=0.4, foreign=0.5, subtraction=40)


@dataclass
class Row:
    """Holds the token ids of a row and, for each, whether the model is to learn to produce it."""

    ids: list[int] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)

    def add(self, ids: list[int], learnt: bool) -> None:
        """Append tokens."""
        self.ids += ids
        self.learnt += [learnt] * len(ids)

    def targets(self) -> list[int]:
        """Returns for each token the next one, or IGNORED."""
        following = zip(self.ids[1:], self.learnt[1:], strict=True)
        return [token if learnt else IGNORED for token, learnt in following] + [IGNORED]


def _pick_maker(rng: random.Random, mixture: tuple[tuple[Maker, float], ...]) -> Maker:
    """Draws a maker, as often as its weight says."""
    return rng.choices([maker for maker, _ in mixture], weights=[weight for _, weight in mixture])[0]


def _pick_chat_maker(rng: random.Random, stage: Stage) -> Maker:
    """Draws a maker of questions for chats."""
    return _pick_maker(rng, tuple((maker, weight or stage.subtraction) for maker, weight in CHAT_MIXTURE))


def _instructions(rng: random.Random) -> str:
    """Draws a system message that has no bearing on the answers."""
    return rng.choice(SYSTEM_TEXTS) if rng.random() < 0.8 else random_words(rng)


def _add_exchange(rng: random.Random, row: Row, exchange: Exchange) -> bool:
    """Adds a question and its answer; tells whether the conversation may go on.

    Most rows end inside a fixed long answer once one begins: its beginning is what has to be learnt,
    the rest is the same every time and would take a large share of the training time.
    """
    row.add(encode_turn("user", exchange.question), learnt=False)
    row.add([ROLE_IDS["assistant"]], learnt=False)
    if exchange.answer in FIXED_ANSWERS and rng.random() < _CUT_SHARE:
        row.add(encode_text(exchange.answer[:_CUT_CHARACTERS]), learnt=True)
        return False
    row.add([*encode_text(exchange.answer), TURN_END_ID], learnt=True)
    return True


def conversation(rng: random.Random, stage: Stage) -> Row:
    """Draws a chat of one or more turns."""
    row = Row()
    if rng.random() < _SYSTEM_SHARE:
        row.add(encode_turn("system", _instructions(rng)), learnt=False)
    turns = rng.choices([count for count, _ in _TURN_COUNTS], weights=[weight for _, weight in _TURN_COUNTS])[0]
    for _ in range(turns):
        if not _add_exchange(rng, row, draw(_pick_chat_maker(rng, stage), rng, held_out=False)):
            break
    return row


def unfitting(rng: random.Random, stage: Stage, offered: list[Offer], held_out: bool) -> Exchange:
    """Draws a question that none of the tools is for."""
    while True:
        maker = unserved if rng.random() < stage.foreign else _pick_chat_maker(rng, stage)
        exchange = draw(maker, rng, held_out)
        if not may_be_meant(offered, exchange.question):
            return exchange


def _add_use(rng: random.Random, row: Row, offered: list[Offer]) -> bool:
    """Adds a question for a tool, its calls, and mostly results and answer; tells whether the chat may go on."""
    while (made := use(rng, offered, held_out=False)) is None:
        pass
    row.add([*encode_turn("user", made.question), ROLE_IDS["assistant"]], learnt=False)
    row.add([*encode_text(calls_text(made.calls)), TURN_END_ID], learnt=True)
    if rng.random() > _RESULT_SHARE:
        return False
    for result in made.results:
        row.add(encode_turn("user", response_text(result)), learnt=False)
    row.add([ROLE_IDS["assistant"]], learnt=False)
    row.add([*encode_text(made.answer), TURN_END_ID], learnt=True)
    return True


def tool_conversation(rng: random.Random, stage: Stage) -> Row:
    """Draws a chat with tools on offer."""
    row, offered = Row(), offers(rng)
    instructions = _instructions(rng) if rng.random() < _INSTRUCTIONS_SHARE else ""
    row.add(encode_turn("system", system_text([offer.tool for offer in offered], instructions)), learnt=False)
    goes_on = True
    for _ in range(rng.choice(_TOOL_TURNS)):
        if not goes_on:
            break
        if rng.random() < stage.unfit:
            goes_on = _add_exchange(rng, row, unfitting(rng, stage, offered, held_out=False))
        else:
            goes_on = _add_use(rng, row, offered)
    return row


def documents(rng: random.Random) -> Row:
    """Draws a few plain documents, each closed by the end-of-text token.

    Operands and words at the head of a document are random, so there is nothing to learn in them.
    """
    row = Row()
    for _ in range(rng.randint(1, _MAX_DOCUMENTS)):
        exchange = draw(_pick_maker(rng, DOCUMENT_MIXTURE), rng, held_out=False)
        row.add(encode_text(exchange.question), learnt=False)
        row.add([*encode_text(exchange.answer), END_OF_TEXT_ID], learnt=True)
    return row


def random_row(rng: random.Random, stage: Stage) -> Row:
    """Draws a conversation, with or without tools, or now and then plain documents."""
    kind = rng.random()
    if kind < stage.documents:
        row = documents(rng)
    elif kind < stage.documents + stage.tools:
        row = tool_conversation(rng, stage)
    else:
        row = conversation(rng, stage)
    return Row(row.ids[:MAX_ROW_TOKENS], row.learnt[:MAX_ROW_TOKENS])


def _stack(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads rows to the longest of them."""
    length = max(len(row.ids) for row in rows)
    ids = [row.ids + [END_OF_TEXT_ID] * (length - len(row.ids)) for row in rows]
    targets = [row.targets() + [IGNORED] * (length - len(row.ids)) for row in rows]
    return torch.tensor(ids), torch.tensor(targets)


def _split(rows: list[Row], tokens_per_batch: int) -> Iterator[list[Row]]:
    """Returns groups of rows of similar length, each of about tokens_per_batch tokens with its padding."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if group and (len(group) + 1) * len(row.ids) > tokens_per_batch:
            yield group
            group = []
        group.append(row)
    yield group


def batches(seed: int, stage: Stage, tokens_per_batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches without end; the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        groups = list(_split([random_row(rng, stage) for _ in range(_POOL_ROWS)], tokens_per_batch))
        rng.shuffle(groups)
        for group in groups:
            yield _stack(group)
