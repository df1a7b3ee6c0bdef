import pytest

from chairlift.api.tools import ReasoningFamily, ToolFamily, family_of_template, reasoning_of_template

QWEN = r"""{{- "\n\nFor each function call, return a json object with function name and arguments within
<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n
</tool_call><|im_end|>\n" }}"""

QWEN_3 = (
    QWEN
    + r"""{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
)

QWEN_3_CODER = r"""{{- '<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1' }}"""

LLAMA_3_1 = """{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""

LLAMA_3_2 = """{{- 'Respond with {"name": function name, "parameters": dictionary of arguments}.' }}
{%- elif message.role == "tool" or message.role == "ipython" %}
    {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}"""

LLAMA_4 = """{{- "put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2)]" }}
{{- "<|header_start|>ipython<|header_end|>" }}"""

MISTRAL = """{{- "[TOOL_CALLS] [" }}{{- '{"name": ' + tool_call.function|tojson }}"""

GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key></tool_call>"

COMMAND_R = """{"tool_name": title of the tool in the specification, "parameters": a dict of parameters}"""

DEEPSEEK_R1 = r"""{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<|tool_calls_begin|>'}}{% if add_generation_prompt %}{{'<|Assistant|><think>\n'}}{% endif %}"""

CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"

NONE = ReasoningFamily.NONE


@pytest.mark.parametrize(
    ("template", "family", "reasoning"),
    [
        (QWEN, ToolFamily.HERMES, NONE),
        (QWEN_3, ToolFamily.HERMES, ReasoningFamily.THINK),
        (QWEN_3_CODER, ToolFamily.QWEN3_CODER, NONE),
        (LLAMA_3_1, ToolFamily.LLAMA3_JSON, NONE),
        (LLAMA_3_2, ToolFamily.LLAMA3_JSON, NONE),
        (LLAMA_4, ToolFamily.PYTHONIC, NONE),
        (MISTRAL, ToolFamily.MISTRAL, NONE),
        (MISTRAL + "[THINK]", ToolFamily.MISTRAL, ReasoningFamily.MISTRAL),
        (DEEPSEEK_R1, None, ReasoningFamily.THINK),
        (QWEN + LLAMA_3_2, ToolFamily.HERMES, NONE),
        (GLM, None, NONE),
        (COMMAND_R, None, NONE),
        (CHATML, None, NONE),
        ("", None, NONE),
    ],
)
def test_the_template_tells_how_calls_and_thoughts_are_written(
    template: str, family: ToolFamily | None, reasoning: ReasoningFamily
) -> None:
    assert (family_of_template(template), reasoning_of_template(template)) == (family, reasoning)


def test_the_families_have_the_names_that_users_give() -> None:
    assert [str(family) for family in ToolFamily] == ["hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic"]
    assert [str(family) for family in ReasoningFamily] == ["think", "mistral", "seed_oss", "none"]
    assert [ReasoningFamily(name) for name in ("qwen3", "deepseek_r1")] == [ReasoningFamily.THINK] * 2
