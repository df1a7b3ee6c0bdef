"""From tokens to text that grows token by token, up to the first stop string; the bytes behind tokens of every kind.

Nothing of a stop string leaks and nothing else is lost, however pieces fall.
"""

import random
import string
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from chairlift import SamplingParams
from chairlift.engine.text.deltas import CumulativeOutput
from chairlift.engine.text.detokenizer import Detokenizer, StopMatcher, StopStrings
from chairlift.engine.text.inputs import Generation, InputProcessor
from chairlift.engine.text.outputs import OutputProcessor
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.models.checkpoint import find_model
from chairlift.params import CompletionOutput, FinishReason
from chairlift.scheduler import Request, TokenEvent
from tests.engine.async_support import DEADLINE_S
from tests.engine.support import END_TOKEN, VOCAB_SIZE, event, make_tiny_checkpoint, resolved_config
from tests.engine.tokenizers_made import (
    make_byte_level_bpe,
    make_byte_tokenizer,
    make_llama2_like,
    make_metaspace_unigram,
)

HALF = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def llama2_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_llama2_like(tmp_path_factory.mktemp("llama2_like"))


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    vocabulary = tokenizer.backend.get_vocab()
    return [vocabulary[name] for name in names]


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    """The piece of each output token, and what `finish` gives at the end, once."""
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [*(detokenizer.push(token) for token in output), detokenizer.finish()]
    assert detokenizer.finish() == ""
    return pieces


def continuation(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """Returns what decoding all at once adds to the prompt's text."""
    return tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


@given(output=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
@example(output=[0xE2, 0x82])
@example(output=[0xF0, 0x9F, 0x98, ord("x"), 0xF0, 0x9F])
@example(output=[0x80] * 30 + [0xF0, 0x9F, 0x98, 0x80, ord("x")])
@example(output=[0x80] * 100 + [0xE2, 0x82])
@example(output=list(f"a genuine {HALF} stays{HALF}".encode()))
@example(output=list((10 * HALF + "€ after many of them").encode()))
def test_bytes_that_are_no_text_are_decoded_as_all_at_once(byte_tokenizer: Tokenizer, output: list[int]) -> None:
    assert "".join(stream(byte_tokenizer, [], output)) == byte_tokenizer.decode(output)


@pytest.mark.parametrize(
    ("prompt", "output", "pieces"),
    [
        (b"", [*"a€😀".encode()], ["a", "", "", "€", "", "", "", "😀", ""]),  # a character at its last byte
        (b"", [ord("a"), 0xE2, 0x82], ["a", "", "", HALF]),  # an unfinished one at the end
        ([END_TOKEN], [END_TOKEN, ord("a"), 257, ord("b"), 256], ["", "a", "", "b", "", ""]),  # no special token
        (b"", [ord("a"), 300, ord("b"), 319], ["a", "", "b", "", ""]),  # nothing of unknown ids
        (b"a\xe2\x82", [*b"bc"], ["b", "c", ""]),  # what follows half a character
    ],
)
def test_a_token_brings(byte_tokenizer: Tokenizer, prompt: Sequence[int], output: list[int], pieces: list[str]) -> None:
    assert stream(byte_tokenizer, [*prompt], output) == pieces


@pytest.mark.parametrize("silent", [END_TOKEN, 10_000])  # a special token, and one that the tokenizer does not know
def test_a_long_run_of_tokens_that_are_not_written_costs_no_more_and_more(tmp_path: Path, silent: int) -> None:
    sizes: list[int] = []

    class Counting(Tokenizer):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            sizes.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    make_byte_tokenizer(tmp_path)
    assert "".join(stream(Counting(tmp_path), [], [*b"a ", *[silent] * 1000, *b"b"])) == "a b"
    assert max(sizes) <= 40


def test_a_llama2_like_word_keeps_the_space_before_it_only_if_something_stands_there(llama2_like: Tokenizer) -> None:
    hill, end, the, begin = ids_of(llama2_like, "▁hill", "</s>", "▁the", "<s>")
    assert stream(llama2_like, [the], [hill, end, hill]) == [" hill", "", " hill", ""]
    for nothing in ([], [begin]):
        assert stream(llama2_like, nothing, [hill, hill]) == ["hill", " hill", ""]
    many_bytes = llama2_like.encode("語語語")  # nine; the last eight begin within a character
    assert stream(llama2_like, many_bytes, [hill]) == [" hill", ""]


def test_a_byte_that_makes_earlier_ones_invalid_does_not_stop_the_text(llama2_like: Tokenizer) -> None:
    output = ids_of(llama2_like, "<0x41>", "<0xE2>", "b", "▁the", "▁hill")
    text = "".join(stream(llama2_like, [], output))
    assert text.startswith("A")
    assert text.endswith("b the hill")


LONG = "ሰላም ለዓለም፣ እንዴት ነህ? the hill 😀👍🏽👩‍👩‍👧‍👦 is high, 日本語のテキスト 한국어 the hill." + "語" * 30


@pytest.mark.parametrize("make", [make_llama2_like, make_byte_level_bpe, make_byte_tokenizer])
def test_a_text_that_is_cut_anywhere_goes_on_as_if_it_were_whole(
    tmp_path: Path, make: Callable[[Path], Tokenizer]
) -> None:
    """The prompt may end within a character, and more than 64 of its last tokens may be single bytes."""
    tokenizer = make(tmp_path)
    vocabulary = vocabulary_of(tokenizer)
    tokens = tokenizer.encode(LONG, add_special_tokens=False)
    for cut in range(len(tokens)):
        prompt = b"".join(map(vocabulary.token_bytes, tokens[:cut])).removeprefix(b" ").decode(errors="ignore")
        assert "".join(stream(tokenizer, tokens[:cut], tokens[cut:])) == LONG.removeprefix(prompt)


def test_half_a_character_at_the_end_of_a_prompt_is_the_prompts(llama2_like: Tokenizer) -> None:
    half, rest, the = (
        ids_of(llama2_like, "<0xE6>", "<0x97>"),
        ids_of(llama2_like, "<0xA5>"),
        ids_of(llama2_like, "▁the"),
    )
    whole = llama2_like.encode("語")[1:]
    assert stream(llama2_like, [*the, *whole, *half], [*rest, *the]) == ["日", " the", ""]
    assert stream(llama2_like, [*the, *whole, *half], the) == [" the", ""]
    assert stream(llama2_like, half, ids_of(llama2_like, "<0x41>")) == ["A", ""]
    assert stream(llama2_like, half, []) == [""]


def test_a_wrong_byte_spoils_no_character_before_or_after_it(llama2_like: Tokenizer) -> None:
    """The library makes all bytes in a row replacement characters if one of them is wrong."""
    character = ids_of(llama2_like, "<0xE6>", "<0x97>", "<0xA5>")
    wrong, newline = ids_of(llama2_like, "<0x82>"), ids_of(llama2_like, "<0x0A>")
    pieces = stream(llama2_like, [], [*character, *wrong, *character * 30, *character[:2], *newline, *character])
    assert "".join(pieces) == "日" + HALF + "日" * 30 + HALF + "\n日"


def test_a_space_is_kept_after_text_that_is_many_special_tokens_away(llama2_like: Tokenizer) -> None:
    the, hill, end = ids_of(llama2_like, "▁the", "▁hill", "</s>")
    assert stream(llama2_like, [the, *[end] * 100], [hill]) == [" hill", ""]


@pytest.mark.parametrize("output", [["<0x20>", "▁the"], ["<0x20>", "<0x20>", "<0xC3>", "<0xA9>"], ["▁", "<0x20>", "s"]])
def test_the_first_space_is_dropped_also_if_it_is_a_byte(llama2_like: Tokenizer, output: list[str]) -> None:
    tokens = ids_of(llama2_like, *output)
    assert "".join(stream(llama2_like, [], tokens)) == llama2_like.decode(tokens)


LLAMA2_PIECES = ["▁", "▁the", "▁▁", "▁▁▁▁", "s", "é", "\n", "本", "</s>"]
HIGH_BYTES = ["<0x80>", "<0x82>", "<0xAC>", "<0xC3>", "<0xE2>", "<0xF0>", "<0x9F>"]
LLAMA2_NAMES = st.lists(st.sampled_from(LLAMA2_PIECES + HIGH_BYTES), max_size=20)


@given(prompt=LLAMA2_NAMES, output=LLAMA2_NAMES)
@example(prompt=["▁the"], output=["<0xE2>", "<0x82>", "<0xAC>", "▁the"])
@example(prompt=[], output=["<0xC3>", "<0x80>", "<0x80>", "▁"])
@example(prompt=["<0xE2>", "<0x82>"], output=["<0xAC>", "s", "s", "s"])
def test_any_llama2_like_tokens_lose_no_letter_and_are_exact_if_they_make_characters(
    llama2_like: Tokenizer, prompt: list[str], output: list[str]
) -> None:
    ids = ids_of(llama2_like, *prompt), ids_of(llama2_like, *output)
    text = "".join(stream(llama2_like, *ids))
    if HALF not in llama2_like.decode(ids[0]) + llama2_like.decode(ids[0] + ids[1]):
        assert text == continuation(llama2_like, *ids)
    letters = "".join({"▁the": "the", "s": "s"}.get(name, "") for name in output)
    assert "".join(character for character in text if character in "thes") == letters


SPELLED = ["the hill is high.", "naïve café", "日本語 \U0001f600", "a\n\t b  c", "\x00\x7f"]
READABLE = [make_byte_tokenizer, make_byte_level_bpe, make_llama2_like]
ALL = [*READABLE, make_metaspace_unigram]


def vocabulary_of(tokenizer: Tokenizer, size: int | None = None) -> Vocabulary:
    assert tokenizer.eos_token_id is not None
    return Vocabulary(tokenizer, size or len(tokenizer.backend.get_vocab()), [tokenizer.eos_token_id])


@pytest.mark.parametrize("make", READABLE)
@pytest.mark.parametrize("text", SPELLED)
def test_the_bytes_of_a_texts_tokens_are_the_text(tmp_path: Path, make: Callable[[Path], Tokenizer], text: str) -> None:
    tokenizer = make(tmp_path)
    vocabulary = vocabulary_of(tokenizer)
    spelled = b"".join(vocabulary.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False))
    assert spelled.removeprefix(b" ") == text.encode()  # Llama 2 writes a space before the first word


@pytest.mark.parametrize("make", ALL)
def test_a_tokens_text_is_what_it_adds_to_a_text(tmp_path: Path, make: Callable[[Path], Tokenizer]) -> None:
    """Decoded alone, a token of SentencePiece would lose the space at its beginning."""
    tokenizer = make(tmp_path)
    vocabulary = vocabulary_of(tokenizer)
    prompt = tokenizer.encode("the hill")
    assert "".join(map(tokenizer.token_text, prompt)).removeprefix(" ") == "the hill"
    for token in range(tokenizer.backend.get_vocab_size()):
        assert tokenizer.token_text(token) == vocabulary.token_bytes(token).decode(errors="replace")
        added = tokenizer.decode([*prompt, token], skip_special_tokens=False)
        assert added == "the hill" + tokenizer.token_text(token)


def test_a_tokens_text_is_its_name_if_it_is_special_and_empty_if_it_is_unknown(llama2_like: Tokenizer) -> None:
    ids = ids_of(llama2_like, "▁the", "▁▁", "lift", "<s>", "<0xE6>", "<0x41>")
    assert [llama2_like.token_text(token) for token in ids] == [" the", "  ", "lift", "<s>", HALF, "A"]
    assert llama2_like.token_text(10_000) == ""


def test_the_bundled_models_tokens_are_bytes_and_names() -> None:
    """Also the byte 0xFF, which no UTF-8 holds: a prompt of token ids may, and the likeliest tokens may."""
    vocabulary = vocabulary_of(Tokenizer(find_model("bundled")), 261)
    names = [b"<|endoftext|>", b"<|im_end|>", b"<|system|>", b"<|user|>", b"<|assistant|>"]
    tokens = [vocabulary.token_bytes(token) for token in range(261)]
    assert tokens == [*(bytes([byte]) for byte in range(256)), *names]


def test_a_model_may_have_more_tokens_than_its_tokenizer_or_fewer(byte_tokenizer: Tokenizer) -> None:
    """Checkpoints round the number of rows up, and somebody may have added a padding token."""
    more, fewer = vocabulary_of(byte_tokenizer, 320), Vocabulary(byte_tokenizer, VOCAB_SIZE - 1, [0])
    assert more.token_bytes(258) == b"<|im_end|>"
    assert len(more.token_bytes(319)) > 0
    assert fewer.token_bytes(ord("a")) == b"a"


def test_a_vocabulary_that_several_threads_ask_for_at_once_is_loaded_once(byte_tokenizer: Tokenizer) -> None:
    vocabulary, gate = vocabulary_of(byte_tokenizer), Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(lambda _: (gate.wait(DEADLINE_S), vocabulary.load())[1], range(4))
    assert first is not None
    assert all(each is first for each in others)


@pytest.mark.parametrize("make", ALL)
def test_logprobs_can_be_asked_of_a_model_with_any_tokenizer(tmp_path: Path, make: Callable[[Path], Tokenizer]) -> None:
    make_tiny_checkpoint(tmp_path)
    inputs = InputProcessor(resolved_config(tmp_path), len(make(tmp_path).backend.get_vocab()))
    assert inputs.prepare("r", [5, 6], SamplingParams(logprobs=1)).params.logprobs == 1


SHORT = st.text(alphabet="ab", min_size=1, max_size=4)
ALIKE = [chr(code) for code in range(ord("b"), ord("b") + 64)]
PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=12)


@given(stops=st.lists(SHORT, max_size=6), pieces=PIECES)
@example(stops=["abba", "bb", "b", "bba"], pieces=["a", "abba"])
@example(stops=["abb", "bba"], pieces=["a", "ab", "b", "a"])
@example(stops=["aab"], pieces=["a", "a", "a", "a", "b"])
@example(stops=["abba", "bb"], pieces=["abb", "a"])
@example(stops=["abc", "ab"], pieces=["xab", "cd"])
@example(stops=["abc", "ab"], pieces=["xabcd"])
@example(stops=["ab", "abc"], pieces=["xabcd"])
@example(stops=["bcd", "abcde"], pieces=["xabc", "d"])
@example(stops=["<|eot|>"], pieces=["so ", *"<|eot|>", "more"])
@example(stops=["###"], pieces=["a#", "#", "b#"])
@example(stops=["😀."], pieces=["a😀", "😀", "."])
def test_any_stops_end_the_text_where_a_plain_search_does_and_all_else_goes_out_at_once(
    stops: list[str], pieces: list[str]
) -> None:
    matcher, whole, out = StopMatcher(StopStrings(stops)), "", ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        whole, out = whole + piece, out + text
        found = [(at, index) for index, stop in enumerate(stops) if (at := whole.find(stop)) >= 0]
        if found:
            at, index = min(found)
            assert (out, stop) == (whole[:at], stops[index])
            return
        held = whole[len(out) :]  # no more than may begin a stop
        assert (stop, whole) == (None, out + held)
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(whole[start:]) for stop in stops for start in range(len(out)))
    assert (out + matcher.finish(), matcher.finish()) == (whole, "")


@pytest.mark.parametrize(
    "stops", [["a" * 1023 + end for end in ALIKE], ["a" * size + "b" for size in range(960, 1024)]]
)
def test_64_long_stops_that_look_alike_cost_little_per_character(stops: list[str]) -> None:
    prepared = StopStrings(stops)
    matchers = [StopMatcher(prepared) for _ in range(8)]
    start = time.process_time()
    for _ in range(2000):
        for matcher in matchers:
            assert matcher.push("a")[1] is None
    assert time.process_time() - start < 5.0  # for 16,000 characters, of which each once took some milliseconds


def test_stop_strings_are_small_and_choices_share_them() -> None:
    tracemalloc.start()
    try:
        prepared = StopStrings(["".join(random.Random(seed).choices(string.printable, k=1024)) for seed in range(64)])
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
        size = tracemalloc.get_traced_memory()[0]
        matchers = [StopMatcher(prepared) for _ in range(128)]
        assert tracemalloc.get_traced_memory()[0] - size < 100_000
    finally:
        tracemalloc.stop()
    assert len(matchers) == 128


HARD = [
    *("👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "𓀀", "e\u0301", "ก็", "日本語", "한국어", "שלום", "مرحبا"),
    *("\u200f", "\x00", "\r\n", "  ", "é", "the hill", "ab"),
]
TEXTS = st.lists(st.sampled_from(HARD) | st.text(max_size=6), min_size=1, max_size=8).map("".join)
KINDS = ["byte", "byte_level_bpe", "llama2_like", "metaspace"]


@pytest.fixture(scope="module")
def tokenizers(byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        "byte": byte_tokenizer,
        "byte_level_bpe": make_byte_level_bpe(tmp_path_factory.mktemp("byte_level_bpe")),
        "llama2_like": make_llama2_like(tmp_path_factory.mktemp("llama2_like")),
        "metaspace": make_metaspace_unigram(tmp_path_factory.mktemp("metaspace")),
    }


@dataclass(frozen=True)
class Case:
    """Holds what a model says, and how it is asked."""

    prompt: list[int]
    output: list[int]
    stops: list[str]
    min_tokens: int
    event_sizes: list[int]  # tokens of each event; the last one has all that are left


def split_anyhow(draw: st.DrawFn, tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens that spell the text, merged in other places than the tokenizer would merge by itself."""
    cuts = sorted({0, len(text), *draw(st.lists(st.integers(0, len(text)), max_size=6))})
    return [token for start, end in pairwise(cuts) for token in tokenizer.encode(text[start:end])]


@st.composite
def cases(draw: st.DrawFn, tokenizer: Tokenizer, is_any_token: bool = False, has_nested_stops: bool = False) -> Case:
    prompt = tokenizer.encode(draw(TEXTS))
    if is_any_token:
        size = tokenizer.backend.get_vocab_size()
        output = draw(st.lists(st.integers(0, size - 1) | st.sampled_from(tokenizer.encode("é日😀ab")), max_size=30))
    else:
        output = split_anyhow(draw, tokenizer, draw(TEXTS))
    whole = continuation(tokenizer, prompt, output)
    starts = st.integers(0, max(0, len(whole) - 1))
    taken = st.builds(lambda start, size: whole[start : start + size], starts, st.integers(1, 5))
    stops = [stop for stop in draw(st.lists(taken | st.text(min_size=1, max_size=3), max_size=3)) if stop]
    if not has_nested_stops:  # of these, the first to begin is the first to be complete
        stops = [stop for stop in stops if not any(other != stop and other in stop for other in stops)]
    min_tokens = draw(st.just(0) | st.integers(0, len(output)))
    return Case(prompt, output, stops, min_tokens, draw(st.lists(st.integers(1, 4))))


def run_whole(tokenizer: Tokenizer, case: Case, is_ended_by_token: bool = False) -> list[CompletionOutput]:
    """Every state of the choice, event by event, as a reader that keeps up would see it."""
    params = SamplingParams(stop=case.stops, min_tokens=case.min_tokens, max_tokens=1000)
    requests = [Request("g-0", case.prompt, params, 1000, 0)]
    processor = OutputProcessor(tokenizer)
    state = processor.open(Generation("g", None, case.prompt, params, requests, StopStrings(case.stops)))
    output = CumulativeOutput(state.generation)
    seen = []
    for each in events_of(case, is_ended_by_token):
        assert processor.process([each]).failed == {}
        seen.append(output.add(state.take()).outputs[0])
    return seen


def events_of(case: Case, is_ended_by_token: bool) -> Iterator[TokenEvent]:
    left = list(case.output)
    for size in case.event_sizes:
        if len(left) > size:
            yield event("g-0", left[:size])
            left = left[size:]
    end = [END_TOKEN] if is_ended_by_token else []
    yield event("g-0", left + end, FinishReason.STOP if end else FinishReason.LENGTH)


def assert_streams_the_decoded_text(tokenizer: Tokenizer, case: Case, is_ended_by_token: bool = False) -> None:
    """`whole`: |--- free: out with the first min_tokens ---|--- judged ---|stop string|--- never seen ---|"""
    whole = continuation(tokenizer, case.prompt, case.output)
    detokenizer = Detokenizer(tokenizer, case.prompt)
    free = "".join(detokenizer.push(token) for token in case.output[: case.min_tokens])
    at = min((at for stop in case.stops if (at := whole.find(stop, len(free))) >= 0), default=None)
    seen = run_whole(tokenizer, case, is_ended_by_token)
    for before, after in pairwise(seen):
        assert after.text.startswith(before.text)  # and so, of a text without half characters, none ever shows any
    choice, reason = seen[-1], "length" if at is None and not is_ended_by_token else "stop"
    assert (choice.text, choice.finish_reason) == (whole[:at], reason)
    assert (choice.stop_reason is None) == (at is None)
    assert at is None or whole.startswith(str(choice.stop_reason), at)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_text_comes_out_up_to_the_first_stop_string(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    case = data.draw(cases(tokenizers[kind]))
    assume(HALF not in tokenizers[kind].decode(case.prompt + case.output))
    is_ended_by_token = kind == "byte" and data.draw(st.booleans())
    assert_streams_the_decoded_text(tokenizers[kind], case, is_ended_by_token)


@pytest.mark.parametrize("kind", ["byte", "byte_level_bpe", "metaspace"])
@given(data=st.data())
def test_bytes_that_are_no_text_come_out_as_the_whole_has_them_and_stops_are_found_among_them(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    case = replace(data.draw(cases(tokenizers[kind], is_any_token=True)), min_tokens=0)
    assume(not tokenizers[kind].decode(case.prompt).endswith(HALF))
    assert_streams_the_decoded_text(tokenizers[kind], case)


@given(data=st.data())
def test_stops_within_stops_never_leak_either(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    case = replace(data.draw(cases(tokenizers["byte"], has_nested_stops=True)), min_tokens=0)
    seen = run_whole(tokenizers["byte"], case)
    whole = continuation(tokenizers["byte"], case.prompt, case.output)
    assert whole.startswith(seen[-1].text)
    for output in seen:
        assert not any(stop in output.text for stop in case.stops)


@given(data=st.data())
def test_how_tokens_are_packed_into_events_changes_nothing(
    tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    case = data.draw(cases(tokenizers["byte_level_bpe"], is_any_token=True, has_nested_stops=True))
    one_by_one = replace(case, event_sizes=[1] * len(case.output))
    packed, single = (run_whole(tokenizers["byte_level_bpe"], each)[-1] for each in (case, one_by_one))
    assert packed == single
