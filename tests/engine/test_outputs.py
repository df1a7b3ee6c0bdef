"""From literal token events to what callers see."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from chairlift import SamplingParams
from chairlift.engine.text.deltas import CumulativeOutput
from chairlift.engine.text.detokenizer import StopStrings
from chairlift.engine.text.inputs import DEFAULT_TEXT, Generation, TextOptions
from chairlift.engine.text.outputs import Delivery, OutputProcessor
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.params import CompletionOutput, FinishReason, Logprob, RequestOutput
from chairlift.scheduler import Request, TokenEvent
from tests.engine.support import END_TOKEN, event
from tests.engine.tokenizers_made import make_byte_tokenizer

PROMPT = [ord("?")]


START_TOKEN = 257


def split(text: str) -> list[str | int]:
    """As a tokenizer does, for the two special tokens that are said here."""
    ids: dict[str, str | int] = {"<|im_start|>": START_TOKEN, "<|im_end|>": END_TOKEN}
    return [ids.get(part, part) for part in re.split(r"(<\|im_(?:start|end)\|>)", text) if part]


def generation_of(params: SamplingParams, request_id: str = "g", prompt: list[int] = PROMPT) -> Generation:
    requests = [Request(f"{request_id}-{index}", prompt, params, 100, index) for index in range(params.n)]
    return Generation(request_id, None, prompt, params, requests, StopStrings(params.stop, split))


class Follower:
    """One generation that is followed: events in, its state out."""

    def __init__(self, tokenizer: Tokenizer, text_options: TextOptions = DEFAULT_TEXT, **fields: Any) -> None:
        self.processor = OutputProcessor(tokenizer)
        generation = generation_of(SamplingParams(**fields))
        self.state = self.processor.open(replace(generation, text_options=text_options))
        self._sum = CumulativeOutput(self.state.generation)

    @property
    def output(self) -> RequestOutput:
        """Returns what all deltas so far add up to."""
        return self._sum.add(self.state.take())

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self.output.outputs

    def hear(self, said: bytes | list[int], finish: FinishReason | None = None, index: int = 0) -> Delivery:
        """Bytes come as tokens of a choice."""
        return self.processor.process([event(f"g-{index}", list(said), finish)])

    def score(self, tokens: bytes, finish: FinishReason | None = None, index: int = 0) -> None:
        """The first of some tokens comes with the log-probabilities of all."""
        scored = {token: Logprob(-1.0, rank) for rank, token in enumerate(tokens, start=1)}
        self.processor.process([TokenEvent(f"g-{index}", [tokens[0]], finish, logprobs=[scored])])


def test_text_and_tokens_add_up_in_outputs_that_stay_as_they_are(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer)
    assert follower.hear(b"ab") == Delivery({follower.state: None})
    before = follower.output
    follower.hear(b"c", FinishReason.LENGTH)
    assert before.outputs == [CompletionOutput(0, "ab", [97, 98], None, None)]
    assert follower.outputs == [CompletionOutput(0, "abc", [97, 98, 99], FinishReason.LENGTH, None)]
    assert follower.state.is_finished


def test_a_delta_names_the_request_and_is_finished_with_all_choices(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_tokenizer)
    state = processor.open(generation_of(SamplingParams(n=2), "name", prompt=[5, 6]))
    processor.process([event("name-1", [97], FinishReason.LENGTH)])
    delta = state.take()
    assert (delta.request_id, delta.prompt, delta.prompt_token_ids) == ("name", None, [5, 6])
    processor.process([event("name-0", [98], FinishReason.LENGTH)])
    assert (delta.finished, state.take().finished) == (False, True)


def test_a_delta_is_what_is_new_and_later_events_do_not_change_it(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer)
    follower.hear(b"ab")
    first = follower.state.take()
    follower.hear(b"c")
    follower.hear(b"d", FinishReason.LENGTH)
    told = [(delta.choices[0].text, delta.choices[0].token_ids) for delta in (first, follower.state.take())]
    assert told == [("ab", [*b"ab"]), ("cd", [*b"cd"])]
    assert (first.choices[0].num_tokens, first.finished) == (2, False)


def test_progress_tells_how_far_it_has_come_and_takes_nothing(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer)
    follower.hear(b"ab", FinishReason.LENGTH)
    (progress,) = follower.state.progress().choices
    assert (progress.text, progress.num_tokens, progress.finish_reason) == ("", 2, FinishReason.LENGTH)
    assert follower.state.take().choices[0].text == "ab"


HALF = "\N{REPLACEMENT CHARACTER}"
NOTHING, STOP, LENGTH, ABORT = None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
UP_TO_B: dict[str, Any] = {"stop": ["b"]}
END = bytes([255])  # stands for the end token in what is said
START = bytes([254])  # and for <|im_start|>, which ends nothing by itself
TURN: dict[str, Any] = {"stop": ["\n<|im_start|>user"]}


@dataclass(frozen=True)
class Ending:
    """Holds what is said event by event, what is shown after each, and how it ends; `aborts`: the engine is told to."""

    fields: dict[str, Any]
    said: list[tuple[bytes, FinishReason | None]]
    shown: list[str]
    reason: FinishReason
    stop_reason: str | int | None = None
    aborts: bool = False
    num_tokens: int | None = None  # fewer than were said


ENDINGS = {
    "an end token, which is not shown": Ending({}, [(b"hi" + END, STOP)], ["hi"], STOP),
    "a stop token, which is not shown": Ending({"stop_token_ids": [33]}, [(b"hi!", STOP)], ["hi"], STOP, 33),
    "an end token that was ignored": Ending(
        {"ignore_eos": True}, [(b"a" + END, NOTHING), (b"b", LENGTH)], ["a", "ab"], LENGTH
    ),
    "a stop string over several events": Ending(
        {"stop": ["END"]}, [(b"xE", NOTHING), (b"N", NOTHING), (b"D", NOTHING)], ["x"] * 3, STOP, "END", aborts=True
    ),
    "a stop string within an event": Ending(UP_TO_B, [(b"abcd", NOTHING)], ["a"], STOP, "b", True, num_tokens=2),
    "a stop string before surplus events": Ending(
        UP_TO_B, [(b"ab", NOTHING), (b"cd", NOTHING), (b"", ABORT)], ["a"] * 3, STOP, "b", True, num_tokens=2
    ),
    "a stop string in the last step": Ending(UP_TO_B, [(b"abc", LENGTH)], ["a"], STOP, "b", num_tokens=2),
    "a stop string before an end token": Ending(UP_TO_B, [(b"abc" + END, STOP)], ["a"], STOP, "b", num_tokens=2),
    "half a stop string, which is shown then": Ending(
        {"stop": ["END"]}, [(b"xEN", NOTHING), (END, STOP)], ["x", "xEN"], STOP
    ),
    "half a character, shown then": Ending({}, [(b"a\xe2\x82", NOTHING), (b"", ABORT)], ["a", "a" + HALF], ABORT),
    "half a character that is a stop string": Ending({"stop": [HALF]}, [(b"a\xe2", LENGTH)], ["a"], STOP, HALF),
    "a stop string after min_tokens": Ending(
        {**UP_TO_B, "min_tokens": 3}, [(b"abb", NOTHING), (b"abc", NOTHING)], ["abb", "abba"], STOP, "b", True, 5
    ),
    "a stop string that is an end token": Ending(
        {"stop": ["<|im_end|>"]}, [(b"a" + END, STOP)], ["a"], STOP, "<|im_end|>"
    ),
    "a stop string that is a special token": Ending(
        {"stop": ["x", "<|im_start|>"]}, [(b"a" + START + b"b", NOTHING)], ["a"], STOP, "<|im_start|>", True, 2
    ),
    "a stop string with a special token in it": Ending(
        TURN, [(b"a\n" + START, NOTHING), (b"user", NOTHING)], ["a", "a"], STOP, "\n<|im_start|>user", aborts=True
    ),
    "a stop string that spells a special token": Ending(
        TURN, [(b"a\n<|im_start|>user", NOTHING)], ["a"], STOP, "\n<|im_start|>user", aborts=True
    ),
    "a stop string before an end token in it": Ending(
        {"stop": ["\n<|im_end|>"]}, [(b"a\n" + END, STOP)], ["a"], STOP, "\n<|im_end|>"
    ),
    "half a stop string with a special token": Ending(
        TURN, [(b"a\n" + START + b"us", NOTHING), (b"es", LENGTH)], ["a", "a\nuses"], LENGTH
    ),
    "a special token that no stop string spells": Ending(TURN, [(b"a" + END + b"b", LENGTH)], ["ab"], LENGTH),
    "half a character before a special token": Ending(
        {"stop": [HALF + "<|im_start|>"]},
        [(b"a\xe2" + START, NOTHING)],
        ["a"],
        STOP,
        HALF + "<|im_start|>",
        aborts=True,
    ),
    "a special token before min_tokens": Ending(
        {"stop": ["<|im_start|>"], "min_tokens": 2},
        [(b"a" + START, NOTHING), (b"b" + START, NOTHING)],
        ["a", "ab"],
        STOP,
        "<|im_start|>",
        aborts=True,
    ),
    "an abort, with what there is": Ending({}, [(b"ab", NOTHING), (b"", ABORT)], ["ab", "ab"], ABORT),
}


@pytest.mark.parametrize("case", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_text_ends_with(byte_tokenizer: Tokenizer, case: Ending) -> None:
    follower = Follower(byte_tokenizer, **case.fields)
    shown, aborted, tokens = [], [], []
    for said, reason in case.said:
        spoken = [{END[0]: END_TOKEN, START[0]: START_TOKEN}.get(byte, byte) for byte in said]
        stop_reason = case.stop_reason if isinstance(case.stop_reason, int) else None
        aborted += follower.processor.process([event("g-0", spoken, reason, stop_reason)]).to_abort
        shown.append(follower.outputs[0].text)
        tokens += spoken
    assert shown == case.shown
    assert aborted == ["g-0"] * case.aborts
    expected = CompletionOutput(0, shown[-1], tokens[: case.num_tokens], case.reason, case.stop_reason)
    assert follower.outputs == [expected]


def test_choices_grow_and_end_each_on_their_own(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_tokenizer)
    state = processor.open(generation_of(SamplingParams(n=3, stop=["!"])))
    delivery = processor.process([event("g-2", [97, 33]), event("g-0", [98]), event("g-1", [99], FinishReason.LENGTH)])
    assert delivery == Delivery({state: None}, ["g-2"])
    assert state.unfinished_ids == ["g-0"]
    outputs = [(output.index, output.text, output.finish_reason) for output in state.take().choices]
    assert outputs == [(0, "b", None), (1, "c", "length"), (2, "a", "stop")]


def test_events_find_their_generation_among_several_and_are_dropped_once_it_is_closed(
    byte_tokenizer: Tokenizer,
) -> None:
    processor = OutputProcessor(byte_tokenizer)
    states = [processor.open(generation_of(SamplingParams(), name)) for name in ("x", "x-0", "y")]
    delivery = processor.process([event("x-0-0", [97]), event("x-0", [98]), event("who-0", [99])])
    assert list(delivery.changed) == [states[1], states[0]]
    processor.close(states[0])
    assert processor.process([event("x-0", [97])]) == Delivery()
    processor.close(states[0])
    assert [state.take().choices[0].text for state in states] == ["b", "a", ""]


def test_a_tokens_text_is_decoded_once_however_often_it_is_scored(tmp_path: Path) -> None:
    decoded: list[Sequence[int]] = []

    class Counting(Tokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            if not skip_special_tokens:
                decoded.append(token_ids)
            return super().decode(token_ids, skip_special_tokens)

    make_byte_tokenizer(tmp_path)
    follower = Follower(Counting(tmp_path), logprobs=1)
    for _ in range(50):
        follower.score(b"xy")
    (output,) = follower.outputs
    assert output.logprobs is not None
    assert [each.decoded_token for each in output.logprobs[-1].values()] == ["x", "y"]
    assert decoded[1:] == [[97, ord("x")], [97, ord("y")]]  # each after the same text


class Sentence:
    """A watcher: one sentence is enough."""

    def __init__(self) -> None:
        self.seen = ""

    def push(self, text: str) -> bool:
        self.seen += text
        return "." in self.seen


ONE_SENTENCE = TextOptions(new_watcher=Sentence)


def test_a_text_ends_where_its_watcher_says_and_the_engine_is_told(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, ONE_SENTENCE, n=2)
    assert [follower.hear(text).to_abort for text in (b"No", b"w. And then", b"more")] == [[], ["g-0"], []]
    follower.hear(b"bc", index=1)  # whose watcher is its own
    ended = CompletionOutput(0, "Now.", [*b"Now."], FinishReason.STOP, None)
    assert follower.outputs == [ended, CompletionOutput(1, "bc", [*b"bc"])]


def test_a_watcher_sees_what_is_shown_and_ends_nothing_before_min_tokens(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, ONE_SENTENCE, min_tokens=4, stop=["x"])
    follower.hear(b"a.bcde")
    assert follower.outputs == [CompletionOutput(0, "a.bcd", [*b"a.bcd"], FinishReason.STOP, None)]
    hidden = Follower(byte_tokenizer, ONE_SENTENCE, stop=[".x"])
    hidden.hear(b"a.")
    assert hidden.outputs == [CompletionOutput(0, "a", [*b"a."])]
    hidden.hear(b"b")
    assert (hidden.outputs[0].text, hidden.outputs[0].finish_reason) == ("a.b", FinishReason.STOP)


def test_a_special_token_is_part_of_the_text_where_that_is_wanted(byte_tokenizer: Tokenizer) -> None:
    tokens = [*"é".encode()[:1], 257, *b"a", 256, *"ü".encode()]
    shown = (("<|im_start|>", "no such token"), HALF + "<|im_start|>aü"), ((), byte_tokenizer.decode(tokens))
    for shown_tokens, text in shown:
        follower = Follower(byte_tokenizer, TextOptions(shown_tokens=shown_tokens))
        for token in tokens:
            follower.hear([token])
        follower.hear(b"", FinishReason.LENGTH)
        assert follower.outputs[0].text == text


def test_a_stop_string_finds_a_special_token_that_is_shown_as_the_text_it_is(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, TextOptions(shown_tokens=("<|im_start|>",)), stop=["a<|im_start|>"])
    follower.hear([*b"ba", START_TOKEN, *b"c"])
    assert follower.outputs == [CompletionOutput(0, "b", [*b"ba", START_TOKEN], FinishReason.STOP, "a<|im_start|>")]


def test_a_state_that_was_kept_does_not_change_and_shares_what_it_can(byte_tokenizer: Tokenizer) -> None:
    follower, states = Follower(byte_tokenizer, logprobs=0, n=2), []
    for token in (b"a", b"b", b"c"):
        follower.score(token)
        states.append(follower.outputs[0])
    assert [state.text for state in states] == ["a", "ab", "abc"]
    assert [len(state.logprobs or []) for state in states] == [1, 2, 3]
    assert [list(state.text_offsets or []) for state in states] == [[0], [0, 1], [0, 1, 2]]
    second, third = states[1].logprobs, states[2].logprobs
    assert second is not None
    assert third is not None
    assert (second[-1], third[:2], third == second) == (third[1], list(second), False)
    with pytest.raises(IndexError):
        _ = second[2]
    assert second[0] is third[0]
    follower.score(b"d", FinishReason.LENGTH)
    finished = follower.outputs[0]
    follower.score(b"x", index=1)
    assert isinstance(finished.logprobs, list)
    assert follower.outputs[0] is finished  # and is not copied again while the other one goes on
