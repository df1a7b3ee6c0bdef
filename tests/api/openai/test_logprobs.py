"""Log-probabilities over HTTP: the numbers are the model's own; tokens, bytes and offsets spell the text exactly."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.api import contract
from tests.api.conftest import Server, serving
from tests.api.contract import CHAT, COMPLETIONS, byte_ids, check_chat, chunks_of, error_of, post, user
from tests.engine.tokenizers_made import make_llama2_like
from tests.support.checkpoints import make_checkpoint

QUESTION = user("What is 17 + 25?")
PROMPT = [259, *byte_ids("What is 17 + 25?"), 257, 260]  # <|user|> ... <|im_end|><|assistant|>
SPELLED = 'né "日本" 😀\n'  # characters of one to four tokens
END = "<|im_end|>"  # as its token is spelled


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-4)


def expected_of(prompt: list[int], answer: list[int], num_top: int = 0) -> tuple[list[float], list[list[float]]]:
    """By the model itself: the log-probability of each token of an answer, and those of the likeliest in its place."""
    rows = contract.reference_logprobs(prompt, answer)
    values = [row[token].item() for row, token in zip(rows, answer, strict=True)]
    return values, rows.topk(num_top).values.tolist()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": QUESTION, "temperature": 0, "logprobs": True, **fields}


async def test_a_chats_logprobs_are_those_of_the_model(server: Server) -> None:
    (choice,) = check_chat(await post(server, CHAT, chat(top_logprobs=5))).choices
    assert choice.logprobs is not None
    scored = choice.logprobs.content or []
    values, tops = expected_of(PROMPT, [*byte_ids(choice.message.content or ""), 257], 5)
    assert scored[-1].token == END
    assert [entry.logprob for entry in scored] == near(values)
    for entry, top in zip(scored, tops, strict=True):
        assert [each.logprob for each in entry.top_logprobs] == near(top)
        assert entry.top_logprobs[0].bytes == entry.bytes  # greedy


async def test_the_bytes_of_characters_that_take_several_tokens_are_exact(server: Server) -> None:
    body = chat(guided_choice=[SPELLED])
    (choice,) = (await post(server, CHAT, body))["choices"]
    assert choice["message"]["content"] == SPELLED
    scored = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in scored] == [[byte] for byte in SPELLED.encode()]
    assert [entry["token"] for entry in scored[:4]] == ["n", *"\N{REPLACEMENT CHARACTER}" * 2, " "]
    pieces = [chunk["choices"][0] for chunk in (await chunks_of(server, CHAT, body))[1:-1]]
    assert "".join(piece["delta"]["content"] for piece in pieces) == SPELLED
    for piece in pieces:  # which come with those of their tokens
        spelled = b"".join(bytes(entry["bytes"]) for entry in piece["logprobs"]["content"])
        assert spelled == piece["delta"]["content"].encode()


async def test_logprobs_are_taken_before_temperature_bias_penalties_and_grammars(server: Server) -> None:
    changes = {"temperature": 1.7, "seed": 1, "logit_bias": {"32": 4.0}, "frequency_penalty": 1.0, "top_k": 3}
    (choice,) = (await post(server, CHAT, chat(**changes, guided_regex="[0-9 ]{12}")))["choices"]
    values, _ = expected_of(PROMPT, byte_ids(choice["message"]["content"]))
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == near(values)


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"stop": ["42"]}, {"guided_choice": [SPELLED]}, {"max_tokens": 2, "guided_choice": ["日本"]}),
        {"guided_choice": ["one stop 日本 two"], "stop": ["日"]},
        {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 20},
    ],
)
async def test_logprobs_spell_the_text_and_streamed_ones_add_up_to_them(server: Server, fields: dict[str, Any]) -> None:
    body = chat(top_logprobs=2, **fields)
    whole, _ = await contract.whole_and_chunks(server, CHAT, body)
    num_scored = sum(len(choice["logprobs"]["content"]) for choice in whole["choices"])
    assert num_scored == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        spelled = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode(errors="replace")
        is_ended = choice["finish_reason"] == "stop" and "guided_choice" not in body
        assert spelled == choice["message"]["content"] + (choice["stop_reason"] or (END if is_ended else ""))


async def test_without_logprobs_there_are_none_in_replies_or_chunks(server: Server) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}):
        body = {"messages": QUESTION, **fields}
        assert (await post(server, CHAT, body))["choices"][0]["logprobs"] is None
        assert all(chunk["choices"][0]["logprobs"] is None for chunk in await chunks_of(server, CHAT, body))


async def test_a_completions_logprobs_are_those_of_the_model(server: Server) -> None:
    body = {"prompt": "1 + 1 =", "logprobs": 3, "temperature": 1.2, "seed": 4, "max_tokens": 8, "ignore_eos": False}
    raw = await post(server, COMPLETIONS, body)
    contract.check_completion(raw)
    scored = raw["choices"][0]["logprobs"]
    assert "".join(scored["tokens"]) == raw["choices"][0]["text"] + "<|endoftext|>"
    answer = [*byte_ids(raw["choices"][0]["text"]), 256]
    values, tops = expected_of(byte_ids("1 + 1 ="), answer, 3)
    assert scored["text_offset"] == list(range(len(answer)))
    assert scored["token_logprobs"] == near(values)
    assert [list(top.values())[:3] for top in scored["top_logprobs"]] == [near(top) for top in tops]


async def test_the_sampled_token_is_among_the_top_logprobs_also_as_one_more_than_asked_for(server: Server) -> None:
    """The specification: "The API will always return the logprob of the sampled token, so there may be up to
    logprobs+1 elements in the response." """
    for number in (0, 1, 5):
        body = {"prompt": "Once", "logprobs": number, "temperature": 0, "guided_choice": ["Zq é"]}
        scored = (await post(server, COMPLETIONS, body))["choices"][0]["logprobs"]
        assert scored["tokens"][:3] == ["Z", "q", " "]
        for token, value, top in zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True):
            assert top[token] == value
            assert len(top) <= number + 1


@pytest.mark.parametrize("stop", [None, [" two"]])
async def test_a_streamed_completions_lists_add_up_to_the_whole_ones(server: Server, stop: list[str] | None) -> None:
    body = {"prompt": "a", "logprobs": 2, "temperature": 0, "guided_choice": ["one é日 two"], "stop": stop}
    whole, chunks = await contract.whole_and_chunks(server, COMPLETIONS, body)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert all(piece is None or piece["tokens"] for piece in pieces)
    scored = whole["choices"][0]["logprobs"]
    assert scored["text_offset"][:9] == [0, 1, 2, 3, 4, 4, 5, 5, 5]
    assert len(scored["tokens"]) == whole["usage"]["completion_tokens"]
    assert max(scored["text_offset"]) <= len(whole["choices"][0]["text"])


async def test_no_alternative_is_lost_where_characters_take_several_tokens(server: Server) -> None:
    """Evaluations ask whether a token is the likeliest: whether its own value is the best of those in its place."""
    prompt = byte_ids("日本語 ሰላም 😀")
    values, tops = expected_of(prompt[:1], prompt[1:], 5)
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 5}
    whole, _ = await contract.whole_and_chunks(server, COMPLETIONS, body)
    scored = whole["choices"][0]["logprobs"]
    assert scored["tokens"][:3] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    assert scored["token_logprobs"][1:] == near(values)
    assert [sorted(top.values(), reverse=True)[:5] for top in scored["top_logprobs"][1:]] == [near(top) for top in tops]
    columns = (scored[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, value, top in zip(*columns, strict=True):
        assert top[token] == value
        assert len(top) == (5 if value in [*top.values()][:5] else 6)


async def test_a_prompts_logprobs_are_told_by_token_id_and_not_in_streams(server: Server) -> None:
    raw = await post(server, COMPLETIONS, {"prompt": ["1 + 1", "né"], "n": 2, "max_tokens": 1, "prompt_logprobs": 2})
    assert [choice["index"] for choice in raw["choices"]] == [0, 1, 2, 3]
    for choice, text in zip(raw["choices"], ["1 + 1", "1 + 1", "né", "né"], strict=True):
        prompt = byte_ids(text)
        first, *others = choice["prompt_logprobs"]
        assert first is None
        told = [scores[str(token)] for token, scores in zip(prompt[1:], others, strict=True)]
        assert [each["logprob"] for each in told] == near(expected_of(prompt[:1], prompt[1:])[0])
        for own, scores in zip(told, others, strict=True):
            assert {each["rank"] for each in scores.values()} == {1, 2, own["rank"]}
        assert others[0][str(prompt[1])]["decoded_token"] == chr(prompt[1]) if prompt[1] < 128 else True
    chat = await post(server, CHAT, {"messages": QUESTION, "max_tokens": 1, "prompt_logprobs": 0})
    (first, *others), _ = chat["prompt_logprobs"], check_chat(chat)
    assert (first, [[*scores] for scores in others]) == (None, [[str(token)] for token in PROMPT[1:]])
    for path, fields in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "a"})):
        error = await error_of(server, path, {**fields, "prompt_logprobs": 0, "stream": True})
        assert (error["param"], "leave out stream" in error["message"]) == ("prompt_logprobs", True)
    body = {"prompt": "1 + 1", "max_tokens": 0, "echo": True, "logprobs": 3, "prompt_logprobs": 1}
    (choice,) = (await post(server, COMPLETIONS, body))["choices"]  # scored twice, each as long as asked for
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {3, 4}
    assert {len(scores) for scores in choice["prompt_logprobs"][1:]} <= {1, 2}


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"stop": ["42"]}, {"guided_choice": [SPELLED]}, {"n": 3}])
async def test_a_chats_tokens_are_told_by_id(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "temperature": 0, "return_token_ids": True, **fields}
    whole, (first, *others) = await contract.whole_and_chunks(server, CHAT, body)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in chunk for chunk in others)
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    if not fields:
        assert whole["choices"][0]["token_ids"] == [*b"17 + 25 = 42.", 257]


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 1, "echo": True}, {"guided_choice": ["é日"]}])
async def test_a_completions_tokens_are_told_by_id(server: Server, fields: dict[str, Any]) -> None:
    body = {"prompt": ["1 + 1 =", "Once"], "n": 2, "temperature": 0, **fields, "return_token_ids": True}
    whole, chunks = await contract.whole_and_chunks(server, COMPLETIONS, body)
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        assert choice["prompt_token_ids"] == byte_ids(body["prompt"][choice["index"] // 2])
        first, *others = (chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"])
        assert first["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in piece for piece in others)


TEXT = "né 日 17 + 25 ="


def echo(**fields: Any) -> dict[str, Any]:
    return {"prompt": TEXT, "echo": True, "temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields}


async def test_nothing_but_the_prompt_with_max_tokens_zero(server: Server) -> None:
    for has_echo, logprobs in itertools.product([False, True], [None, 0, 2]):
        raw = await post(server, COMPLETIONS, echo(max_tokens=0, logprobs=logprobs, echo=has_echo))
        (choice,) = contract.check_completion(raw).choices
        assert (choice.text, choice.finish_reason) == (TEXT if has_echo else "", "length")
        assert contract.counts(raw["usage"]) == (len(TEXT.encode()), 0, len(TEXT.encode()))
        assert (raw["choices"][0]["logprobs"] is None) == (logprobs is None)
    raw = await post(server, COMPLETIONS, echo(prompt=[65] * 512, max_tokens=0, logprobs=0))  # it fills the slot
    assert (len(raw["choices"][0]["logprobs"]["tokens"]), raw["usage"]["completion_tokens"]) == (512, 0)


async def test_a_prompts_logprobs_are_those_of_the_model_over_several_chunks_and_its_first_token_has_none() -> None:
    prompt = byte_ids(TEXT * 20)
    values, tops = expected_of(prompt[:1], prompt[1:], 1)
    async with serving(max_num_batched_tokens=64) as server:
        (choice,) = (await post(server, COMPLETIONS, echo(prompt=prompt, max_tokens=0, logprobs=3)))["choices"]
    scored = choice["logprobs"]
    assert (scored["token_logprobs"][0], scored["top_logprobs"][0]) == (None, None)
    assert scored["token_logprobs"][1:] == near(values)
    assert [[max(top.values())] for top in scored["top_logprobs"][1:]] == [near(top) for top in tops]
    assert {len(scored[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {len(prompt)}


async def test_offsets_count_characters_of_prompt_and_answer_for_every_form_of_prompt(server: Server) -> None:
    for prompt in ("é日a", byte_ids("é日a"), ["é日a"], [byte_ids("é日a")]):
        body = echo(prompt=prompt, logprobs=0, guided_choice=["ü b"])
        (choice,) = (await post(server, COMPLETIONS, body))["choices"]
        assert choice["text"] == "é日aü b"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 3, 4, 5]
        assert [choice["logprobs"]["tokens"][index] for index in (5, 8, 9)] == ["a", " ", "b"]


async def test_each_of_several_prompts_and_choices_has_its_own_echo(server: Server) -> None:
    body = echo(prompt=["1 + 1 =", "Once é"], n=2, logprobs=1, temperature=1.3, seed=2)
    raw = await post(server, COMPLETIONS, body)
    contract.check_completion(raw)
    assert [choice["index"] for choice in raw["choices"]] == [0, 1, 2, 3]
    for choice, prompt in zip(raw["choices"], ["1 + 1 =", "1 + 1 =", "Once é", "Once é"], strict=True):
        scored = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert scored["token_logprobs"][0] is None
        assert None not in scored["token_logprobs"][1:]
        assert scored["tokens"][:5] == (["1", " ", "+", " ", "1"] if prompt == "1 + 1 =" else [*"Once "])
        assert scored["tokens"][5:7] == ([" ", "="] if prompt == "1 + 1 =" else ["bytes:\\xc3", "bytes:\\xa9"])
    first, second = (raw["choices"][index]["logprobs"] for index in (2, 3))
    assert first["token_logprobs"][:7] == second["token_logprobs"][:7]


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"logprobs": 1}, {"logprobs": 2, "max_tokens": 0}),
        {"n": 2, "logprobs": 1, "temperature": 1.3, "seed": 2},
        {"prompt": ["1 + 1 =", "é"], "n": 2, "logprobs": 0, "temperature": 1.3, "seed": 2},
        {"prompt": [ord(" ")] * 400, "n": 2, "logprobs": 0, "seed": 2},
        {"prompt": "a", "logprobs": 1, "guided_choice": ["😀"]},
        # Special tokens only, and an answer whose first token makes no character yet: no text in the first step.
        {"prompt": [257, 260], "logprobs": 0, "guided_choice": ["é"]},
    ],
)
async def test_a_streamed_echo_adds_up_to_the_whole_one(server: Server, fields: dict[str, Any]) -> None:
    whole, _ = await contract.whole_and_chunks(server, COMPLETIONS, echo(**fields))
    if fields.get("prompt") == [257, 260]:
        assert whole["choices"][0]["text"] == "é"
        assert whole["choices"][0]["logprobs"]["tokens"][:2] == ["<|im_end|>", "<|assistant|>"]


async def test_an_end_token_is_scored_as_harnesses_that_drop_the_last_entry_expect(server: Server) -> None:
    """They send the answer within the prompt, ask for one token more, and drop its score, whatever it was."""
    prompt = [259, *b"Hello!", 257, 260, *b"Hello! How can I help you?"]
    end = {"logit_bias": {"257": 100}}
    body = echo(prompt=prompt, max_tokens=1, logprobs=1, ignore_eos=False, **end)
    (choice,) = (await contract.whole_and_chunks(server, COMPLETIONS, body))[0]["choices"]
    assert choice["finish_reason"] == "stop"
    for values in choice["logprobs"].values():
        assert len(values) == len(prompt) + 1
    last = choice["logprobs"]["tokens"][-1], choice["logprobs"]["text_offset"][-1]
    assert last == ("<|im_end|>", len(choice["text"]))


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
