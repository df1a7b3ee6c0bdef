"""Holds how the rules of GGUF files (`tokenizer.ggml.pre`) take a text apart before its parts become tokens.

The patterns are those of the vendors' own tokenizer.json files. transformers has them as well, and more rules in newer
versions, but takes longer to import than all else that a tokenizer of a GGUF file needs.
"""

from collections.abc import Mapping

# The parts of which the patterns are made: contractions, words, numbers, other signs, and white space.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS, _SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_WORDS_BY_CASE = (f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+", f"{_BEFORE_WORD}{_UPPER}+{_LOWER}*")

_LLAMA3 = "|".join((_CONTRACTION, rf"{_BEFORE_WORD}\p{{L}}+", r"\p{N}{1,3}", _SIGNS, _SPACE))
_QWEN2 = "|".join((_CONTRACTION, rf"{_BEFORE_WORD}\p{{L}}+", r"\p{N}", _SIGNS, _SPACE))
_QWEN35 = "|".join(
    (_CONTRACTION, rf"{_BEFORE_WORD}[\p{{L}}\p{{M}}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACE)
)
_TEKKEN = "|".join((*_WORDS_BY_CASE, r"\p{N}", _SIGNS_AND_SLASHES, _SPACE))
_GPT_4O = "|".join((*(f"{word}{_CONTRACTION}?" for word in _WORDS_BY_CASE), r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACE))

_RULES = {
    _LLAMA3: (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx"),
        "smaug-bpe",
    ),
    _QWEN2: ("qwen2", "deepseek-r1-qwen", "megrez"),
    _QWEN35: ("qwen35",),
    _TEKKEN: ("tekken",),
    _GPT_4O: ("gpt-4o", "llama4", "kanana2"),
}
PATTERNS: Mapping[object, str] = {rule: pattern for pattern, rules in _RULES.items() for rule in rules}
"""By rule: the regular expression of a text's parts."""

_HAN_AND_KANA = r"[\u4e00-\u9fa5\u3040-\u30ff]+"
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}]"
_DEEPSEEK3_WORDS = (
    *(r"[!-/:-@\[-`{-~][A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*"),
    _SPACE,
)
_YOUTU_SCRIPTS = (
    *(r"[\uac00-\ud7a3\u3131-\u318e]+", r"[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+"),  # noqa: RUF001
    *(r"[\u3105-\u312f]+", _HAN_AND_KANA),
)
_YOUTU_WORDS = (*(f"{word}{_CONTRACTION}?" for word in _WORDS_BY_CASE), r"\p{N}", _SIGNS_AND_SLASHES, _SPACE)

SEQUENCES: Mapping[object, tuple[str, ...]] = {
    "glm4": (_LLAMA3,),
    "deepseek-llm": (
        *(r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$"),  # noqa: RUF001
        *(r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}+"),
    ),
    "deepseek-v3": (r"\p{N}{1,3}", _HAN_AND_KANA, "|".join(_DEEPSEEK3_WORDS)),
    "youtu": ("|".join(_YOUTU_SCRIPTS), "|".join(_YOUTU_WORDS)),
}
"""By rule: regular expressions of which each takes apart what those before it have left whole."""
