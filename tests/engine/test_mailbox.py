"""A mailbox hands over what generations gain, each ending once, however many events come after."""

import asyncio
from pathlib import Path

import pytest

from chairlift import SamplingParams
from chairlift.engine.mailbox import Mailbox
from chairlift.engine.text.outputs import OutputProcessor
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.params import FinishReason
from chairlift.scheduler import TokenEvent
from tests.engine.support import event
from tests.engine.test_outputs import generation_of
from tests.engine.tokenizers_made import make_byte_tokenizer


@pytest.fixture
def processor(tmp_path: Path) -> OutputProcessor:
    make_byte_tokenizer(tmp_path)
    return OutputProcessor(Tokenizer(tmp_path))


@pytest.mark.parametrize("wants_steps", [True, False])
async def test_surplus_after_an_end_is_no_second_end(processor: OutputProcessor, wants_steps: bool) -> None:
    """A stop string ends the first text, and what the engine still tells of it comes before the second one ends."""
    states = [processor.open(generation_of(SamplingParams(stop="\n"), name)) for name in ("first", "second")]
    mailbox = Mailbox(states, wants_steps)

    def deliver(*events: TokenEvent) -> None:
        for state in processor.process(events).changed:
            mailbox.notify(state.generation.request_id)

    told: list[tuple[int, str, bool]] = []

    async def read() -> None:
        async for index, delta in mailbox:
            told.append((index, delta.choices[0].text, delta.finished))

    reading = asyncio.create_task(read())
    deliver(event("first-0", list(b"42\n")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    deliver(event("first-0", list(b"more"), FinishReason.ABORT))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    deliver(event("second-0", list(b"7\n")))
    await asyncio.wait_for(reading, 10)
    assert told == [(0, "42", True), (1, "7", True)]
