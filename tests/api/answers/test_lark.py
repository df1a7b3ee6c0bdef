"""Lark grammars as regular expressions. The judge is llguidance, which enforces both."""

import json
from random import Random

import pytest
from llguidance import LLMatcher

from chairlift.api.answers.lark import MAX_CHARACTERS, GrammarSyntaxError, NotRegular, pattern_of_lark
from tests.api.answers.calls import Verdict, byte_tokenizer, generate, judge

# The format in which Codex edits files.
APPLY_PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
_SIGNED = "start: CNAME WS_INLINE SIGNED_NUMBER NEWLINE"
GRAMMARS = {
    "list": 'start: "[" items? "]"\nitems: INT | items "," INT\n%import common.INT',
    "list that ends with itself": 'start: "a" | "b" start',
    "terminals": 'start: WORD (" " WORD)~1..3 "!"?\nWORD: /[a-z]{1,4}/i | "0".."9"\n',
    "prefixes": 'start: (a | "b"i)+ ["c"] | "d\\n\\u00e9" // a comment\n  | "e" -> name\n!a: "(" /[^\\/"]/ ")"',
    "library": f"{_SIGNED}\n" + "".join(f"%import common.{name}\n" for name in _SIGNED.split()[1:]),
}


def as_json(pattern: str) -> str:
    """The grammar of a JSON string whose text the pattern matches."""
    return LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"}))


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS.keys())
def test_a_pattern_in_json_matches_what_its_grammar_allows(grammar: str) -> None:
    quoted, plain = as_json(pattern_of_lark(grammar)), LLMatcher.grammar_from_lark(grammar)
    for seed in range(10):
        text = generate(plain, Random(seed), byte_tokenizer(), budget=60)
        written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        assert judge(quoted, written) is Verdict.COMPLETE, text
        text = json.loads(generate(quoted, Random(seed), byte_tokenizer(), budget=60))
        assert judge(plain, text) is Verdict.COMPLETE, text


def test_what_only_other_readers_of_lark_know_is_read() -> None:
    spread = '?start: (\n  a\n  | "b"\n)+ // of both\n  | "c"\na.2: INT\n%import common (INT, WS)\n'
    spread += "%import common.LF -> EOL\n"
    assert pattern_of_lark(spread) == "(?:(?:(?:(?:(?:[0-9]+))|b))+|c)"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "rule start contains itself"),
        ("start: a\na: b\nb: a", "rule a contains itself"),
        ('start: start "x"', "rule start has no end"),
        ('start: "a"\n%ignore " "', "%ignore is used"),
        ("start: %json {}", "%json is used"),
        ("start: A\nA: /a/ & /b/", "& is used"),
        ("start: <[1]>", "< is used"),
        ('start{x}: "a"', "rule start has parameters"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "it is too deeply nested"),
        ('start: "a"\n' + "//" * MAX_CHARACTERS, "it has more than 65536 characters"),
        ("\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)) + '\na40: "x"\nstart: a0', "it has more than 65536"),
    ],
)
def test_what_is_not_regular_says_what_of_it(grammar: str, reason: str) -> None:
    with pytest.raises(NotRegular) as caught:
        pattern_of_lark(grammar)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "rule start is not defined"),
        ("start: nope", "rule nope is not defined"),
        ('start "a"', ': is missing before "a"'),
        ('start: "a', '" is not expected there'),
        ('start: ("a"', ") is missing before the end"),
        ('start: "a"\nstart: "b"', "rule start is defined twice"),
        ("%import common.NOPE\nstart: NOPE", "common has no NOPE"),
        ('start: "ab".."c"', "a range needs two characters"),
        ('start: "\\q"', '"\\q" is not a string'),
        ("* start", "a name is missing before *"),
    ],
)
def test_what_is_no_grammar_says_why(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarSyntaxError) as caught:
        pattern_of_lark(grammar)
    assert str(caught.value) == reason


PATCH = '*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-\tx = "\\t"\n+é\n*** End Patch'
PATCHES = [PATCH, f"{PATCH}\n", PATCH.replace("Update", "Delete"), PATCH.replace("-\t", "*** End of File\n-\t")]
PATCHES += [PATCH.replace("@@", "@"), PATCH.replace("+é", "é"), PATCH[4:], PATCH.replace(": a", ": a\n*** Move to: b")]


def test_codexs_patches_are_the_same_texts_in_both() -> None:
    quoted, plain = as_json(pattern_of_lark(APPLY_PATCH)), LLMatcher.grammar_from_lark(APPLY_PATCH)
    verdicts = [judge(quoted, json.dumps(text, ensure_ascii=False)) for text in PATCHES]
    assert verdicts == [judge(plain, text) for text in PATCHES]
    expected = [True, True, False, False, False, False, False, True]
    assert [verdict is Verdict.COMPLETE for verdict in verdicts] == expected
