"""Tests what a result of a tool contains and the model does not read, in responses."""

from chairlift.api.responses.request import ResponsesRequest

URL = "data:image/png;base64,iVBORw0KGgo="
ASKED = {"role": "user", "content": "Look."}
CALL_ITEM = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}


def test_a_note_stands_for_an_image_or_file_of_a_function_in_responses() -> None:
    image, file = {"type": "input_image", "image_url": URL, "detail": "high"}, {"type": "input_file", "file_data": URL}
    output = {
        "type": "function_call_output",
        "call_id": "1",
        "output": [{"type": "input_text", "text": "a"}, image, file],
    }
    body = ResponsesRequest.model_validate({"input": [ASKED, CALL_ITEM, output]})
    assert (
        body.template_messages()[-1]["content"]
        == "a[image left out: this model reads text only][file left out: this model reads text only]"
    )
    assert body.warnings == ["parts of tool results were left out (file, image), because this model reads text only"]
