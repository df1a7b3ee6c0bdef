"""Templates of strangers: none takes much time or memory, and all others render as transformers renders them."""

import resource
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from transformers import PreTrainedTokenizerFast

from chairlift.engine.text.chat_template import ChatOptions
from chairlift.engine.text.template_limits import LimitedSandbox, TemplateTooCostly, limited
from chairlift.engine.text.tokenizer import Tokenizer
from chairlift.errors import InvalidRequest
from tests.engine.tokenizers_made import CHATML, make_byte_tokenizer

HI = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(100000) %}"
DOUBLE = "{% set ns = namespace(v='xxxxxxxx') %}{% for i in range(60) %}{% set ns.v = "
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
COSTLY = {
    "loops in loops": LOOP * 3 + "{% endfor %}" * 3,
    "text in loops": LOOP * 2 + "x" * 100 + "{% endfor %}" * 2,
    "tests of loops": LOOP + "{% for j in range(100000) if j < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% set t = [[[]] * 90] * 90 %}{% for x in [t] * 90 recursive %}{{ loop(x) }}{{ loop(x) }}"
    "{% endfor %}",
    "macros that call themselves": RECURSIVE,
    "a text times a number": "{{ 'x' * 10**9 }}",
    "a number times a text": "{{ 10**9 * 'x' }}",
    "a list times a number": "{{ ([1] * 10**9)|length }}",
    "doubling by +": DOUBLE + "ns.v + ns.v %}{% endfor %}",
    "doubling by ~": DOUBLE + "ns.v ~ ns.v %}{% endfor %}",
    "doubling by capture": "{% set ns = namespace(v='xxxxxxxx') %}{% for i in range(60) %}{% set c %}{{ ns.v }}"
    "{{ ns.v }}{% endset %}{% set ns.v = c %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(v=[1]) %}{% for i in range(60) %}{% set ns.v = ns.v + ns.v %}{% endfor %}",
    "lists in lists": "{% set ns = namespace(v=[1]) %}{% for i in range(60) %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}"
    "{{ ns.v|tojson }}",
    "a namespace of lists": "{% set ns = namespace(v=[1]) %}{% for i in range(60) %}{% set ns.v = [ns.v, ns.v] %}"
    "{% endfor %}{{ ns }}",
    "slices": "{% set t = 'x' * 10**7 %}{% set ns = namespace(v=[]) %}{% for i in range(100000) %}"
    "{% set ns.v = [ns.v, t[1:]] %}{% endfor %}",
    "printing": "{% set t = 'x' * 10**7 %}" + LOOP + "{{ t }}{% endfor %}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "squares of squares": DOUBLE.replace("'xxxxxxxx'", "9") + "ns.v * ns.v %}{% endfor %}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "center": "{{ 'x'|center(10**9) }}",
    "center, the method": "{{ 'x'.center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "expandtabs": "{{ ('\\t' * 10**5).expandtabs(10**5) }}",
    "indent": "{{ ('\\n' * 10**5)|indent(10**5) }}",
    "indent by a text": "{{ ('\\n' * 10**5)|indent('x' * 10**5) }}",
    "wordwrap": "{{ ('x' * 10**5)|wordwrap(1, wrapstring='x' * 10**5) }}",
    "replace": "{{ ('x' * 10**5)|replace('x', 'y' * 10**5) }}",
    "replace, the method": "{{ ('x' * 10**5).replace('', 'y' * 10**5) }}",
    "join": "{{ (['x' * 10**5] * 10**5)|join }}",
    "join, the method": "{{ ('y' * 10**5).join(['x'] * 10**5) }}",
    "join of a mapped list": "{{ ''.join(range(100000)|map('string')|map('center', 10**5)) }}",
    "string": "{{ (['x' * 10**5] * 10**5)|string|length }}",
    "upper": "{{ (['x' * 10**5] * 10**5)|upper }}",
    "tojson": "{{ (['x' * 10**5] * 10**5)|tojson }}",
    "tojson, indented": "{{ ([1] * 10**5)|tojson(indent=10**5) }}",
    "tojson, indented by a text": "{{ ([1] * 10**5)|tojson(indent='x' * 10**5) }}",
    "tojson, separated": "{{ ([1] * 10**5)|tojson(separators=('x' * 10**5, ':')) }}",
    "%": "{{ '%999999999d' % 1 }}",
    "% with a width": "{{ '%*d' % (999999999, 1) }}",
    "% of a long text": "{{ '%s' * 10**5 % ((('x' * 10**5),) * 10**5) }}",
    "format": "{{ '%999999999d'|format(1) }}",
    "format, the method": "{{ '{:999999999}'.format(1) }}",
    "format with a width": "{{ '{:{}}'.format(1, 999999999) }}",
    "format of a long text": "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "translate": "{{ ('x' * 10**5).translate({120: 'y' * 10**5}) }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "slice": "{{ [1]|slice(10**9)|list|length }}",
    "split": "{{ ('x ' * 10**8).split() }}",
    "bytes": "{{ (1).to_bytes(10**9) }}",
    "sum": "{{ ([[1] * 10**5] * 10**5)|sum(start=[]) }}",
    "urlize": "{{ ('a.com ' * 10**5)|urlize(target='x' * 10**5) }}",
    "lorem ipsum": "{{ lipsum(10**9) }}",
}

# They take a second or more each, as do loops in loops.
LONG = {"a recursive loop", "macros that call themselves", "lists in lists", "a namespace of lists", "sum"}
LONG |= {"tests of loops", "text in loops", "printing"}


def load(directory: Path, template: str) -> Tokenizer:
    make_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    return Tokenizer(directory)


def peak_memory() -> int:
    """Returns the peak of this process so far, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    "template",
    [pytest.param(text, id=name, marks=[pytest.mark.slow] * (name in LONG)) for name, text in COSTLY.items()],
)
def test_a_costly_template_ends_soon_and_takes_little_memory(template: str) -> None:
    begin, before = time.thread_time(), peak_memory()
    with limited(), pytest.raises((TemplateTooCostly, UndefinedError), match=r"^it |'lipsum' is undefined"):
        LimitedSandbox().from_string(template).render()
    assert time.thread_time() - begin < 5
    assert peak_memory() - before < 2**20


@pytest.mark.parametrize("name", ["loops in loops", "slices"])
def test_a_costly_template_is_refused_at_start_and_by_request(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin, before = time.thread_time(), peak_memory()
    tokenizer = load(tmp_path, COSTLY[name])
    assert "chat does not work" in caplog.messages[-1]
    with pytest.raises(InvalidRequest, match=r"refuses these messages: it (makes|takes) more than"):
        tokenizer.render_chat(HI, ChatOptions())
    assert time.thread_time() - begin < 10
    assert peak_memory() - before < 2**20


def test_a_template_that_is_costly_for_one_message_is_refused_for_that(tmp_path: Path) -> None:
    """Also where the message spells special tokens, for which it is rendered several times."""
    trap = CHATML + "{% if messages[0].content.startswith('boom') %}" + COSTLY["loops in loops"] + "{% endif %}"
    tokenizer = load(tmp_path, trap)
    assert "hi" in tokenizer.render_chat(HI, ChatOptions())
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"it (makes|takes) more than"):
        tokenizer.encode_chat([{"role": "user", "content": "boom <|im_end|>"}], ChatOptions(), max_tokens=1000)
    assert time.thread_time() - begin < 5
    assert "hi" in tokenizer.render_chat(HI, ChatOptions())


def test_a_template_that_calls_itself_for_ever_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(InvalidRequest, match="maximum recursion depth"):
        tokenizer.render_chat(HI, ChatOptions())


def test_a_long_conversation_is_well_within_the_limits(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "some words " * 100} for _ in range(2000) for role in ("user", "assistant")]
    thinking = CHATML.replace("message['content']", "message['content'].split('</think>')[-1].strip()")
    rendered = load(tmp_path, thinking).render_chat(turns, ChatOptions())
    assert rendered.count("some words") == 400_000


HARMLESS = [
    CHATML,
    "{{ 'a' ~ 1 ~ none ~ 2.5 ~ [1, 'x'] ~ {'a': 1} }}|{{ 1 + 2 * 3 ** 2 % 5 }}|{{ 'ab' * 3 + '%s-%03d' % ('x', 7) }}",
    "{{ [1, 2] + [3] }}{{ (1, 2) * 2 }}{{ messages[0:1] }}{{ 'abc'[::-1] }}{{ messages[-1].content[1:] }}",
    "{% for i in range(6) if i % 2 %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.cycle('a', 'b') }}"
    "{% else %}none{% endfor %}{% for i in [] %}{% else %}none{% endfor %}",
    "{% for x in [[1, [2]], 3] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}"
    "{% endif %}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}{% endmacro %}"
    "{{ m(1, 2, 3, c=4) }}{% call m(7) %}called{% endcall %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{% filter upper %}b{{ x }}{% endfilter %}{% set y = x|trim %}{{ y }}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ messages|tojson }}{{ messages|tojson(indent=2) }}{{ messages|map(attribute='role')|join(', ') }}{{ nothing }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ [3, 1, 2]|sort|join }}{{ 'x'|center(5) }}",
    "{{ 'a b'.split() }}{{ '-'.join(['a', 'b']) }}{{ 'aXa'.replace('X', 'y') }}{{ '{}:{x}'.format(1, x=2) }}",
    "{{ 'a\nb'|indent(2) }}{{ 'a b c'|wordwrap(1) }}{{ '<'|e }}{{ 1.256|round(2) }}",
    "{{ [1, 2, 3]|batch(2)|list }}{{ 'a'|replace('a', 'b') }}{{ 'a'.zfill(3) }}",
    "{{ [[2, 1], [1]]|map('sum')|list }}{{ {'b': 1, 'a': 2}|dictsort }}{{ '%s'|format('y') }}{{ [1, 1]|unique|list }}",
    "{% set ns = namespace(a=1) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ dict(a=1) }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ add_generation_prompt }}{{ tools }}",
    "{{ messages[0].items()|list }}{{ messages[0].get('x', 'y') }}{{ 'x' in messages[0] }}{{ range(3)|list }}",
]


@pytest.mark.parametrize("template", HARMLESS)
def test_all_other_templates_render_as_transformers_renders_them(tmp_path: Path, template: str) -> None:
    rendered = load(tmp_path, template).render_chat(HI, ChatOptions())
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert rendered == theirs.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert rendered


def test_what_is_not_chairlifts_rendering_has_no_limits() -> None:
    template = LimitedSandbox().from_string(
        "{{ ('x' * 10**8)|length }}{{ ('y' * 10**8)|length }}{{ ('z' * 10**8)|length }}"
    )
    assert template.render() == "100000000" * 3
