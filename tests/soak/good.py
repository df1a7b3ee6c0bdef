"""Good requests: each kind draws one, and knows what its answer must be, as far as that is cheap to know."""

import json
import re
from random import Random
from typing import Any

from tests.soak.case import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Case,
    Draw,
    JsonAnswer,
    anything,
    generation,
    texts_check,
    user,
)
from tests.soak.reply import ParsedReply, Wrong

# Greedy answers of the bundled model; they must not change whatever else is computed beside them.
KNOWN = {
    "What is 17 + 25?": "17 + 25 = 42.",
    "What is 80 - 33?": "80 - 33 = 47.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
}
STORY = "Tell me a story about a fox."
PLACES = ["Rome", "Oslo", "Lima"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": PLACES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}


def known_chat(rng: Random) -> Case:
    """Right in every choice, every time."""
    question, answer = rng.choice(list(KNOWN.items()))
    fields = {"messages": user(question), "temperature": 0, "n": rng.choice([1, 1, 2])}
    return generation(rng, "known chat", CHAT, fields, texts_check(lambda text, _: text == answer))


def known_completion(rng: Random) -> Case:
    """Echo, several prompts, and a stop string that takes the line's end away."""
    prompt = ["17 + 25 =", "17 + 25 ="] if rng.random() < 0.5 else "17 + 25 ="
    fields = {"prompt": prompt, "echo": True, "stop": "\n", "temperature": 0, "logprobs": rng.choice([0, 3])}

    def check(reply: ParsedReply) -> None:
        for choice in reply.choices.values():
            num_tokens = len(choice.text) + 1  # a token is a byte, and one is the stop string
            if choice.text != "17 + 25 = 42" or choice.num_scored != num_tokens:
                raise Wrong(f"{choice.text!r}, {choice.num_scored} tokens scored")

    return generation(rng, "known completion", COMPLETIONS, fields, check)


def story(rng: Random) -> Case:
    """Sampled, several at once, with whatever changes sampling."""
    fields = {
        "messages": [{"role": "system", "content": "You are kind."}, *user(STORY)],
        "n": rng.choice([1, 1, 2, 3]),
        "max_tokens": rng.randint(1, 200),
        "temperature": rng.choice([0.5, 1.0, 1.5]),
        "top_p": rng.choice([0.5, 1.0]),
        "top_k": rng.choice([-1, 5]),
        "min_p": rng.choice([0.0, 0.1]),
        "seed": rng.randint(0, 10**6),
        "presence_penalty": rng.choice([0.0, 1.0]),
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "logit_bias": rng.choice([{}, {"101": -5}]),
    }
    return generation(rng, "story", CHAT, fields, anything)


def scored_chat(rng: Random) -> Case:
    """As many scores as there are characters, a token being a byte here and these ASCII, and one for the end token."""
    fields = {"messages": user("What is 17 + 25?"), "temperature": 0, "logprobs": True, "top_logprobs": 20}

    def check(reply: ParsedReply) -> None:
        if reply.choices[0].num_scored != len("17 + 25 = 42.") + 1:
            raise Wrong(f"{reply.choices[0].num_scored} tokens scored")

    return generation(rng, "scored chat", CHAT, fields, check)


def long_prompt(rng: Random) -> Case:
    """Longer than a step's budget, so that it is computed in pieces; sometimes as token ids."""
    text = "Once upon a time there was a fox. " * rng.randint(6, 13)
    prompt: Any = rng.choice([text, list(text.encode()), [list(text.encode()), [79, 110, 99, 101]]])
    fields = {"prompt": prompt, "max_tokens": rng.randint(1, 60), "stop": [" the ", "xyz"]}
    return generation(rng, "long prompt", COMPLETIONS, fields, texts_check(lambda text, _: " the " not in text))


def full_slot(rng: Random) -> Case:
    """To the very end of the slot, with much said about each token: what slow readers choke on."""
    fields = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 496, "logprobs": 20, "n": 2}

    def check(reply: ParsedReply) -> None:
        for choice in reply.choices.values():
            if choice.finish_reason != "length":
                raise Wrong(f"finish_reason {choice.finish_reason}")

    return generation(rng, "full slot", COMPLETIONS, fields, check, is_stream=True)


def only_prompt(rng: Random) -> Case:
    """Nothing new, but what there is, scored."""
    text = "The opposite of hot is"
    fields = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
    return generation(rng, "only the prompt", COMPLETIONS, fields, texts_check(lambda answer, _: answer == text))


def regex(rng: Random) -> Case:
    pattern = rng.choice([r"[a-f]{3,8}-[0-9]{2}", r"(yes|no)(, (yes|no)){0,3}", r"\d{1,3}\.\d{1,3}"])
    fields: dict[str, Any] = {"prompt": "x", "max_tokens": 30, "n": rng.choice([1, 2])}
    fields |= {"guided_regex": pattern} if rng.random() < 0.5 else {"structured_outputs": {"regex": pattern}}
    is_right = texts_check(lambda text, ended: not ended or re.fullmatch(pattern, text) is not None)
    return generation(rng, "regex", COMPLETIONS, fields, is_right)


def choice(rng: Random) -> Case:
    """One of a few texts, or of more than some grammars can hold."""
    places = PLACES if rng.random() < 0.9 else [f"{place} {number}" for place in PLACES for number in range(1000)]
    fields = {"messages": user("Where?"), "guided_choice": places, "max_tokens": 20, "temperature": 1.5}
    return generation(rng, "choice", CHAT, fields, texts_check(lambda text, _: text in places))


def json_schema(rng: Random) -> Case:
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    fields = {"messages": user("Where?"), "response_format": response_format, "n": rng.choice([1, 2])}
    is_right = texts_check(lambda text, ended: not ended or _is_weather(text))
    return generation(rng, "JSON schema", CHAT, fields | {"max_tokens": 60}, is_right)


def tool_call(rng: Random) -> Case:
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {
        "messages": user("Where?"),
        "tools": [tool],
        "tool_choice": rng.choice(["required", named]),
        "parallel_tool_calls": False,
        "max_tokens": 150,
    }

    return generation(rng, "tool call", CHAT, fields, _check_call)


def response(rng: Random) -> Case:
    """The same answers, and the same calls, by `/v1/responses`."""
    if rng.random() < 0.5:
        question, answer = rng.choice(list(KNOWN.items()))
        is_right = texts_check(lambda text, _: text == answer)
        return generation(rng, "response", RESPONSES, {"input": question, "temperature": 0}, is_right)
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    fields = {"input": user("Where?"), "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    return generation(rng, "response", RESPONSES, fields | {"max_output_tokens": 150}, _check_call)


def tokenize(rng: Random) -> Case:
    text = "".join(rng.choices("abc äöü 中文 😀", k=rng.randint(1, 200)))

    def check(body: Any) -> None:
        if bytes(body["tokens"]).decode() != text or body["count"] != len(body["tokens"]):
            raise Wrong(f"{text!r} became {body}")

    return Case("tokenize", "/tokenize", json.dumps({"prompt": text}).encode(), JsonAnswer(check))


def models(rng: Random) -> Case:
    path = rng.choice(["/v1/models", "/v1/models/bundled", "/version", "/openapi.json"])

    def check(body: Any) -> None:
        if not isinstance(body, dict):
            raise Wrong(f"{body!r}")

    return Case("models", path, None, JsonAnswer(check), method="GET")


def _check_call(reply: ParsedReply) -> None:
    """One call, with arguments that fit, unless the tokens ran out."""
    for answer in reply.choices.values():
        is_called = [name for name, arguments in answer.calls if _is_weather(arguments)] == ["weather"]
        if answer.finish_reason != "length" and not (is_called and answer.finish_reason == "tool_calls"):
            raise Wrong(f"{answer}")


def _is_weather(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"place", "days"} and value["place"] in PLACES and value["days"] in range(1, 10)


GOOD: dict[Draw, int] = {
    known_chat: 6,
    known_completion: 4,
    story: 5,
    scored_chat: 2,
    long_prompt: 3,
    full_slot: 1,
    only_prompt: 1,
    regex: 2,
    choice: 2,
    json_schema: 2,
    tool_call: 2,
    response: 3,
    tokenize: 1,
    models: 1,
}
"""Ways to draw a good request, and how often each is taken."""
