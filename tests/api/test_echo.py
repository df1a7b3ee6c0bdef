"""`echo`: the prompt comes back before the answer, with its own log-probabilities if they were asked for."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Server
from tests.api.contract import COMPLETIONS, check_completion, chunks_of, counts, post, serving
from tests.api.scores import byte_ids, reference_logprobs
from tests.engine.tokenizers_made import make_llama2_like
from tests.support.checkpoints import make_checkpoint

TEXT = "né 日 17 + 25 ="
TOLERANCE = 1e-4


def echo(**fields: Any) -> dict[str, Any]:
    return {"prompt": TEXT, "echo": True, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}


async def test_a_prompt_comes_before_its_answer(server: Server) -> None:
    plain = check_completion(await post(server, COMPLETIONS, echo(echo=False)))
    echoed = check_completion(await post(server, COMPLETIONS, echo()))
    assert echoed.choices[0].text == TEXT + plain.choices[0].text
    assert counts(echoed.usage) == counts(plain.usage)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_nothing_but_the_prompt_with_max_tokens_zero(server: Server, logprobs: int | None) -> None:
    raw = await post(server, COMPLETIONS, echo(max_tokens=0, logprobs=logprobs))
    reply = check_completion(raw)
    assert reply.choices[0].text == TEXT
    assert raw["choices"][0]["finish_reason"] == "length"
    assert counts(raw["usage"]) == (len(TEXT.encode()), 0, len(TEXT.encode()))
    assert (raw["choices"][0]["logprobs"] is None) == (logprobs is None)


async def test_without_echo_max_tokens_zero_is_an_empty_answer(server: Server) -> None:
    (choice,) = (await post(server, COMPLETIONS, echo(echo=False, max_tokens=0)))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


async def test_a_prompts_logprobs_are_those_of_the_model_and_its_first_token_has_none(server: Server) -> None:
    raw = await post(server, COMPLETIONS, echo(max_tokens=0, logprobs=3))
    scored = raw["choices"][0]["logprobs"]
    prompt = byte_ids(TEXT)
    expected = reference_logprobs(prompt[:1], prompt[1:])
    values = [row[token].item() for row, token in zip(expected, prompt[1:], strict=True)]
    assert scored["token_logprobs"][0] is None
    assert scored["top_logprobs"][0] is None
    assert scored["token_logprobs"][1:] == pytest.approx(values, abs=TOLERANCE)
    for row, top in zip(expected, scored["top_logprobs"][1:], strict=True):
        assert max(top.values()) == pytest.approx(row.max().item(), abs=TOLERANCE)
    assert [len(scored[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == (
        [len(prompt)] * 4
    )


async def test_offsets_count_characters_of_prompt_and_answer(server: Server) -> None:
    raw = await post(server, COMPLETIONS, echo(prompt="é日a", logprobs=0, guided_choice=["ü b"]))
    (choice,) = raw["choices"]
    assert choice["text"] == "é日aü b"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 3, 4, 5]
    assert [choice["logprobs"]["tokens"][index] for index in (5, 8, 9)] == ["a", " ", "b"]


async def test_the_tokens_of_a_long_prompt_are_scored_over_several_chunks_of_it() -> None:
    prompt = [(7 * i) % 90 + 32 for i in range(400)]
    async with serving(max_num_batched_tokens=64) as server:
        raw = await post(server, COMPLETIONS, echo(prompt=prompt, max_tokens=0, logprobs=0))
    expected = reference_logprobs(prompt[:1], prompt[1:])
    values = [row[token].item() for row, token in zip(expected, prompt[1:], strict=True)]
    assert raw["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(values, abs=TOLERANCE)


@pytest.mark.parametrize("prompt", [TEXT, byte_ids(TEXT), [TEXT], [byte_ids(TEXT)]])
async def test_echo_is_the_same_for_every_form_of_prompt(server: Server, prompt: Any) -> None:
    (choice,) = (await post(server, COMPLETIONS, echo(prompt=prompt, logprobs=1, guided_choice=["ok"])))["choices"]
    assert choice["text"] == TEXT + "ok"
    assert choice["logprobs"]["tokens"][len(TEXT.encode()) :][:2] == ["o", "k"]
    assert choice["logprobs"]["text_offset"][len(TEXT.encode()) :][:2] == [len(TEXT), len(TEXT) + 1]


async def test_each_of_several_prompts_and_choices_has_its_own_echo(server: Server) -> None:
    body = echo(prompt=["1 + 1 =", "Once é"], n=2, logprobs=1, temperature=1.3, seed=2)
    raw = await post(server, COMPLETIONS, body)
    check_completion(raw)
    assert [choice["index"] for choice in raw["choices"]] == [0, 1, 2, 3]
    for choice, prompt in zip(raw["choices"], ["1 + 1 =", "1 + 1 =", "Once é", "Once é"], strict=True):
        scored = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert scored["token_logprobs"][0] is None
        assert None not in scored["token_logprobs"][1:]
        assert "".join(scored["tokens"])[:6] == choice["text"][:6].replace("é", "\N{REPLACEMENT CHARACTER}" * 2)[:6]
    first, second = (raw["choices"][index]["logprobs"] for index in (2, 3))
    assert first["token_logprobs"][:7] == second["token_logprobs"][:7]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 1},
        {"logprobs": 2, "max_tokens": 0},
        {"n": 2, "logprobs": 1, "temperature": 1.3, "seed": 2},
        {"prompt": ["1 + 1 =", "é"], "n": 2, "logprobs": 0, "temperature": 1.3, "seed": 2},
        {"prompt": [ord(" ")] * 400, "n": 2, "logprobs": 0, "seed": 2},
        {"prompt": "a", "logprobs": 1, "guided_choice": ["😀"]},
    ],
)
async def test_a_streamed_echo_adds_up_to_the_whole_one(server: Server, fields: dict[str, Any]) -> None:
    body = echo(**fields)
    whole = await post(server, COMPLETIONS, body)
    chunks = [chunk["choices"][0] for chunk in await chunks_of(server, COMPLETIONS, body)]
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert [chunk["finish_reason"] for chunk in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        pieces = [chunk["logprobs"] for chunk in own if chunk["logprobs"] is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if choice["logprobs"] else ():
            assert [each for piece in pieces for each in piece[name]] == choice["logprobs"][name], name


async def test_a_prompt_without_visible_text_keeps_its_logprobs_in_a_stream(server: Server) -> None:
    """Special tokens only, and an answer whose first token makes no character yet: no text in the first step."""
    body = echo(prompt=[257, 260], logprobs=0, guided_choice=["é"])
    whole = (await post(server, COMPLETIONS, body))["choices"][0]
    assert whole["text"] == "é"
    assert whole["logprobs"]["tokens"][:2] == ["<|im_end|>", "<|assistant|>"]
    chunks = [chunk["choices"][0]["logprobs"] for chunk in await chunks_of(server, COMPLETIONS, body)]
    assert [token for chunk in chunks for token in chunk["tokens"]] == whole["logprobs"]["tokens"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_end_token_is_scored_as_harnesses_that_drop_the_last_entry_expect(
    server: Server, is_streamed: bool
) -> None:
    """They send the answer within the prompt, ask for one token more, and drop its score, whatever it was."""
    prompt = [259, *b"Hello!", 257, 260, *b"Hello! How can I help you?"]
    end = {"logit_bias": {"257": 100}}
    body = echo(prompt=prompt, max_tokens=1, logprobs=1, ignore_eos=False, **end)
    if is_streamed:
        choices = [chunk["choices"][0] for chunk in await chunks_of(server, COMPLETIONS, body)]
    else:
        choices = (await post(server, COMPLETIONS, body))["choices"]
    lists = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    text = "".join(choice["text"] for choice in choices)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert sum(len(each[name]) for each in lists) == len(prompt) + 1
    assert (lists[-1]["tokens"][-1], lists[-1]["text_offset"][-1]) == ("<|im_end|>", len(text))


async def test_a_prompt_that_fills_the_slot_can_be_scored(server: Server) -> None:
    raw = await post(server, COMPLETIONS, echo(prompt=[65] * 512, max_tokens=0, logprobs=0))
    assert len(raw["choices"][0]["logprobs"]["tokens"]) == 512
    assert raw["usage"]["completion_tokens"] == 0


async def test_offsets_are_right_where_a_tokenizer_drops_the_first_space(tmp_path: Path) -> None:
    """As Llama 2's does: the first token is spelled with a space that the text does not show."""
    make_checkpoint(tmp_path)
    vocab = make_llama2_like(tmp_path).backend.get_vocab()
    prompt = [vocab[piece] for piece in ("<s>", "▁the", "▁hill", "▁is", "▁high", ".")]
    async with serving(model=str(tmp_path), max_seq_len=64) as server:
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
        (choice,) = (await post(server, COMPLETIONS, body))["choices"]
    assert choice["text"] == "the hill is high."
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 8, 11, 16]
