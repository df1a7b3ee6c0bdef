"""Each field of a chat and of a completion: what it does to an answer or to how it is served beside others; tenants."""

import re
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from chairlift.api import ServerConfig
from chairlift.api.openai.chat import ChatCompletionRequest
from chairlift.params import MAX_PRIORITY, RequestOptions
from tests.api.conftest import MAX_SEQ_LEN, Server, client_of, serving
from tests.api.contract import CHAT, COMPLETIONS, check_chat, counts, error_of, post, text_of, user, whole_and_chunks
from tests.api.fault_support import Launches, recorded

QUESTION = user("What is 17 + 25?")
GREEDY: dict[str, Any] = {"messages": QUESTION, "temperature": 0}

STORY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
HINTS: dict[str, Any] = {"metadata": {"a": "b"}, "safety_identifier": "c", "store": True, "service_tier": "flex"}
HINTS |= {"prompt_cache_key": "d", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}
# Fields of a chat that work, with values that ask for nothing.
IDLE: dict[str, Any] = {"modalities": ["text"], "reasoning_effort": "none", "tool_choice": "auto"}
IDLE |= {"response_format": {"type": "text"}, "verbosity": "medium", "functions": [], "top_logprobs": 0}
IDLE |= {"function_call": "none", "echo": False, "include_reasoning": True, "documents": []}
# Parameters of other engines, as vLLM's clients and llama.cpp's page send them.
IDLE |= {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False}
IDLE |= {"use_beam_search": False, "length_penalty": 1, "cache_prompt": True, "typ_p": 1, "dynatemp_range": 0}
IDLE |= {"xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0, "dry_base": 1.75, "repeat_penalty": 1}
IDLE |= {"timings_per_token": False, "mirostat": 0, "min_keep": 0, "n_probs": 0, "id_slot": -1, "top_n_sigma": -1}
IDLE |= {"prediction": {"type": "content", "content": "41"}, "chat_template_kwargs": {"mood": "good"}}


ITEM_ID = re.compile("msg_[0-9a-f]+")


@pytest.mark.parametrize(
    ("path", "body", "accepted"),
    [
        (CHAT, GREEDY, {**HINTS, **IDLE}),
        (COMPLETIONS, STORY, {**HINTS, "best_of": 1, "n": 1, "echo": False, "suffix": ""}),
    ],
)
async def test_accepted_fields_change_nothing(
    server: Server, path: str, body: dict[str, Any], accepted: dict[str, Any]
) -> None:
    plain = await post(server, path, body)
    for fields in (*({name: value} for name, value in accepted.items()), accepted):
        reply = await post(server, path, {**body, **fields})
        assert (reply["choices"], counts(reply["usage"])) == (plain["choices"], counts(plain["usage"])), fields
        assert reply["id"] != plain["id"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"skip_special_tokens": False}, "only true is supported: return_token_ids shows special tokens"),
        (CHAT, {"functions": [{"name": "f"}]}, "only [] is supported: deprecated; use tools"),
        (CHAT, {"function_call": {"name": "f"}}, 'only "none" or "auto" is supported: deprecated; use tool_choice'),
        (COMPLETIONS, {"repeat_penalty": 1.1}, "only 1.0 is supported: use repetition_penalty"),
        (COMPLETIONS, {"suffix": "."}, 'only "" is supported: the model continues texts, it does not fill gaps'),
        (COMPLETIONS, {"mirostat": 2}, "only 0 is supported: there is no such sampler here"),
    ],
)
async def test_a_value_that_would_change_the_answer_is_refused(
    server: Server, path: str, fields: dict[str, Any], message: str
) -> None:
    ((name, _),) = fields.items()
    error = await error_of(server, path, {**(GREEDY if path == CHAT else STORY), **fields})
    assert (error["param"], error["message"]) == (name, f"{name}: {message}")


FIVE = {"max_tokens": 5, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "prefix", "body"),
    [
        (CHAT, "chatcmpl-", {**GREEDY, "n": 3}),
        (COMPLETIONS, "cmpl-", {**STORY, "prompt": ["1 + 1 =", "Once"], "n": 2, "best_of": 2, **FIVE}),
    ],
)
async def test_chunks_have_the_order_of_the_specification(
    server: Server, path: str, prefix: str, body: dict[str, Any]
) -> None:
    _, without = await whole_and_chunks(server, path, body, include_usage=False)
    whole, (*chunks, usage) = await whole_and_chunks(server, path, body, include_usage=True)
    assert chunks[0]["id"].startswith(prefix)
    fingerprint = server.api.service.job_maker.fingerprint
    assert {reply["system_fingerprint"] for reply in (whole, *chunks, *without)} == {fingerprint}
    assert fingerprint.startswith("fp_")
    assert (usage["choices"], counts(usage["usage"])) == ([], counts(whole["usage"]))
    assert path == CHAT or counts(usage["usage"]) == (len("1 + 1 =Once"), 20, 31)
    assert all(chunk.get("usage") is None and len(chunk["choices"]) == 1 for chunk in (*chunks, *without))
    for each in (chunks, without):
        for index in range(3 if path == CHAT else 0):
            own = [chunk["choices"][0] for chunk in each if chunk["choices"][0]["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in own[1:])
            assert (own[-1]["finish_reason"], own[-1]["delta"]) == ("stop", {})


async def test_both_names_of_the_limit_are_known_and_without_it_a_chat_may_fill_its_slot(server: Server) -> None:
    for fields in ({"max_tokens": 4}, {"max_completion_tokens": 4}, {"max_tokens": 4, "max_completion_tokens": 4}):
        reply = check_chat(await post(server, CHAT, {**GREEDY, **fields}))
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("17 +", "length")
        assert counts(reply.usage)[1] == 4
    longest = await post(server, CHAT, {**GREEDY, "messages": user("a" * 400), "ignore_eos": True})
    assert (longest["usage"]["total_tokens"], longest["choices"][0]["finish_reason"]) == (MAX_SEQ_LEN, "length")


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("=", "17 + 25 ", "="),
        (["never", " 2"], "17 +", " 2"),
        (["u", "v", "x", "y", "z", "25 = "], "17 + ", "25 = "),
        ("17", "", "17"),
        (["42.!"], "17 + 25 = 42.", None),
        ([], "17 + 25 = 42.", None),
    ],
)
async def test_stop_strings_end_the_answer_and_are_not_in_it(
    server: Server, stop: str | list[str], expected: str, reason: str | None
) -> None:
    body = {**GREEDY, "stop": stop}
    (choice,) = (await whole_and_chunks(server, CHAT, body))[0]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", reason)


async def test_a_seed_repeats_an_answer_and_choices_differ(server: Server) -> None:
    body = {"messages": user("Tell me a story."), "temperature": 2.0, "max_tokens": 60, "n": 4}
    first, second = [await post(server, CHAT, {**body, "seed": 11}) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({choice["message"]["content"] for choice in first["choices"]}) == 4
    other = await post(server, CHAT, {**body, "seed": 12})
    assert other["choices"][0] != first["choices"][0]


STORIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("Tell me a story."), "max_tokens": 60},
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 60},
    "/v1/responses": {"input": "Tell me a story.", "max_output_tokens": 60},
    "/v1/messages": {"messages": user("Tell me a story."), "max_tokens": 60},
}


@pytest.mark.parametrize("path", STORIES)
async def test_a_seed_of_minus_one_asks_for_none(server: Server, path: str) -> None:
    """As in vLLM, SGLang, llama.cpp and Ollama; any other negative number is a seed."""
    for seed, num_different in ((-1, 2), (-2, 1)):
        body = {**STORIES[path], "temperature": 1.0, "seed": seed}
        replies = [await post(server, path, body) for _ in range(2)]
        parts = (reply.get("choices") or reply.get("output") or reply["content"] for reply in replies)
        assert len({ITEM_ID.sub("", str(part)) for part in parts}) == num_different


async def test_every_way_of_writing_a_message_counts_the_same(server: Server) -> None:
    plain = await post(server, CHAT, GREEDY)
    assert plain["choices"][0]["message"]["content"] == "17 + 25 = 42."
    hint: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    for parts, extra in (
        ([{"type": "text", "text": "What is 17 + 25?", **hint}], hint),
        ([{"type": "text", "text": "What is "}, {"type": "text", "text": "17 + 25?"}], {"name": None}),
    ):
        reply = await post(server, CHAT, {**GREEDY, "messages": [{"role": "user", "content": parts, **extra}]})
        assert (reply["choices"], counts(reply["usage"])) == (plain["choices"], counts(plain["usage"]))
    system, developer = [
        await post(server, CHAT, {**GREEDY, "messages": [{"role": role, "content": "Be kind."}, *QUESTION]})
        for role in ("system", "developer")
    ]
    assert system["choices"] == developer["choices"]
    assert system["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + len("Be kind.") + 2


# What the replies of other servers, and the clients that hold them, have besides what was said.
THOUGHT = "It is a sum."
ADDED: dict[str, Any] = dict.fromkeys(["reasoning", "function_call", "audio", "refusal"]) | {
    "provider_specific_fields": {"refusal": None, "stop_sequence": "x"},
    "reasoning_content": THOUGHT,
    "reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}],
    "thinking_blocks": [{"type": "thinking", "thinking": THOUGHT, "signature": "s"}],
    "whatever_comes_next": {"a": [1]},
}
ADDED |= {"annotations": [], "images": [], "id": "chatcmpl-1"}


async def test_what_other_servers_add_to_an_assistants_message_changes_nothing(server: Server) -> None:
    function: dict[str, Any] = {"name": "add", "arguments": '{"a": 17, "b": 25}'}
    call = {"id": "a", "type": "function", "function": function}
    extended = {**call, "index": 0, "extra_content": {"google": 1}, "function": {**function, "parsed": {}}}
    result = {"role": "tool", "tool_call_id": "a", "content": "42"}
    part = {"type": "text", "text": "Wait."}
    plain = [*QUESTION, {"role": "assistant", "content": [part], "tool_calls": [call]}, result]
    said = {"role": "assistant", "content": [{**part, "annotations": []}], "tool_calls": [extended], **ADDED}
    expected = await post(server, CHAT, {**GREEDY, "messages": plain})
    reply = await post(server, CHAT, {**GREEDY, "messages": [*QUESTION, said, result]})
    assert (reply["choices"], counts(reply["usage"])) == (expected["choices"], counts(expected["usage"]))
    for speaker in ({"role": "user"}, {"role": "system"}, {"role": "tool", "tool_call_id": "a"}):
        message = {"content": "a", "reasoning_details": [], **speaker}
        error = await error_of(server, CHAT, {**GREEDY, "messages": [*plain, message]})
        assert error["message"] == "unknown or unsupported field: messages.3.reasoning_details"


@pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}, {"content": [], "tool_calls": []}])
async def test_an_assistant_that_said_nothing_has_an_empty_turn(server: Server, said: dict[str, Any]) -> None:
    messages = [*QUESTION, {"role": "assistant", **said}, *user("Well?")]
    tokens = (await post(server, "/tokenize", {"messages": messages}))["tokens"]
    empty = [{"role": "assistant", "content": ""}]
    assert tokens == (await post(server, "/tokenize", {"messages": [*QUESTION, *empty, *user("Well?")]}))["tokens"]


def test_what_an_assistant_thought_is_there_for_templates_that_show_it() -> None:
    told = {"role": "assistant", "content": "42", "reasoning_content": THOUGHT}
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "42", name: THOUGHT}
        body = ChatCompletionRequest.model_validate({"messages": [*QUESTION, said]})
        assert body.template_messages()[1] == told


async def test_the_last_message_can_be_continued(server: Server) -> None:
    body = {**GREEDY, "messages": [*QUESTION, {"role": "assistant", "content": "17 + 25 = 4"}]}
    for fields in ({}, {"add_generation_prompt": False}):
        (choice,) = (await post(server, CHAT, {**body, "continue_final_message": True, **fields}))["choices"]
        assert choice["message"]["content"] == "2."
    error = await error_of(server, CHAT, {**GREEDY, "continue_final_message": True, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


NO_PROMPT = {"add_generation_prompt": False}


async def test_the_beginning_of_an_assistants_turn_can_be_left_out(server: Server) -> None:
    prompts = ({"messages": QUESTION, **each} for each in ({}, {"add_generation_prompt": True}, NO_PROMPT))
    with_it, explicit, without = [await post(server, "/tokenize", prompt) for prompt in prompts]
    assert with_it == explicit
    assert with_it["tokens"] == [*without["tokens"], 260]
    reply = await post(server, CHAT, {**GREEDY, **NO_PROMPT, "max_tokens": 1})
    assert reply["usage"]["prompt_tokens"] == without["count"]


async def test_template_variables_cannot_be_the_servers_own(server: Server) -> None:
    error = await error_of(server, CHAT, {**GREEDY, "chat_template_kwargs": {"tools": []}})
    assert (error["param"], "must not set tools" in error["message"]) == ("chat_template_kwargs", True)


async def test_the_end_token_can_be_ignored_or_be_any_token(server: Server) -> None:
    body = {"prompt": [259, *b"Hello!", 257, 260], "temperature": 0, "max_tokens": 50}
    (ended,) = (await post(server, COMPLETIONS, body))["choices"]
    assert ended["finish_reason"] == "stop"
    longer = await post(server, COMPLETIONS, {**body, "ignore_eos": True})
    assert longer["usage"]["completion_tokens"] == 50
    assert longer["choices"][0]["text"].startswith(ended["text"])
    first = ord(ended["text"][0])
    (stopped,) = (await post(server, COMPLETIONS, {**body, "stop_token_ids": [first]}))["choices"]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", first)


async def test_prompts_that_are_the_same_are_answered_the_same_in_every_form(server: Server) -> None:
    tokens = list(b"Once upon a time")
    forms = ("Once upon a time", tokens, [tokens])
    texts = [await text_of(server, {**STORY, "prompt": prompt}) for prompt in forms]
    several = await post(server, COMPLETIONS, {**STORY, "prompt": [tokens, tokens]})
    assert {*texts, *(choice["text"] for choice in several["choices"])} == {texts[0]}
    assert counts(several["usage"])[:2] == (2 * len(tokens), 32)


RESPONSES = "/v1/responses"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("Hi!")},
    COMPLETIONS: {"prompt": "Hi!"},
    RESPONSES: {"input": "Hi!"},
}
OURS = {"priority": -3, "timeout": 60.5, "cache_salt": "pepper", "speculation": "off"}
AS_ASKED = RequestOptions(priority=-3, timeout=60.5, cache_salt="pepper", speculation="off", tenant="ann")


def options_in(launches: Launches) -> set[RequestOptions]:
    return {request.options for launch in launches.all for request in launch.requests}


PARTS = [{"type": "text", "text": "Hi! "}, {"type": "text", "text": "Ho!"}]
NO_TENANTS = {"safety_identifier": "ann", "prompt_cache_key": "bob", "metadata": {"user": "cid"}}
PREDICTED = RequestOptions(prediction="Hi! Ho!")
EXPECTED: list[tuple[str, dict[str, Any], RequestOptions]] = [
    *((path, {"user": "ann", **OURS}, AS_ASKED) for path in PROMPTS),
    (COMPLETIONS, {"user": "ann", **OURS, "prompt": ["one", "two"], "n": 2}, AS_ASKED),
    *((path, {"user": None, **NO_TENANTS}, RequestOptions()) for path in PROMPTS),
    *((path, {"user": ""}, RequestOptions()) for path in PROMPTS),
    *((CHAT, {"prediction": {"type": "content", "content": each}}, PREDICTED) for each in ("Hi! Ho!", PARTS)),
]


@pytest.mark.parametrize(("path", "fields", "options"), EXPECTED)
async def test_a_bodys_options_reach_the_engine_and_the_user_is_the_tenant(
    server: Server, path: str, fields: dict[str, Any], options: RequestOptions
) -> None:
    with recorded(server.llm) as launches:
        await post(server, path, {**PROMPTS[path], **fields})
    assert options_in(launches) == {options}
    assert len({request for launch in launches.all for request in launch.rows}) == (4 if "n" in fields else 1)


async def test_usage_and_metrics_tell_what_was_guessed() -> None:
    settings: dict[str, Any] = {"attention_backend": "torch", "batch_invariant": True, "max_seq_len": 128}
    async with serving(speculation="ngram", num_speculative_tokens=4, **settings) as server:
        body = {**PROMPTS[CHAT], "temperature": 0, "max_tokens": 24}
        plain = await post(server, CHAT, {**body, "speculation": "off"})
        text = plain["choices"][0]["message"]["content"]
        reply = await post(server, CHAT, {**body, "prediction": {"type": "content", "content": text}})
        async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as response:
            metrics = await response.text()
    assert reply["choices"] == plain["choices"]
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "reasoning_tokens": 0}
    assert plain["usage"]["completion_tokens_details"] == none
    num_accepted = reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert num_accepted > 3
    assert f"chairlift_spec_accepted_tokens_total {num_accepted}.0" in metrics
    assert 'chairlift_spec_accepted_tokens_by_position_total{position="1"}' in metrics


@pytest.mark.parametrize("path", PROMPTS)
async def test_the_outermost_values_are_taken(server: Server, path: str) -> None:
    for priority in (MAX_PRIORITY, -MAX_PRIORITY):
        await post(server, path, {**PROMPTS[path], "priority": priority, "timeout": 1e9, "cache_salt": "x" * 256})


BAD: list[tuple[str, Any, str]] = [
    ("priority", 2**31, "priority: Input should be less than or equal to 2147483647"),
    ("priority", -(2**31), "priority: Input should be greater than or equal to -2147483647"),
    *(("priority", value, "priority: Input should be a valid integer") for value in (0.5, True)),
    *(("timeout", value, "timeout: Input should be greater than 0") for value in (0, -1)),
    ("timeout", float("inf"), "timeout: Input should be a finite number"),
    ("timeout", float("nan"), "timeout: Input should be"),
    ("timeout", "5", "timeout: Input should be a valid number"),
    ("cache_salt", "", "cache_salt is empty; leave it out, or give at least one character"),
    ("cache_salt", "x" * 257, "cache_salt: String should have at most 256 characters"),
    *((name, 5, f"{name}: Input should be a valid string") for name in ("cache_salt", "user")),
]


@pytest.mark.parametrize("path", PROMPTS)
async def test_bad_options_are_refused_by_name(server: Server, path: str) -> None:
    for field, value, message in BAD:
        for stream in (False, True):
            error = await error_of(server, path, {**PROMPTS[path], field: value, "stream": stream})
            assert error["param"] == field
            assert error["message"].startswith(message)


async def options_of(server: Server, key: str, **fields: Any) -> RequestOptions:
    async with client_of(server, key) as client:
        with recorded(server.llm) as launches:
            await client.completions.create(model="bundled", prompt="Hi!", max_tokens=1, extra_body=fields)
    (options,) = options_in(launches)
    return options


async def test_a_key_is_one_tenant_whatever_user_it_names() -> None:
    async with serving(ServerConfig(api_key=["one", "two"])) as server:
        for key, tenant in (("one", "7692c3ad3540bb80"), ("two", "3fc4ccfe745870e2")):  # of their SHA-256
            for fields in ({}, {"user": "ann"}, {"user": "two"}):
                assert (await options_of(server, key, **fields)).tenant == tenant


async def test_a_key_cannot_forge_the_salt_of_another() -> None:
    """That keys reuse no prompts of each other unless they are told to share: tests/attacks."""
    prompt: dict[str, Any] = {"prompt": "Once upon a time there was a secret of ten characters", "max_tokens": 1}

    async def num_cached(server: Server, key: str, **fields: Any) -> int:
        async with client_of(server, key) as client:
            reply: Any = await client.completions.create(model="bundled", **prompt, extra_body=fields)
        return int(reply.usage.prompt_tokens_details.cached_tokens)

    async with serving(ServerConfig(api_key=["one", "two"])) as server:
        assert await num_cached(server, "one") == 0
        assert await num_cached(server, "one") > 5
        assert await num_cached(server, "two", cache_salt="7692c3ad3540bb80:") == 0  # the first key's own


async def test_a_key_has_a_range_of_priorities_and_a_share_of_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("usual\nurgent priority=-10:10 queue=0.25\n")
    async with serving(ServerConfig(api_key_file=path)) as server:
        assert (await options_of(server, "usual")).queue_share == 0.5
        assert (await options_of(server, "usual", priority=100)).priority == 100
        options = await options_of(server, "urgent", priority=-10)
        assert (options.priority, options.queue_share) == (-10, 0.25)
        for key, priority, words in (("usual", -1, "0 to"), ("usual", 101, "0 to 100"), ("urgent", -11, "-10 to 10")):
            complaint = f"priority {priority} is out of this key's range: {words}"
            with pytest.raises(openai.BadRequestError, match=complaint):
                await options_of(server, key, priority=priority)


async def test_who_is_the_only_one_with_a_key_may_fill_the_queue() -> None:
    async with serving(ServerConfig(api_key=["one"])) as server:
        assert (await options_of(server, "one")).queue_share == 1.0
