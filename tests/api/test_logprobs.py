"""Log-probabilities over HTTP: the numbers are the model's own; tokens, bytes and offsets spell the text exactly."""

from typing import Any

import pytest

from tests.api.conftest import Server
from tests.api.contract import (
    CHAT,
    COMPLETIONS,
    check_chat,
    check_chat_chunk,
    check_completion,
    chunks_of,
    error_of,
    post,
    user,
)
from tests.api.scores import byte_ids, reference_logprobs

QUESTION = user("What is 17 + 25?")
PROMPT = [259, *byte_ids("What is 17 + 25?"), 257, 260]  # <|user|> ... <|im_end|><|assistant|>
SPELLED = 'né "日本" 😀\n'  # characters of one to four tokens
TOLERANCE = 1e-4
END = "<|im_end|>"  # as its token is spelled


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": QUESTION, "temperature": 0, "logprobs": True, **fields}


# --- chat


async def test_a_chats_logprobs_are_those_of_the_model(server: Server) -> None:
    reply = check_chat(await post(server, CHAT, chat(top_logprobs=5)))
    scored = reply.choices[0].logprobs
    assert scored is not None
    assert scored.content is not None
    answer = [*(token.bytes[0] for token in scored.content[:-1] if token.bytes), 257]
    assert scored.content[-1].token == END
    expected = reference_logprobs(PROMPT, answer)
    for row, token, entry in zip(expected, answer, scored.content, strict=True):
        assert entry.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)
        assert entry.top_logprobs[0].bytes == entry.bytes  # greedy


async def test_a_chats_tokens_are_its_text_and_its_end(server: Server) -> None:
    reply = check_chat(await post(server, CHAT, chat()))
    scored = reply.choices[0].logprobs
    assert scored is not None
    assert "".join(entry.token for entry in scored.content or []) == f"{reply.choices[0].message.content}{END}"
    assert all(entry.top_logprobs == [] for entry in scored.content or [])
    assert scored.refusal is None
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(scored.content or [])


async def test_the_bytes_of_characters_that_take_several_tokens_are_exact(server: Server) -> None:
    reply = check_chat(await post(server, CHAT, chat(guided_choice=[SPELLED])))
    scored = reply.choices[0].logprobs
    assert reply.choices[0].message.content == SPELLED
    assert scored is not None
    assert [entry.bytes for entry in scored.content or []] == [[byte] for byte in SPELLED.encode()]
    shown = [entry.token for entry in scored.content or []]
    assert shown[:4] == ["n", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}", " "]


async def test_logprobs_are_taken_before_temperature_bias_penalties_and_grammars(server: Server) -> None:
    changes = {"temperature": 1.7, "seed": 1, "logit_bias": {"32": 4.0}, "frequency_penalty": 1.0, "top_k": 3}
    reply = check_chat(await post(server, CHAT, chat(**changes, guided_regex="[0-9 ]{12}")))
    scored = reply.choices[0].logprobs
    assert scored is not None
    assert scored.content is not None
    answer = byte_ids(reply.choices[0].message.content or "")
    expected = reference_logprobs(PROMPT, answer)
    values = [row[token].item() for row, token in zip(expected, answer, strict=True)]
    assert [entry.logprob for entry in scored.content] == pytest.approx(values, abs=TOLERANCE)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["42"]},
        {"guided_choice": [SPELLED]},
        {"guided_choice": ["one stop 日本 two"], "stop": ["日"]},
        {"n": 3, "temperature": 1.5, "seed": 5, "max_tokens": 20},
        {"max_tokens": 2, "guided_choice": ["日本"]},
    ],
)
async def test_streamed_logprobs_add_up_to_the_whole_ones(server: Server, fields: dict[str, Any]) -> None:
    body = chat(top_logprobs=2, **fields)
    whole = await post(server, CHAT, body)
    chunks = await chunks_of(server, CHAT, body)
    num_scored = sum(len(choice["logprobs"]["content"]) for choice in whole["choices"])
    assert num_scored == whole["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        streamed = [entry for piece in own if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        text = "".join(piece["delta"].get("content") or "" for piece in own)
        assert streamed == choice["logprobs"]["content"]
        assert text == choice["message"]["content"]
        spelled = b"".join(bytes(entry["bytes"]) for entry in streamed).decode(errors="replace")
        stop = choice["stop_reason"] or (
            END if choice["finish_reason"] == "stop" and "guided_choice" not in body else ""
        )
        assert spelled == text + stop
    for chunk in chunks:
        check_chat_chunk(chunk)


async def test_a_piece_of_text_comes_with_the_logprobs_of_its_tokens(server: Server) -> None:
    for chunk in (await chunks_of(server, CHAT, chat(guided_choice=[SPELLED])))[1:-1]:
        (choice,) = chunk["choices"]
        assert b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]) == (
            choice["delta"]["content"].encode()
        )


async def test_the_tokens_that_a_stop_string_cut_off_are_scored_with_the_others(server: Server) -> None:
    reply = await post(server, CHAT, chat(guided_choice=["one stop two"], stop=[" stop"]))
    (choice,) = reply["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "one stop"
    assert reply["usage"]["completion_tokens"] == len("one stop")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one", "stop")


async def test_without_logprobs_there_are_none_in_replies_or_chunks(server: Server) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}):
        body = {"messages": QUESTION, **fields}
        assert (await post(server, CHAT, body))["choices"][0]["logprobs"] is None
        assert all(chunk["choices"][0]["logprobs"] is None for chunk in await chunks_of(server, CHAT, body))


# --- completions


async def test_a_completions_logprobs_are_those_of_the_model(server: Server) -> None:
    body = {"prompt": "1 + 1 =", "logprobs": 3, "temperature": 1.2, "seed": 4, "max_tokens": 8, "ignore_eos": False}
    raw = await post(server, COMPLETIONS, body)
    check_completion(raw)
    scored = raw["choices"][0]["logprobs"]
    assert "".join(scored["tokens"]) == raw["choices"][0]["text"] + "<|endoftext|>"
    answer = [*byte_ids(raw["choices"][0]["text"]), 256]
    expected = reference_logprobs(byte_ids("1 + 1 ="), answer)
    assert scored["text_offset"] == list(range(len(answer)))
    values = [row[token].item() for row, token in zip(expected, answer, strict=True)]
    assert scored["token_logprobs"] == pytest.approx(values, abs=TOLERANCE)
    for row, top in zip(expected, scored["top_logprobs"], strict=True):
        assert list(top.values())[:3] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("number", [0, 1, 5])
async def test_the_sampled_token_is_among_the_top_logprobs_also_as_one_more_than_asked_for(
    server: Server, number: int
) -> None:
    """The specification: "The API will always return the logprob of the sampled token, so there may be up to
    logprobs+1 elements in the response." """
    body = {"prompt": "Once", "logprobs": number, "temperature": 0, "guided_choice": ["Zq é"]}
    scored = (await post(server, COMPLETIONS, body))["choices"][0]["logprobs"]
    assert scored["tokens"][:3] == ["Z", "q", " "]
    for token, value, top in zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True):
        assert top[token] == value
        assert len(top) <= number + 1


@pytest.mark.parametrize("stop", [None, [" two"]])
async def test_a_streamed_completions_lists_add_up_to_the_whole_ones(server: Server, stop: list[str] | None) -> None:
    body = {"prompt": "a", "logprobs": 2, "temperature": 0, "guided_choice": ["one é日 two"], "stop": stop}
    whole = await post(server, COMPLETIONS, body)
    chunks = await chunks_of(server, COMPLETIONS, body)
    scored = whole["choices"][0]["logprobs"]
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert all(piece is None or piece["tokens"] for piece in pieces)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [each for piece in pieces if piece for each in piece[name]]
        assert streamed == scored[name]
    assert scored["text_offset"][:9] == [0, 1, 2, 3, 4, 4, 5, 5, 5]
    assert len(scored["tokens"]) == whole["usage"]["completion_tokens"]
    assert max(scored["text_offset"]) <= len(whole["choices"][0]["text"])
    for chunk in chunks:
        check_completion(chunk)


# --- prompts, and tokens by their ids


async def test_a_prompts_logprobs_are_told_by_token_id(server: Server) -> None:
    raw = await post(server, COMPLETIONS, {"prompt": ["1 + 1", "né"], "n": 2, "max_tokens": 1, "prompt_logprobs": 2})
    assert [choice["index"] for choice in raw["choices"]] == [0, 1, 2, 3]
    for choice, text in zip(raw["choices"], ["1 + 1", "1 + 1", "né", "né"], strict=True):
        prompt = byte_ids(text)
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for row, token, scores in zip(reference_logprobs(prompt[:1], prompt[1:]), prompt[1:], others, strict=True):
            told = scores[str(token)]
            assert told["logprob"] == pytest.approx(row[token].item(), abs=TOLERANCE)
            assert {each["rank"] for each in scores.values()} == {1, 2, told["rank"]}
        assert others[0][str(prompt[1])]["decoded_token"] == chr(prompt[1]) if prompt[1] < 128 else True
    chat = await post(server, CHAT, {"messages": QUESTION, "max_tokens": 1, "prompt_logprobs": 0})
    assert [None if scores is None else [*scores] for scores in chat["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in PROMPT[1:]),
    ]
    check_chat(chat)


async def test_a_prompt_may_be_scored_twice_and_each_is_as_long_as_was_asked_for(server: Server) -> None:
    body = {"prompt": "1 + 1", "max_tokens": 0, "echo": True, "logprobs": 3, "prompt_logprobs": 1}
    (choice,) = (await post(server, COMPLETIONS, body))["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {3, 4}
    assert {len(scores) for scores in choice["prompt_logprobs"][1:]} <= {1, 2}


async def test_a_stream_does_not_tell_a_prompts_logprobs(server: Server) -> None:
    for path, body in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "a"})):
        error = await error_of(server, path, {**body, "prompt_logprobs": 0, "stream": True})
        assert (error["param"], "leave out stream" in error["message"]) == ("prompt_logprobs", True)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"stop": ["42"]}, {"guided_choice": [SPELLED]}, {"n": 3}])
async def test_a_chats_tokens_are_told_by_id(server: Server, fields: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "temperature": 0, "return_token_ids": True, **fields}
    whole = await post(server, CHAT, body)
    check_chat(whole)
    assert whole["prompt_token_ids"] == PROMPT
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    if not fields:
        assert whole["choices"][0]["token_ids"] == [*b"17 + 25 = 42.", 257]
    first, *chunks = await chunks_of(server, CHAT, body)
    assert first["prompt_token_ids"] == PROMPT
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [token for piece in own for token in piece.get("token_ids", [])] == choice["token_ids"]
    for chunk in (first, *chunks):
        check_chat_chunk(chunk)
    assert all("prompt_token_ids" not in chunk for chunk in chunks)


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 1, "echo": True}, {"guided_choice": ["é日"]}])
async def test_a_completions_tokens_are_told_by_id(server: Server, fields: dict[str, Any]) -> None:
    body = {
        "prompt": ["1 + 1 =", "Once"],
        "n": 2,
        "temperature": 0,
        "max_tokens": 5,
        "return_token_ids": True,
        **fields,
    }
    whole = await post(server, COMPLETIONS, body)
    check_completion(whole)
    chunks = [chunk["choices"][0] for chunk in await chunks_of(server, COMPLETIONS, body)]
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        assert choice["prompt_token_ids"] == byte_ids(body["prompt"][choice["index"] // 2])
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert [token for piece in own for token in piece["token_ids"]] == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in piece for piece in own[1:])


async def test_replies_and_chunks_of_one_server_have_one_fingerprint(server: Server) -> None:
    prints = set()
    for path, body in ((CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "a"})):
        whole = await post(server, path, {**body, "max_tokens": 2})
        chunks = await chunks_of(server, path, {**body, "max_tokens": 2})
        prints |= {reply["system_fingerprint"] for reply in (whole, *chunks)}
    (fingerprint,) = prints
    assert fingerprint.startswith("fp_")
