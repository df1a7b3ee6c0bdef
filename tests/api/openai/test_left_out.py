"""Tests what a result of a tool contains and the model does not read, in chats."""

from chairlift.api.openai.chat import ChatCompletionRequest

URL = "data:image/png;base64,iVBORw0KGgo="
ASKED = {"role": "user", "content": "Look."}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_a_note_stands_for_an_image_of_a_tool_in_chats() -> None:
    image = {"type": "image_url", "image_url": {"url": URL}}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, image]}
    body = ChatCompletionRequest.model_validate({"messages": [ASKED, CALLING, result]})
    assert body.template_messages()[-1]["content"] == "a[image left out: this model reads text only]"
    assert body.warnings == ["parts of tool results were left out (image), because this model reads text only"]
