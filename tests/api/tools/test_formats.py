import pytest

from chairlift.api.tools import ToolFamily, family_of_template

QWEN = r"""{{- "\n\nFor each function call, return a json object with function name and arguments within
<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n
</tool_call><|im_end|>\n" }}"""

LLAMA_3_1 = """{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""

LLAMA_3_2 = """{{- 'Respond with {"name": function name, "parameters": dictionary of arguments}.' }}
{%- elif message.role == "tool" or message.role == "ipython" %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}"""

COMMAND_R = """{"tool_name": title of the tool in the specification, "parameters": a dict of parameters}"""

CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (QWEN, ToolFamily.HERMES),
        (LLAMA_3_1, ToolFamily.LLAMA3_JSON),
        (LLAMA_3_2, ToolFamily.LLAMA3_JSON),
        (COMMAND_R, None),
        (CHATML, None),
        ("", None),
    ],
    ids=["qwen", "llama 3.1", "llama 3.2", "command-r", "chatml", "empty"],
)
def test_the_template_tells_the_family(template: str, family: ToolFamily | None) -> None:
    assert family_of_template(template) == family


@pytest.mark.parametrize("inside", ["<function=example_function_name>", "<arg_key>{arg-key-1}</arg_key>"])
def test_hermes_markers_around_something_else_than_json_are_not_understood(inside: str) -> None:
    assert family_of_template(f"<tool_call>{inside}</tool_call>") is None


def test_hermes_wins_over_what_llama_templates_also_have() -> None:
    assert family_of_template(QWEN + LLAMA_3_2) is ToolFamily.HERMES


def test_the_families_have_the_names_that_users_give() -> None:
    assert [str(family) for family in ToolFamily] == ["hermes", "llama3_json"]
