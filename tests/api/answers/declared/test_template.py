"""Response templates that are refused: the reason in one line, and whether transformers refuses them as well."""

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from chairlift.api.answers.declared import Declared, DeclaredFamily, ResponseTemplate, shipped_format


def template(**changes: Any) -> dict[str, Any]:
    return {"start_anchor": "<a>", "fields": {"content": {}}, **changes}


def field(name: str = "tool_calls", **given: Any) -> dict[str, Any]:
    return template(fields={name: {"open": "<t>", **given}})


WRONG: list[tuple[Any, str]] = [
    ([], "Input should be a valid dictionary or instance of ResponseTemplate"),
    ({"fields": {"content": {}}}, "start_anchor or start_anchor_pattern is missing"),
    (template(version=2), "version: Input should be 1"),
    (template(fields={}), "fields: Dictionary should have at least 1 item after validation, not 0"),
    (template(regex="x"), "regex: Extra inputs are not permitted"),
    (template(start_anchor=""), "start_anchor has an empty mark"),
    (template(start_anchor_pattern="x"), "start_anchor and start_anchor_pattern cannot both be given"),
    (template(fields={"content": {}, "thinking": {}}), "only one field may have neither open nor open_pattern, not"),
    (field(close=["x", ""]), "fields.tool_calls: close has an empty mark"),
    (field(open_pattern="x"), "fields.tool_calls: open and open_pattern cannot both be given"),
    (field(content="yaml"), "fields.tool_calls.content: Input should be 'text', 'int'"),
    (field(colour=1), "fields.tool_calls.colour: Extra inputs are not permitted"),
    (field(join=","), "fields.tool_calls: join needs repeats: true"),
    (field(transform_each=True), "fields.tool_calls: transform_each needs a transform"),
    (field(transform={"a": "x {b}"}), "fields.tool_calls: transform: 'x {b}' mixes a placeholder with other text"),
    (field(close_pattern="("), "fields.tool_calls.close_pattern: it is not a regular expression: missing )"),
    (field(close_pattern="(?P<end>x)"), "fields.tool_calls: no transform uses the group end"),
]
OURS: list[tuple[Any, str]] = [  # of which transformers finds out when it parses, or never
    (field(content="xml-inline"), "fields.tool_calls: content_args: xml-inline needs a tag_pattern"),
    (template(fields={"tool_calls": {}}), "tool_calls needs open or open_pattern"),
    (template(fields={"role": {}}), "fields: none is content, tool_calls or reasoning_content, reasoning, thinking"),
    (field(close_pattern="x*"), "fields.tool_calls.close_pattern: it matches the empty text"),
    (field(close_pattern="(?:a|aa)+[bc]"), "fields.tool_calls.close_pattern: it takes too long"),
    (field(content="python-calls", transform={}), "fields.tool_calls: python-calls takes no transform"),
    (field("thinking", content="python-calls"), "fields.thinking: python-calls is for tool_calls only"),
    (field(close="x" * 1001), "fields.tool_calls: close has more than 1000 characters"),
    (
        field(content="xml-inline", content_args={"tag_pattern": "<.*>"}),
        "fields.tool_calls.content_args: tag_pattern has no group named key",
    ),
    (
        field(content="xml-inline", content_args={"tag_pattern": "(?P<key>.)", "value_parser": {"name": "x"}}),
        "fields.tool_calls.content_args: value_parser names an unknown parser",
    ),
]


@pytest.mark.parametrize(("given", "reason"), [*WRONG, *OURS])
def test_a_wrong_template_is_refused_in_one_line(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refusal:
        Declared(ResponseTemplate.read(given))
    assert str(refusal.value).startswith(reason)


@pytest.mark.parametrize("given", [given for given, _ in WRONG])
def test_transformers_refuses_it_too(given: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        load_response_template(given)


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="Expecting property name"):
        ResponseTemplate.parse("{fields")
    with pytest.raises(ValueError, match="it is nested too deeply"):
        ResponseTemplate.parse('{"fields": ' + "[" * 100_000)


@pytest.mark.parametrize("family", [each for each in DeclaredFamily if each is not DeclaredFamily.DECLARED])
def test_declarations_that_come_with_chairlift_are_transformers_own(family: DeclaredFamily) -> None:
    """So that they can be added to a checkpoint; only OLMo 3 and LFM2 need a parser that transformers lacks."""
    given = json.loads(shipped_format(family).template.model_dump_json(by_alias=True, exclude_unset=True))
    if family in (DeclaredFamily.OLMO3, DeclaredFamily.LFM2):
        assert given["fields"]["tool_calls"].pop("content") == "python-calls"
    load_response_template(given)
