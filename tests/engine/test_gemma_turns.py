"""Tests that what Gemma 4's calls returned is shown in the turn that made them."""

from typing import Any

from chairlift.engine.text.gemma_turns import takes_responses, with_responses

USER = {"role": "user", "content": "Hi"}
CALLS: list[dict[str, Any]] = [
    {"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in ("f", "g")
]
FIELDS = "{{ message['tool_responses'] }}<|tool_response>"


def result(name: str, content: object) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def test_results_and_the_answer_after_them_are_of_the_turn_with_the_calls() -> None:
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS}
    answer = {"role": "assistant", "content": "Done."}
    results = [result("g", [{"type": "text", "text": "[1]"}]), result("f", '{"a": 1}'), result("lost", "b")]
    assert with_responses([USER, said, *results, answer, USER]) == [
        USER,
        {"role": "assistant", "content": "Let me see."},
        {
            "role": "assistant",
            "content": "Done.",
            "tool_calls": CALLS,
            "tool_responses": [
                {"name": "g", "response": "[1]"},
                {"name": "f", "response": {"a": 1}},
                {"name": "unknown", "response": "b"},
            ],
        },
        USER,
    ]


def test_calls_after_results_are_a_turn_of_their_own() -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}
    first, second = with_responses([calls, result("f", "1"), calls, result("f", "2")])
    assert [each["tool_responses"][0]["response"] for each in (first, second)] == ["1", "2"]


def test_results_without_calls_stay_as_they_are() -> None:
    assert with_responses([result("f", "1"), USER, result("g", "2")]) == [result("f", "1"), USER, result("g", "2")]


def test_templates_that_take_messages_of_tools_are_left_alone() -> None:
    assert takes_responses(FIELDS)
    assert not takes_responses(FIELDS + "{% if message['role'] == 'tool' %}{% endif %}")
    assert not takes_responses("{% for message in messages %}{{ message['content'] }}{% endfor %}")
