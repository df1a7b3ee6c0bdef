"""Declarations of families whose checkpoints bring none; see the files beside this one, in families/."""

import re
from enum import StrEnum
from functools import cache
from pathlib import Path

from chairlift.api.answers.declared.format import Declared
from chairlift.api.answers.declared.template import ResponseTemplate

_FILES = Path(__file__).parent / "families"


class DeclaredFamily(StrEnum):
    """Families that a file declares, by vLLM's names of their parsers, and `declared`: what the checkpoint declares."""

    DECLARED = "declared"
    GRANITE = "granite"
    PHI4_MINI = "phi4_mini_json"
    OLMO3 = "olmo3"
    LFM2 = "lfm2"
    NEMOTRON = "nemotron_json"
    GLM45 = "glm45"
    KIMI_K2 = "kimi_k2"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    GEMMA4 = "gemma4"


_DEEPSEEK_MARK = "<\uff5ctool\u2581sep\uff5c>"  # with a wide bar and a low block

_SIGNS = (  # the first that occurs in a template
    (r"<\|tool_call>call:", DeclaredFamily.GEMMA4),
    (r"<arg_key>", DeclaredFamily.GLM45),
    (r"<\|tool_call_argument_begin\|>|<\|im_system\|>tool_declare", DeclaredFamily.KIMI_K2),
    (f"(?s){_DEEPSEEK_MARK}.*```json|```json.*{_DEEPSEEK_MARK}", DeclaredFamily.DEEPSEEK_V3),
    (_DEEPSEEK_MARK, DeclaredFamily.DEEPSEEK_V31),
    (r"<function_calls>", DeclaredFamily.OLMO3),
    (r"<TOOLCALL>", DeclaredFamily.NEMOTRON),
    # Not every LFM2 shows a call, but all tell their tools like this, in a system message of ChatML.
    (r"(?s)<\|tool_call_start\|>|<\|tool_list_start\|>|List of tools: \[.*<\|im_start\|>", DeclaredFamily.LFM2),
    (r"<\|/tool\|>", DeclaredFamily.PHI4_MINI),
    # Granite 4 closes its calls, and writes them as Hermes does.
    (r"(?s)\A(?!.*</tool_call>)(?=.*<\|start_of_role\|>).*tool_call", DeclaredFamily.GRANITE),
)


@cache
def shipped_format(family: DeclaredFamily) -> Declared:
    """The format of a family that a file declares."""
    return Declared(ResponseTemplate.parse((_FILES / f"{family}.json").read_text(encoding="utf-8")))


def shipped_family_of_template(template: str) -> DeclaredFamily | None:
    """The family whose answers this chat template (Jinja source) shows; None if it is none of these."""
    return next((family for sign, family in _SIGNS if re.search(sign, template)), None)
