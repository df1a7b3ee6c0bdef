"""From literal token events to what callers see."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from chairlift import SamplingParams
from chairlift.engine.text.inputs import DEFAULT_TEXT, Generation, StopStrings, TextOptions
from chairlift.engine.text.outputs import Delivery, GenerationState, OutputProcessor
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.params import CompletionOutput, FinishReason, Logprob
from chairlift.scheduler import Request, TokenEvent
from tests.engine.support import END_TOKEN, event

PROMPT = [ord("?")]


def generation_of(params: SamplingParams, request_id: str = "g", prompt: list[int] = PROMPT) -> Generation:
    requests = [Request(f"{request_id}-{index}", prompt, params, 100, index) for index in range(params.n)]
    return Generation(request_id, None, prompt, params, requests, StopStrings(params.stop))


class Follower:
    """One generation that is followed: events in, its state out."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, text_options: TextOptions = DEFAULT_TEXT) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.state = self.processor.open(replace(generation_of(params), text_options=text_options))

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self.state.snapshot().outputs

    def text(
        self, text: str, finish: FinishReason | None = None, stop_reason: int | None = None, end: int | None = None
    ) -> Delivery:
        """The bytes of a text come as tokens of the first choice, then `end` if given."""
        tokens = [*text.encode(), *([] if end is None else [end])]
        return self.processor.process([event("g-0", tokens, finish, stop_reason)])


def test_text_and_tokens_accumulate(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams())
    delivery = follower.text("ab")
    assert delivery == Delivery([follower.state], [])
    assert follower.outputs == [CompletionOutput(0, "ab", [97, 98], None, None)]
    follower.text("c", FinishReason.LENGTH)
    assert follower.outputs == [CompletionOutput(0, "abc", [97, 98, 99], FinishReason.LENGTH, None)]
    assert follower.state.is_finished


def test_a_snapshot_carries_the_generation_and_is_finished_with_all_choices(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_tokenizer)
    state = processor.open(generation_of(SamplingParams(n=2), "name", prompt=[5, 6]))
    processor.process([event("name-1", [97], FinishReason.LENGTH)])
    snapshot = state.snapshot()
    assert (snapshot.request_id, snapshot.prompt, snapshot.prompt_token_ids) == ("name", None, [5, 6])
    assert not snapshot.finished
    processor.process([event("name-0", [98], FinishReason.LENGTH)])
    assert state.snapshot().finished
    assert not snapshot.finished


def test_a_snapshot_does_not_change_with_later_tokens(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams())
    follower.text("a")
    before = follower.state.snapshot()
    follower.text("b", FinishReason.LENGTH)
    assert before.outputs == [CompletionOutput(0, "a", [97], None, None)]


def test_an_end_token_is_in_the_tokens_but_not_in_the_text(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams())
    follower.text("hi", FinishReason.STOP, end=END_TOKEN)
    assert follower.outputs == [CompletionOutput(0, "hi", [104, 105, END_TOKEN], FinishReason.STOP, None)]


def test_a_stop_token_is_in_the_tokens_but_not_in_the_text_and_is_the_stop_reason(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(stop_token_ids=[33]))
    delivery = follower.text("hi", FinishReason.STOP, stop_reason=33, end=33)
    assert follower.outputs == [CompletionOutput(0, "hi", [104, 105, 33], FinishReason.STOP, 33)]
    assert delivery.to_abort == []


def test_an_ordinary_looking_end_token_that_was_ignored_is_shown_if_it_has_text(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(ignore_eos=True))
    follower.text("a", end=END_TOKEN)
    follower.text("b", FinishReason.LENGTH)
    assert follower.outputs == [CompletionOutput(0, "ab", [97, END_TOKEN, 98], FinishReason.LENGTH, None)]


def test_a_stop_string_across_tokens_ends_the_text_before_it_and_asks_for_an_abort(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(stop=["END"]))
    assert follower.text("xE").to_abort == []
    assert follower.text("N") == Delivery([follower.state], [])
    assert follower.outputs[0].text == "x"
    assert follower.text("D") == Delivery([follower.state], ["g-0"])
    assert follower.outputs == [CompletionOutput(0, "x", [120, 69, 78, 68], FinishReason.STOP, "END")]


def test_tokens_end_with_the_one_that_completes_the_stop_string(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(stop=["b"]))
    delivery = follower.text("abcd")
    assert delivery.to_abort == ["g-0"]
    assert follower.outputs == [CompletionOutput(0, "a", [97, 98], FinishReason.STOP, "b")]


def test_surplus_events_after_a_stop_string_are_dropped(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(stop=["b"]))
    follower.text("ab")
    assert follower.text("cd").to_abort == []
    assert follower.processor.process([event("g-0", [], FinishReason.ABORT)]).to_abort == []
    assert follower.outputs == [CompletionOutput(0, "a", [97, 98], FinishReason.STOP, "b")]


def test_no_abort_is_asked_for_if_the_sequence_ended_by_itself_in_the_same_step(byte_tokenizer: Tokenizer) -> None:
    for reason, end in [(FinishReason.LENGTH, None), (FinishReason.STOP, END_TOKEN)]:
        follower = Follower(byte_tokenizer, SamplingParams(stop=["b"]))
        assert follower.text("abc", reason, end=end).to_abort == []
        assert follower.outputs == [CompletionOutput(0, "a", [97, 98], FinishReason.STOP, "b")]


def test_what_might_have_become_a_stop_string_is_shown_at_the_end(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(stop=["END"]))
    follower.text("xEN")
    assert follower.outputs[0].text == "x"
    follower.text("", FinishReason.STOP, end=END_TOKEN)
    assert follower.outputs[0].text == "xEN"
    assert follower.outputs[0].stop_reason is None


def test_an_unfinished_character_is_shown_at_the_end(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams())
    follower.processor.process([event("g-0", [97, 0xE2, 0x82])])
    assert follower.outputs[0].text == "a"
    follower.processor.process([event("g-0", [], FinishReason.ABORT)])
    assert follower.outputs[0].text == "a\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_that_the_last_held_text_completes_still_counts(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(stop=["\N{REPLACEMENT CHARACTER}"]))
    delivery = follower.processor.process([event("g-0", [97, 0xE2], FinishReason.LENGTH)])
    assert delivery.to_abort == []
    assert follower.outputs[0].text == "a"
    assert follower.outputs[0].finish_reason == "stop"
    assert follower.outputs[0].stop_reason == "\N{REPLACEMENT CHARACTER}"


def test_stop_strings_do_not_count_within_min_tokens(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(stop=["b"], min_tokens=3))
    assert follower.text("abb").to_abort == []
    assert follower.outputs[0].text == "abb"
    assert follower.text("abc").to_abort == ["g-0"]
    assert follower.outputs == [CompletionOutput(0, "abba", list(b"abbab"), FinishReason.STOP, "b")]


def test_an_abort_ends_with_what_there_is(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams())
    follower.text("ab")
    delivery = follower.processor.process([event("g-0", [], FinishReason.ABORT)])
    assert delivery == Delivery([follower.state], [])
    assert follower.outputs == [CompletionOutput(0, "ab", [97, 98], FinishReason.ABORT, None)]


def test_choices_grow_and_end_each_on_their_own(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_tokenizer)
    state = processor.open(generation_of(SamplingParams(n=3, stop=["!"])))
    delivery = processor.process([event("g-2", [97, 33]), event("g-0", [98]), event("g-1", [99], FinishReason.LENGTH)])
    assert delivery == Delivery([state], ["g-2"])
    assert state.unfinished_ids == ["g-0"]
    assert [(output.index, output.text, output.finish_reason) for output in state.snapshot().outputs] == [
        (0, "b", None),
        (1, "c", FinishReason.LENGTH),
        (2, "a", FinishReason.STOP),
    ]


def test_events_find_their_generation_among_several(byte_tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(byte_tokenizer)
    first, second, third = (processor.open(generation_of(SamplingParams(), name)) for name in ("x", "x-0", "y"))
    delivery = processor.process([event("x-0-0", [97]), event("x-0", [98])])
    assert delivery.changed == [second, first]
    assert texts_of(first, second, third) == ["b", "a", ""]


def texts_of(*states: GenerationState) -> list[str]:
    return [state.snapshot().outputs[0].text for state in states]


def test_after_closing_events_are_dropped(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams())
    follower.text("a")
    follower.processor.close(follower.state)
    assert follower.text("b") == Delivery([], [])
    assert follower.outputs[0].text == "a"
    follower.processor.close(follower.state)


def test_events_of_nobody_are_dropped(byte_tokenizer: Tokenizer) -> None:
    assert OutputProcessor(byte_tokenizer).process([event("who-0", [97])]) == Delivery([], [])


def test_a_tokens_text_is_decoded_once_however_often_it_is_scored(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            named.extend(token_ids)
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    follower = Follower(byte_tokenizer, SamplingParams(logprobs=1))
    for _ in range(50):
        scored = {token: Logprob(-1.0, rank) for rank, token in enumerate([ord("x"), ord("y")], start=1)}
        follower.processor.process([TokenEvent("g-0", [ord("x")], None, logprobs=[scored])])
    (output,) = follower.outputs
    assert output.logprobs is not None
    assert [each.decoded_token for each in output.logprobs[-1].values()] == ["x", "y"]
    assert len(named) <= 2


# --- watchers


class Sentence:
    """A watcher: one sentence is enough."""

    def __init__(self) -> None:
        self.seen = ""

    def push(self, text: str) -> bool:
        self.seen += text
        return "." in self.seen


ONE_SENTENCE = TextOptions(new_watcher=Sentence)


def test_a_text_ends_where_its_watcher_says_and_the_engine_is_told(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(), ONE_SENTENCE)
    assert follower.text("No").to_abort == []
    assert follower.text("w. And then").to_abort == ["g-0"]
    assert follower.outputs == [CompletionOutput(0, "Now.", [*b"Now."], FinishReason.STOP, None)]
    assert follower.text("more").to_abort == []
    assert follower.outputs[0].text == "Now."


def test_each_choice_has_a_watcher_of_its_own(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(n=2), ONE_SENTENCE)
    follower.text("a.")
    follower.processor.process([event("g-1", [*b"bc"])])
    assert [(output.text, output.finish_reason) for output in follower.outputs] == [
        ("a.", FinishReason.STOP),
        ("bc", None),
    ]


def test_a_watcher_sees_what_is_shown_and_ends_nothing_before_min_tokens(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(min_tokens=4, stop=["x"]), ONE_SENTENCE)
    follower.text("a.bcde")
    assert follower.outputs == [CompletionOutput(0, "a.bcd", [*b"a.bcd"], FinishReason.STOP, None)]
    hidden = Follower(byte_tokenizer, SamplingParams(stop=[".x"]), ONE_SENTENCE)
    hidden.text("a.")
    assert hidden.outputs == [CompletionOutput(0, "a", [*b"a."])]
    hidden.text("b")
    assert (hidden.outputs[0].text, hidden.outputs[0].finish_reason) == ("a.b", FinishReason.STOP)


def test_a_special_token_is_part_of_the_text_where_that_is_wanted(byte_tokenizer: Tokenizer) -> None:
    tokens = [*"é".encode()[:1], 257, *b"a", 256, *"ü".encode()]
    for shown, text in ((("<|im_start|>", "no such token"), "\N{REPLACEMENT CHARACTER}<|im_start|>aü"), ((), None)):
        follower = Follower(byte_tokenizer, SamplingParams(), TextOptions(shown_tokens=shown))
        follower.processor.process([event("g-0", [token]) for token in tokens])
        follower.processor.process([event("g-0", [], FinishReason.LENGTH)])
        expected = byte_tokenizer.decode(tokens) if text is None else text
        assert follower.outputs[0].text == expected


def test_a_state_that_was_kept_does_not_change_and_shares_what_it_can(byte_tokenizer: Tokenizer) -> None:
    follower = Follower(byte_tokenizer, SamplingParams(logprobs=0, n=2))

    def score(index: int, token: int, finish: FinishReason | None = None) -> None:
        scored = [{token: Logprob(-1.0, 1)}]
        follower.processor.process([TokenEvent(f"g-{index}", [token], finish, logprobs=scored)])

    states = []
    for token in b"abc":
        score(0, token)
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
    score(0, ord("d"), FinishReason.LENGTH)
    finished = follower.outputs[0]
    score(1, ord("x"))
    assert isinstance(finished.logprobs, list)
    assert follower.outputs[0] is finished  # and is not copied again while the other one goes on
