"""Ids of calls and results that come back without them."""

from typing import Any

from chairlift.api.openai.chat import ChatCompletionRequest
from tests.api.contract import user


def test_calls_and_results_without_ids_get_them_in_their_order() -> None:
    def call(**fields: Any) -> dict[str, Any]:
        return {"function": {"name": "f", "arguments": "{}"}, **fields}

    said = {"role": "assistant", "tool_calls": [call(), call(id=""), call(id="c")]}
    results: list[dict[str, Any]] = [{"role": "tool", "content": each} for each in "abcd"]
    body = ChatCompletionRequest.model_validate({"messages": [*user("Go."), said, *results]})
    _, called, *answered = body.template_messages()
    assert [each["id"] for each in called["tool_calls"]] == ["call_1_0", "call_1_1", "c"]
    assert [each["tool_call_id"] for each in answered] == ["call_1_0", "call_1_1", "c", "call_5"]
    results[0]["tool_call_id"] = "c"
    body = ChatCompletionRequest.model_validate({"messages": [*user("Go."), said, *results[:2]]})
    assert [each["tool_call_id"] for each in body.template_messages()[2:]] == ["c", "call_1_0"]
