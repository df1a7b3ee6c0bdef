"""Formats by name and by chat template, and thoughts before an answer."""

import pytest

from chairlift.api.tools import (
    AnswerReader,
    ReasoningFamily,
    Thoughts,
    ToolFamily,
    family_of_template,
    reasoning_of_template,
)
from chairlift.api.tools.text import CallPiece, ContentPiece, ReasoningPiece
from tests.api.tools.reading import assert_streams

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


MAY_BEGIN, HAS_BEGUN = Thoughts("<think>", "</think>", False), Thoughts("<think>", "</think>", True)


def told(thoughts: Thoughts, texts: list[str], family: ToolFamily | None = None) -> tuple[str, str, list[str]]:
    """Reasoning, content, and the names of calls. Reasoning comes before all else."""
    reader = AnswerReader(family, thoughts=thoughts)
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.finish()
    kinds = [isinstance(piece, ReasoningPiece) for piece in pieces]
    assert kinds == sorted(kinds, reverse=True)
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
    return reasoning, content, [piece.name for piece in pieces if isinstance(piece, CallPiece) and piece.name]


@pytest.mark.parametrize(
    ("thoughts", "text", "reasoning", "content"),
    [
        (MAY_BEGIN, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (MAY_BEGIN, "\n<think>Hm.</think>Yes.\n", "Hm.", "Yes.\n"),
        (MAY_BEGIN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (MAY_BEGIN, "<think>\nHm", "Hm", ""),
        (MAY_BEGIN, "<think>Hm </thi", "Hm </thi", ""),
        (MAY_BEGIN, "Yes.", "", "Yes."),
        (MAY_BEGIN, "\n Yes. <think>no</think>", "", "\n Yes. <think>no</think>"),
        (MAY_BEGIN, "<thin", "", "<thin"),
        (MAY_BEGIN, "", "", ""),
        (HAS_BEGUN, "Hm.\n\nHm.\n</think>\n\nYes.", "Hm.\n\nHm.", "Yes."),
        (HAS_BEGUN, "<think>\nHm.</think>Yes. </think>", "Hm.", "Yes. </think>"),
        (HAS_BEGUN, "</think>\n\n  Yes.", "", "  Yes."),
        (HAS_BEGUN, " Hm\n", " Hm\n", ""),
    ],
)
def test_thoughts_end_where_the_mark_stands(thoughts: Thoughts, text: str, reasoning: str, content: str) -> None:
    for texts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert told(thoughts, texts) == (reasoning, content, [])


@pytest.mark.parametrize("family", [ToolFamily.HERMES, ToolFamily.QWEN3_CODER, ToolFamily.LLAMA3_JSON])
def test_calls_are_looked_for_behind_the_thoughts_only(family: ToolFamily) -> None:
    calls = {
        ToolFamily.HERMES: '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ToolFamily.QWEN3_CODER: "<tool_call><function=f></function></tool_call>",
        ToolFamily.LLAMA3_JSON: '{"name": "f", "parameters": {}}',
    }
    text = f"{calls[family]}</think>\n\n{calls[family]}"
    for texts in ([text], list(text)):
        assert told(HAS_BEGUN, texts, family) == (calls[family], "", ["f"])


def test_thoughts_stream_at_once() -> None:
    assert_streams(
        AnswerReader(None, thoughts=MAY_BEGIN),
        ("<thi", []),
        ("nk>\n", []),
        ("Hm. ", [ReasoningPiece("Hm. ")]),
        ("So\n</", [ReasoningPiece("So")]),
        ("b>", [ReasoningPiece("\n</b>")]),
        ("</think>", []),
        ("\n\nYes", [ContentPiece("Yes")]),
    )
