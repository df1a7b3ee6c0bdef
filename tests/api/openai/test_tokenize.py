"""`/tokenize` and its kin, in the shapes that vLLM made known, and what the official client sees of the server."""

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from chairlift import LLM, SamplingParams
from tests.api.conftest import MAX_SEQ_LEN, Server
from tests.api.contract import get, post, user


@pytest.mark.parametrize(("text", "tokens"), [("Hé!", [72, 195, 169, 33]), ("", [])])
async def test_a_text_becomes_tokens_and_back(server: Server, text: str, tokens: list[int]) -> None:
    reply = await post(server, "/tokenize", {"model": "bundled", "prompt": text})
    assert reply == {"tokens": tokens, "count": len(tokens), "max_model_len": MAX_SEQ_LEN}
    assert await post(server, "/detokenize", {"model": "bundled", "tokens": tokens}) == {"prompt": text}


async def test_a_conversation_is_counted_as_chat_completions_count_it(server: Server) -> None:
    messages = user("Hello!")
    reply = await post(server, "/tokenize", {"messages": messages})
    chat = await post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert reply["count"] == len(reply["tokens"]) == chat["usage"]["prompt_tokens"]
    text = await post(server, "/detokenize", {"tokens": reply["tokens"]})
    assert text["prompt"] == "<|user|>Hello!<|im_end|><|assistant|>"


async def test_the_vocabularys_entries_are_told_if_asked_for(server: Server) -> None:
    reply = await post(server, "/tokenize", {"prompt": "H !", "return_token_strs": True})
    assert (reply["tokens"], reply["token_strs"]) == ([72, 32, 33], ["H", "Ġ", "!"])
    reply = await post(server, "/tokenize", {"messages": user("a"), "return_token_strs": True})
    assert reply["token_strs"] == ["<|user|>", "a", "<|im_end|>", "<|assistant|>"]


async def test_what_a_client_needs_to_know_of_the_tokenizer(server: Server) -> None:
    info = await get(server, "/tokenizer_info")
    assert info["chat_template"] == server.llm.inputs.tokenizer.chat_template
    special = {name: info[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    assert special == {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    assert info["added_tokens_decoder"]["257"] == {"content": "<|im_end|>", "special": True}
    assert (bool(info["tokenizer_class"]), info["model_max_length"]) == (True, MAX_SEQ_LEN)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("tokenize", {}, "prompt", "give either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": []}, "prompt", "give either prompt or messages"),
        ("tokenize", {"messages": []}, "messages", "messages is empty"),
        ("tokenize", {"prompt": "a", "foo": 1}, "foo", "unknown"),
        ("detokenize", {"tokens": [1, 99_999]}, "tokens", "token id 99999"),
        ("detokenize", {"tokens": "a"}, "tokens", "Input should be a list"),
        ("tokenize", {"prompt": "a", "parse_special_tokens": True}, "parse_special_tokens", "goes with messages"),
    ],
)
async def test_bad_input_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    error = (await post(server, f"/{path}", body, status=400))["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_a_text_that_would_take_long_is_refused_before_it_is_looked_at(server: Server) -> None:
    error = (await post(server, "/tokenize", {"prompt": "ab " * 200_000}, 400))["error"]
    assert error["message"].endswith("is too long to be tokenized at once; send at most 524288")
    assert error["param"] == "prompt"
    assert (await post(server, "/tokenize", {"prompt": "ab " * 80_000}))["count"] > 80_000


async def test_the_server_says_what_the_python_call_says(client: AsyncOpenAI) -> None:
    prompts = ["The day after Monday is", "5 + 6 =", "Once upon a time"]
    with LLM(max_seq_len=MAX_SEQ_LEN, dtype="float32") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    reply = await client.completions.create(model="bundled", prompt=prompts, temperature=0, max_tokens=20)
    assert [choice.text for choice in reply.choices] == [output.outputs[0].text for output in outputs]


async def test_completions_end_after_16_tokens_unless_told_otherwise(server: Server) -> None:
    reply = await post(server, "/v1/completions", {"prompt": "Once upon a time", "ignore_eos": True})
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (16, "length")


async def test_models_are_listed_and_found_by_name_and_an_unknown_one_is_a_404(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["bundled"]
    card: Any = await client.models.retrieve("bundled")
    assert (card.owned_by, card.root, card.parent, card.max_model_len) == ("chairlift", "bundled", None, MAX_SEQ_LEN)
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        await client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "a"}])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
