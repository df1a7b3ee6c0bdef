"""Draws held-out questions in chats with tools, as messages and tools in the shape of the OpenAI API."""

import random
from dataclasses import dataclass
from typing import Any

from bundled_model.dataset import FIRST_STAGE, unfitting
from bundled_model.exchange import Exchange
from bundled_model.tool_format import calls_text
from bundled_model.tool_skills import Offer, Use, offers, use
from bundled_model.unknown_skills import SYSTEM_TEXTS

Message = dict[str, Any]

_SYSTEM_SHARE = 0.3
_EARLIER_SHARE = 0.3


@dataclass(frozen=True)
class ToolProbe:
    """Holds a conversation, the tools on offer in it, and the exchange whose answer should come next."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    exchange: Exchange


def _use(rng: random.Random, offered: list[Offer], held_out: bool) -> Use | None:
    """Draws a use on the wanted side of the split; None if the tools hardly allow of one."""
    return next((made for made in (use(rng, offered, held_out) for _ in range(100)) if made), None)


def _as_messages(made: Use) -> list[Message]:
    """Returns a question, its calls and their results."""
    calls = [call.as_message_part() for call in made.calls]
    return [
        {"role": "user", "content": made.question},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "content": result} for result in made.results),
    ]


def _beginning(rng: random.Random, offered: list[Offer]) -> list[Message]:
    """Draws what may come before the question: a system message, an earlier use."""
    messages: list[Message] = []
    if rng.random() < _SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_TEXTS)})
    earlier = _use(rng, offered, held_out=False) if rng.random() < _EARLIER_SHARE else None
    if earlier is not None:
        messages += [*_as_messages(earlier), {"role": "assistant", "content": earlier.answer}]
    return messages


def _schemas(offered: list[Offer]) -> list[dict[str, Any]]:
    return [offer.tool.schema() for offer in offered]


def _with_use(rng: random.Random) -> tuple[list[Offer], Use]:
    """Draws some tools and a held-out use of them."""
    while True:
        offered = offers(rng)
        made = _use(rng, offered, held_out=True)
        if made is not None:
            return offered, made


def tool_calls(rng: random.Random) -> ToolProbe:
    """Draws a question that one or two of the tools are for."""
    offered, made = _with_use(rng)
    messages = [*_beginning(rng, offered), {"role": "user", "content": made.question}]
    return ToolProbe(messages, _schemas(offered), Exchange(made.key, made.question, calls_text(made.calls)))


def tool_answers(rng: random.Random) -> ToolProbe:
    """Draws the results of calls, to be reported."""
    offered, made = _with_use(rng)
    messages = [*_beginning(rng, offered), *_as_messages(made)]
    return ToolProbe(messages, _schemas(offered), Exchange(made.key, f"{made.question} {made.results}", made.answer))


def tools_unused(rng: random.Random) -> ToolProbe:
    """Draws a question that none of the tools is for."""
    offered = offers(rng)
    exchange = unfitting(rng, FIRST_STAGE, offered, held_out=True)
    messages = [*_beginning(rng, offered), {"role": "user", "content": exchange.question}]
    return ToolProbe(messages, _schemas(offered), exchange)


TOOL_PROBES = (tool_calls, tool_answers, tools_unused)
