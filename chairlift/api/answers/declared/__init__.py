"""Formats of answers by declaration: a checkpoint's `response_template`, or a file in the same language, says which
marks enclose thoughts, content and calls, and how what is between them becomes values.

The language is that of transformers' response templates
(https://huggingface.co/docs/transformers/main/chat_response_parsing), version 1. What differs here is told in
docs/declared-formats.md.
"""

from chairlift.api.answers.declared.format import Declared
from chairlift.api.answers.declared.shipped import DeclaredFamily, shipped_family_of_template, shipped_format
from chairlift.api.answers.declared.template import ResponseTemplate

__all__ = ["Declared", "DeclaredFamily", "ResponseTemplate", "shipped_family_of_template", "shipped_format"]
