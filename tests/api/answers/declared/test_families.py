"""The declarations that come with Chairlift: answers as these models write them, whole, split, cut and malformed."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.api.answers import AnswerReader, Thoughts
from chairlift.api.answers.declared import DeclaredFamily, shipped_family_of_template, shipped_format
from chairlift.api.answers.text import CallPiece
from tests.api.answers.declared.support import SCHEMAS, Answer, call, every_split, joined, judged, pieces_of

FAMILIES = [family for family in DeclaredFamily if family is not DeclaredFamily.DECLARED]
GRANITE, PHI, OLMO, GLM = (
    DeclaredFamily.GRANITE,
    DeclaredFamily.PHI4_MINI,
    DeclaredFamily.OLMO3,
    DeclaredFamily.GLM45,
)
LFM, NEMOTRON = DeclaredFamily.LFM2, DeclaredFamily.NEMOTRON
PYTHON = (OLMO, LFM)  # whose calls need a parser that transformers lacks
GEMMA = DeclaredFamily.GEMMA4
KIMI, V3, V31 = DeclaredFamily.KIMI_K2, DeclaredFamily.DEEPSEEK_V3, DeclaredFamily.DEEPSEEK_V31
NESTED = {"city": "São Paulo 🎉", "days": 3, "options": {"units": ["°C", "m/s"], "deep": {"a": None, "b": True}}}
ROME = {"city": "Rome"}
PARALLEL = [call("weather", **ROME), call("time"), call("weather", city="Oslo", days=1)]


def deepseek(mark: str) -> str:
    return f"<\uff5ctool\u2581{mark}\uff5c>"


def written(family: DeclaredFamily, *calls: tuple[str, str]) -> str:
    """These calls, as the family's chat template shows them to the model."""
    objects = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    match family:
        case DeclaredFamily.GRANITE:
            return f"<|tool_call|>[{objects}]"
        case DeclaredFamily.PHI4_MINI:
            return f"functools[{objects}]"
        case DeclaredFamily.OLMO3:
            lines = (f"{name}({_keywords(arguments)})" for name, arguments in calls)
            return "<function_calls>" + "\n".join(lines) + "</function_calls>"
        case DeclaredFamily.LFM2:
            written_calls = ", ".join(f"{name}({_keywords(arguments)})" for name, arguments in calls)
            return f"<|tool_call_start|>[{written_calls}]<|tool_call_end|>"
        case DeclaredFamily.NEMOTRON:
            return f"<TOOLCALL>[{objects}]</TOOLCALL>"
        case DeclaredFamily.GLM45 | DeclaredFamily.GEMMA4:
            write = _glm if family is GLM else _gemma
            return "\n".join(write(name, arguments) for name, arguments in calls)
        case DeclaredFamily.KIMI_K2:
            begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
            parts = (f"{begin}functions.{name}:{i}{middle}{raw}{end}" for i, (name, raw) in enumerate(calls))
            return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"
        case DeclaredFamily.DEEPSEEK_V3 | DeclaredFamily.DEEPSEEK_V31:
            is_new = family is DeclaredFamily.DEEPSEEK_V31
            begin, middle, end = deepseek("call\u2581begin"), deepseek("sep"), deepseek("call\u2581end")
            bodies = (
                f"{name}{middle}{raw}" if is_new else f"function{middle}{name}\n```json\n{raw}\n```"
                for name, raw in calls
            )
            parts = (f"{begin}{body}{end}" for body in bodies)
            return f"{deepseek('calls▁begin')}{''.join(parts)}{deepseek('calls▁end')}"
        case DeclaredFamily.DECLARED:
            raise AssertionError("it is no family")


def _keywords(arguments: str) -> str:
    values = {key: _dumps(value) if isinstance(value, str) else value for key, value in json.loads(arguments).items()}
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _elements(arguments: str) -> str:
    values = {key: value if isinstance(value, str) else _dumps(value) for key, value in json.loads(arguments).items()}
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())


def _glm(name: str, arguments: str) -> str:
    return f"<tool_call>{name}\n{_elements(arguments)}</tool_call>"


def _gemma(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{_gemma_value(json.loads(arguments))}<tool_call|>"


def _gemma_value(value: object) -> str:
    """Gemma 4's kind of JSON: keys without quotes, and strings between marks of their own."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in value.items()) + "}"
    return f"[{','.join(map(_gemma_value, value))}]" if isinstance(value, list) else json.dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


EVERY = pytest.mark.parametrize("family", FAMILIES)
THINKING = pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (PHI, GEMMA)])


@EVERY
def test_text_without_calls_is_content(family: DeclaredFamily) -> None:
    text = 'How can I help? Try {"name": "f"}, [f(a=1)], <tool>, functools.partial, ```json\n{}\n```.'
    assert every_split(shipped_format(family), text) == Answer(text)
    assert judged(shipped_format(family), text) == Answer(text) if family not in PYTHON else True


@EVERY
@pytest.mark.parametrize(
    "calls", [[call("weather", **NESTED)], PARALLEL, [call("time")], [call("weather", city='a "b" \\ <x>\n]}')]]
)
def test_calls_are_read_as_they_are_written(family: DeclaredFamily, calls: list[tuple[str, str]]) -> None:
    form, text = shipped_format(family), written(family, *calls)
    assert every_split(form, text) == Answer(calls=calls)
    if family not in PYTHON:
        assert judged(form, text) == Answer(calls=calls)


@EVERY
def test_content_before_calls_and_after_them_is_kept(family: DeclaredFamily) -> None:
    calls = [call("weather", **ROME)]
    answer = every_split(shipped_format(family), f"Let me see.\n{written(family, *calls)}\nDone.")
    assert answer == Answer("Let me see.\nDone.", calls=calls)


@THINKING
def test_thoughts_come_apart(family: DeclaredFamily) -> None:
    form, calls = shipped_format(family), [call("weather", **ROME)]
    text = f"<think>\nHm, {{let}} me see.\n</think>\n\nRome it is.\n{written(family, *calls)}"
    expected = Answer("Rome it is.", "Hm, {let} me see.", calls)
    assert every_split(form, text) == expected
    if family not in PYTHON:
        assert judged(form, text) == expected


@THINKING
def test_calls_end_thoughts_that_are_never_closed(family: DeclaredFamily) -> None:
    text = f"Hm.\n{written(family, *PARALLEL)}"
    for texts in ([text], list(text)):
        reader = AnswerReader(shipped_format(family), None, SCHEMAS, Thoughts("<think>", "</think>", has_begun=True))
        pieces = [piece for each in texts for piece in reader.push(each)]
        assert joined([*pieces, *reader.push("", True, True)]) == Answer("", "Hm.", PARALLEL)


@THINKING
def test_thoughts_that_the_prompt_begins_or_closes(family: DeclaredFamily) -> None:
    form = shipped_format(family)
    anchor = form.template.start_anchor
    anchor = anchor[0] if isinstance(anchor, list) else anchor
    begun, closed = form.after(f"Hi{anchor}<think>\n"), form.after(f"{anchor}<think>a{anchor}<think></think>\n")
    assert begun is not None
    assert closed is not None
    assert every_split(begun, "Hm.\n</think>\n\nFour.") == Answer("Four.", "Hm.")
    assert every_split(closed, "Four.") == Answer("Four.")
    assert form.after("Hi") is None


def test_gemma_4s_thoughts_are_a_channel_that_the_prompt_may_have_closed() -> None:
    form, calls = shipped_format(GEMMA), [call("weather", **ROME)]
    text = f"<|channel>thought\nHm, {{let}} me see.\n<channel|>Rome it is.{written(GEMMA, *calls)}"
    assert every_split(form, text) == judged(form, text) == Answer("Rome it is.", "Hm, {let} me see.", calls)
    closed = form.after("<|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>")
    assert closed is not None
    assert every_split(closed, "Four.<turn|>") == Answer("Four.")


@EVERY
def test_after_the_last_wanted_call_nothing_is_read(family: DeclaredFamily) -> None:
    answer = every_split(shipped_format(family), written(family, *PARALLEL) + "more", max_calls=1)
    assert answer == Answer(calls=PARALLEL[:1])


def test_a_call_of_elements_is_told_with_its_closing_mark() -> None:
    reader = AnswerReader(shipped_format(GLM), 1, SCHEMAS)
    assert reader.push(written(GLM, call("weather", **ROME))[:-1]) == []
    assert not reader.is_full
    assert reader.push(">") == [CallPiece(0, "weather", '{"city": "Rome"}')]
    assert reader.is_full


@pytest.mark.parametrize("family", [GRANITE, PHI, OLMO, LFM, NEMOTRON, KIMI, V3, V31])
def test_a_call_that_is_cut_has_the_arguments_so_far(family: DeclaredFamily) -> None:
    text = written(family, call("weather", **NESTED))
    cut = text[: text.index("São") + 2]
    ((name, arguments),) = every_split(shipped_format(family), cut).calls
    assert (name, arguments[:11]) == ("weather", '{"city": "S')


@pytest.mark.parametrize("family", [OLMO, LFM, GLM])
def test_a_call_that_is_cut_before_any_argument_is_text(family: DeclaredFamily) -> None:
    cut = written(family, call("weather", **ROME)).partition("er")[0]
    assert every_split(shipped_format(family), f"Hi. {cut}") == Answer(f"Hi. {cut}")


def test_a_call_whose_end_the_model_forgets_is_a_call() -> None:
    pieces = AnswerReader(shipped_format(GLM)).push("<tool_call>time", is_last=True, is_whole=True)
    assert joined(pieces) == Answer(calls=[call("time")])


def test_a_cut_call_of_elements_has_those_that_are_complete() -> None:
    text = written(GLM, call("weather", city="Rome", days=2))
    expected = Answer(calls=[call("weather", city="Rome")])
    assert every_split(shipped_format(GLM), text[: text.index("days")]) == expected
    assert judged(shipped_format(GLM), text[: text.index("days")]) == expected


WEATHER_OBJECT = '{"name": "weather", "arguments": {"city": "Rome"}}'
ONE = Answer(calls=[call("weather", **ROME)])
SHAPES: list[tuple[DeclaredFamily, str, Answer]] = [
    (GRANITE, f"<tool_call> [{WEATHER_OBJECT}]", ONE),
    (GRANITE, f"<|tool_call|> {WEATHER_OBJECT}", ONE),
    (GRANITE, f"<tool_call>\n[\n  {WEATHER_OBJECT}\n]</tool_call>", ONE),
    (GRANITE, '<|tool_call|>[{"arguments": {"city": "Rome"}, "name": "weather"}]', ONE),
    (GRANITE, "<think>Hm.</think><response>Hi.</response>", Answer("Hi.", "Hm.")),
    (GRANITE, "<|tool_call|> [1, 2]", Answer("<|tool_call|> [1, 2]")),
    (PHI, f"<|tool_call|>[{WEATHER_OBJECT}]<|/tool_call|>", ONE),
    (PHI, f"<|tool_call|>{WEATHER_OBJECT}<|/tool_call|>", ONE),
    (PHI, f"functools[\n  {WEATHER_OBJECT}\n]", ONE),
    (PHI, 'functools[{"name": "weather", "parameters": {"city": "Rome"}}]', ONE),
    (PHI, "functools[] This is text", Answer("functools[] This is text")),
    (PHI, "a functools[ This is text ]", Answer("a functools[ This is text ]")),
    (PHI, f"functools{WEATHER_OBJECT}", Answer(f"functools{WEATHER_OBJECT}")),
    (OLMO, "<function_calls>\nweather(city='Rome')\n</function_calls>", ONE),
    (OLMO, '<function_calls>[weather(city="Rome")]</function_calls>', ONE),
    (
        OLMO,
        "<function_calls>f(a=null, b=true, c=None)</function_calls>",
        Answer(calls=[call("f", a=None, b=True, c=None)]),
    ),
    (OLMO, "<function_calls>f(x=b'z', y={1})</function_calls>", Answer(calls=[call("f", x="b'z'", y="{1}")])),
    (OLMO, r'<function_calls>f(a="\d+ \"x\"")</function_calls>', Answer(calls=[call("f", a='\\d+ "x"')])),
    (OLMO, "<function_calls>a.b(x=-1, y=(1, 2))</function_calls>", Answer(calls=[call("a.b", x=-1, y=[1, 2])])),
    *(
        (
            OLMO,
            f"Hi <function_calls>{bad}</function_calls> there",
            Answer(f"Hi <function_calls>{bad}</function_calls> there"),
        )
        for bad in ("f(1)", "x = 1", "", "[1, 2]", "f(**a)", "f(a)")
    ),
    (OLMO, "<function_calls>f(x=1])</function_calls> there", Answer("there", calls=[call("f", x=1)])),
    (OLMO, "<function_calls>f()\noops\n</function_calls>", Answer("oops", calls=[call("f")])),
    (LFM, '<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>Checking.', Answer("Checking.", calls=ONE.calls)),
    (LFM, "<|tool_call_start|>weather(city='Rome')<|tool_call_end|>", ONE),
    (LFM, "<|tool_call_start|>[f(a)]<|tool_call_end|>", Answer("<|tool_call_start|>[f(a)]<|tool_call_end|>")),
    (NEMOTRON, f"<TOOLCALL>{WEATHER_OBJECT}</TOOLCALL>", ONE),
    (NEMOTRON, f"<TOOLCALL>\n[\n  {WEATHER_OBJECT}\n]\n</TOOLCALL>", ONE),
    (NEMOTRON, "<TOOLCALL>[1, 2]</TOOLCALL>", Answer("<TOOLCALL>[1, 2]</TOOLCALL>")),
    (GLM, "<tool_call>time\n</tool_call>", Answer(calls=[call("time")])),
    (GLM, "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>", ONE),
    (
        GLM,
        "<tool_call>f<arg_key>a</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
        Answer(calls=[call("f", a=[1, 2])]),
    ),
    *(
        (
            GLM,
            f"<tool_call>weather<arg_key>options</arg_key><arg_value>{options}</arg_value></tool_call>",
            Answer(calls=[call("weather", options={"a": True})]),
        )
        for options in ('{\\"a\\": true}', '"{\\"a\\": true}"', "{'a': true}", '{"a": true')
    ),
    (GLM, "<tool_call></tool_call>", Answer("<tool_call></tool_call>")),
    (
        GLM,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
        Answer(calls=[call("weather", city="12", days=12)]),
    ),
    (KIMI, '<|tool_call_begin|>weather:7 <|tool_call_argument_begin|>\n{"city": "Rome"} \n<|tool_call_end|>', ONE),
    (KIMI, "<|tool_call_begin|>weather<|tool_call_end|>", Answer("<|tool_call_begin|>weather<|tool_call_end|>")),
    (
        GEMMA,
        '<|tool_call>call:f{a:[1,-2.5,true,null],b-c:{d:<|"|>x:{,"y":1}<|"|>}}<tool_call|><|tool_response>',
        Answer("<|tool_response>", calls=[call("f", a=[1, -2.5, True, None], **{"b-c": {"d": 'x:{,"y":1}'}})]),
    ),
    (GEMMA, "<|tool_call>call:time{}<tool_call|>", Answer(calls=[call("time")])),
    (GEMMA, '<|tool_call>call:weather{"city": "Rome"}<tool_call|>', ONE),
    (GEMMA, "<|tool_call>call:f<tool_call|>", Answer("<|tool_call>call:f<tool_call|>")),
    (V3, f"{deepseek('calls▁begin')}function{deepseek('sep')}f", Answer(f"function{deepseek('sep')}f")),
    (
        V3,
        f'{deepseek("call▁begin")}function{deepseek("sep")}weather\n```json\n{{"city": "Rome"}}{deepseek("call▁end")}',
        ONE,
    ),
]


@pytest.mark.parametrize(("family", "text", "answer"), SHAPES)
def test_other_shapes_that_models_write(family: DeclaredFamily, text: str, answer: Answer) -> None:
    assert every_split(shipped_format(family), text) == answer


@pytest.mark.parametrize("family", [GRANITE, PHI, NEMOTRON, KIMI, V3, V31])
@pytest.mark.parametrize("raw", ['{"city": "Rome"', '{"city": "Rome"}}', "{'city': Rome}", '{"city": "Rome",}'])
def test_malformed_arguments_become_json_and_the_next_call_is_read(family: DeclaredFamily, raw: str) -> None:
    text = written(family, ("weather", raw), call("time"))
    answer = every_split(shipped_format(family), text)
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [("weather", ROME), ("time", {})]
    assert answer.content == ""


MARKS = [
    *(
        "<think>",
        "</think>",
        "\n",
        " ",
        "<",
        "`",
        "text",
        '{"a": 1}',
        '{"name": "f", "arguments": {"b": "<"}}',
        "[",
        "]",
        ",",
    ),
    *("<tool_call>", "<|tool_call|>", "</tool_call>", "<response>", "functools", "<|/tool_call|>", "<function_calls>"),
    *(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<TOOLCALL>",
        "</TOOLCALL>",
        "</function_calls>",
        "f(a='b')",
        "f",
        "<arg_key>a</arg_key>",
        "<arg_value>1</arg_value>",
        "<arg_value>",
    ),
    *("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "```json\n", "```"),
    *("<|channel>thought\n", "<channel|>", "<|tool_call>call:f", "{a:", '<|"|>', "}", "<tool_call|>", "<turn|>"),
    *("<|tool_calls_section_begin|>", deepseek("call▁begin"), deepseek("call▁end"), deepseek("sep"), "function"),
]


@EVERY
@given(parts=st.lists(st.sampled_from(MARKS), max_size=12), cuts=st.lists(st.integers(0, 120), max_size=6))
def test_the_split_does_not_matter_whatever_is_written(
    family: DeclaredFamily, parts: list[str], cuts: list[int]
) -> None:
    text = "".join(parts)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    split = [text[begin:end] for begin, end in pairwise(ends)]
    form = shipped_format(family)
    assert joined(pieces_of(form, split)) == joined(pieces_of(form, [text])) == joined(pieces_of(form, list(text)))


TEMPLATES = {
    "{% if tools %}<tool_call>{name}\n<arg_key>{k}</arg_key>": GLM,
    "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}": KIMI,
    "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>": KIMI,
    f"{{{{ 'function{deepseek('sep')}' + name + '\\n```json\\n' }}}}": V3,
    f"{{{{ name + '{deepseek('sep')}' + arguments }}}}": V31,
    "<functions>{{ tools }}</functions><function_calls>": OLMO,
    'List of tools: [{{ tools }}]{{ "<|im_start|>system" }}': LFM,
    "<|im_start|>List of tools: <|tool_list_start|>[{{ tools }}]": LFM,
    "<|im_start|>assistant\n<|tool_call_start|>[{{ calls }}]<|tool_call_end|>": LFM,
    "<SPECIAL_11>Assistant\n<TOOLCALL>[{{ calls }}]</TOOLCALL>": NEMOTRON,
    "<|system|>{{ content }}<|tool|>{{ tools }}<|/tool|>": PHI,
    "<|start_of_role|>system<|end_of_role|>respond with <|tool_call|> followed by a JSON list": GRANITE,
    "{% set task = 'answer with <|tool_call|> and a list' %}<|start_of_role|>system<|end_of_role|>{{ task }}": GRANITE,
    "<|start_of_role|>system<|end_of_role|><tool_call>\n{...}\n</tool_call>": None,  # Granite 4 is Hermes
    "<tool_call>{{ call | tojson }}</tool_call>": None,
    "{{ '<|tool_call>call:' + function['name'] + '{' }}": GEMMA,
    "": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_families_are_recognised_by_their_chat_templates(template: str) -> None:
    assert shipped_family_of_template(template) == TEMPLATES[template]
