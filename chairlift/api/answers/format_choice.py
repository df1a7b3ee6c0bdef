"""The format in which the served model writes its answers: one that is written by hand, or one that is declared.

The order: the server's settings; what the checkpoint declares; a declaration that comes with Chairlift, or a format
written by hand, whichever the chat template shows. Formats written by hand can be enforced by grammars, so if such a
format reads the same calls as the checkpoint's declaration, it is used instead of it.
"""

import logging

from chairlift.api import ServerConfig
from chairlift.api.answers.declared import (
    Declared,
    DeclaredFamily,
    ResponseTemplate,
    shipped_family_of_template,
    shipped_format,
)
from chairlift.api.answers.families import ToolFamily, family_of_template
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import ConfigurationError

logger = logging.getLogger(__name__)

_ARGUMENTS = '{"a": "b"}'
_SAMPLES = {  # a call of the function f with these arguments
    ToolFamily.HERMES: ['<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'],
    ToolFamily.LLAMA3_JSON: ['{"name": "f", "parameters": {"a": "b"}}'],
    ToolFamily.MISTRAL: ['[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}]', '[TOOL_CALLS]f[ARGS]{"a": "b"}'],
    ToolFamily.QWEN3_CODER: ["<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"],
    ToolFamily.SEED_OSS: [
        "<seed:tool_call>\n<function=f>\n<parameter=a>b</parameter>\n</function>\n</seed:tool_call>",
    ],
    ToolFamily.PYTHONIC: ['[f(a="b")]'],
    ToolFamily.HARMONY: ['<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b"}<|call|>'],
}


def answer_format(config: ServerConfig, tokenizer: Tokenizer) -> ToolFamily | Declared | None:
    """The format of calls, and if it is declared, of whole answers; None if none is known.

    ConfigurationError if the settings ask for a declaration that cannot be used. A checkpoint's own that cannot be used
    is a warning.
    """
    parser = config.tool_call_parser
    if config.response_template is not None:
        if parser not in (None, DeclaredFamily.DECLARED):
            raise ConfigurationError(f"response_template and tool_call_parser {parser} are both set; leave one out")
        return _declared_by_file(config)
    if parser is DeclaredFamily.DECLARED:
        if "response_template" not in tokenizer.declarations:
            raise ConfigurationError(
                "tool_call_parser declared: the checkpoint declares no response_template; set response_template"
            )
        try:
            return _usable(ResponseTemplate.read(tokenizer.declarations["response_template"]))
        except ValueError as error:
            raise ConfigurationError(
                f"tool_call_parser declared: the checkpoint's response_template: {error}"
            ) from error
    if parser is not None:
        return parser if isinstance(parser, ToolFamily) else shipped_format(parser)
    return _format_of_checkpoint(tokenizer)


def _format_of_checkpoint(tokenizer: Tokenizer) -> ToolFamily | Declared | None:
    by_hand = family_of_template(tokenizer.chat_template)
    declared = _declared_by_checkpoint(tokenizer)
    if declared is None:
        shipped = shipped_family_of_template(tokenizer.chat_template)
        return by_hand if shipped is None else shipped_format(shipped)
    if by_hand is None:
        return declared
    if not declared.has_calls or any(declared.reads(sample, "f", _ARGUMENTS) for sample in _SAMPLES[by_hand]):
        return by_hand
    logger.info("calls are read as the checkpoint's response_template declares them, not as %s", by_hand)
    return declared


def _declared_by_checkpoint(tokenizer: Tokenizer) -> Declared | None:
    given = tokenizer.declarations
    if "response_template" not in given:
        if "response_schema" in given:
            logger.warning(
                "the checkpoint's response_schema is not read: response_template has replaced it; if answers are not"
                " parsed well, give one with response_template"
            )
        return None
    try:
        return _usable(ResponseTemplate.read(given["response_template"]))
    except ValueError as error:
        logger.warning("the checkpoint's response_template is not used: %s", error)
        return None


def _declared_by_file(config: ServerConfig) -> Declared:
    path = config.response_template
    assert path is not None
    try:
        return _usable(ResponseTemplate.parse(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigurationError(f"response_template {path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"response_template {path}: {error}") from error


def _usable(template: ResponseTemplate) -> Declared:
    declared = Declared(template)
    if declared.unused_fields:
        logger.warning("replies leave out these fields of the response_template: %s", ", ".join(declared.unused_fields))
    if not declared.is_steady:
        logger.warning(
            "answers are parsed when they are complete, not while they stream: a pattern of the response_template looks"
            " back or excludes what follows"
        )
    return declared
