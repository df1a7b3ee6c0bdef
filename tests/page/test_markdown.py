"""Answers in Markdown: nothing that is shown changes its form as more comes, and nothing in them runs or loads."""

import pytest

from tests.page.page_support import LAST_SAID, ask, press
from tests.support.browser import Page
from tests.support.fake_site import FakeSite

pytestmark = pytest.mark.slow  # they need a browser

SAMPLE = """\
# Sorting

Here is **how** to sort in *Python*, with `sorted()`, _not_ `` a`b `` and ~~bubbles~~.
See [what the docs](https://docs.python.org) tell. Line two: 2*3, x_y_z, [1, 2] and a < b & c.
- one
- **two**: `x`
  1. deep
  2. *deeper*

```python
def f(words):
    return sorted(words)  # `all`
```

| a | `b` |
|---|---:|
| 1 | **2** |
| x<br>y | z |

> quoted *text*

---

### ***End***

    indented

10. ten
11. eleven ![picture](https://example.com/a.png).
"""

# Draws a text as it grows by one character at a time, and says where something that was shown has changed.
GROW = """import("/page/markdown_view.js").then(({ MarkdownView }) => {
  const element = document.body.appendChild(document.createElement("div"));
  const view = new MarkdownView(element);
  const changes = [];
  let [shown, tags, blocks] = ["", "", []];
  const compare = (at) => {
    const nowTags = [...element.querySelectorAll(":not(span, td:empty)")].map((each) => each.localName).join(" ");
    const now = element.textContent;
    if (!now.startsWith(shown)) changes.push([at, shown.slice(-40), now.slice(-40)]);
    if (!nowTags.startsWith(tags)) changes.push([at, tags, nowTags]);
    blocks.forEach((each, index) => each === element.children[index] || changes.push([at, "block", index]));
    [shown, tags, blocks] = [now, nowTags, [...element.children]];
  };
  [...arguments[0]].forEach((character, index) => {
    view.write(character);
    view.draw();
    compare(arguments[0].slice(0, index + 1).slice(-20));
  });
  const grown = element.innerHTML;
  view.finish();
  compare("the end");
  const whole = document.createElement("div");
  const other = new MarkdownView(whole);
  other.write(arguments[0]);
  other.finish();
  element.remove();
  return [changes, grown === whole.innerHTML, whole.innerHTML];
})"""


def test_what_is_shown_of_an_answer_only_grows_as_more_of_it_comes(page: Page) -> None:
    changes, is_whole, html = page.run(GROW, SAMPLE)
    assert changes == [], "\n".join(map(str, changes))
    assert is_whole, html


HOSTILE = """\
<script>window.stolen = 1</script> <img src=x onerror="window.stolen = 1"> <a href="javascript:window.stolen = 1">a</a>

<iframe srcdoc="<script>parent.stolen = 1</script>"></iframe>

<div style="position: fixed; inset: 0">

[a](javascript:window.stolen=1) [b](data:text/html,x) [c](v1/models) [d](//example.com) ![e](http://127.0.0.1:1/x.png) [f](https://example.com/"onclick=1)
<javascript:window.stolen=1> <https://example.com/%22> &lt;script&gt; [g](https://example.com 'title" onclick="1')

``` "><script>window.stolen=1</script>
</code></pre><script>window.stolen = 1</script>
```

```html
<script>window.stolen = 1</script>
```
"""


def test_nothing_in_a_hostile_answer_runs_loads_or_leads_to_the_server(page: Page, site: FakeSite) -> None:
    site.pieces = list(HOSTILE)
    ask(page, "Hi!")
    kinds = "[...new Set([...document.querySelectorAll('article *')].map((each) => each.localName))]"
    known = {"a", "br", "button", "code", "div", "h3", "p", "pre", "span"}
    assert set(page.run(kinds)) <= known
    links = "[...document.querySelectorAll('article a')].map((each) => [each.textContent, each.href, each.rel])"
    safe = "noopener noreferrer"
    assert page.run(links) == [
        ["e", "http://127.0.0.1:1/x.png", safe],
        ["f", "https://example.com/%22onclick=1", safe],
        ['https://example.com/"', "https://example.com/%22", safe],
        ["g", "https://example.com/", safe],
    ]
    names = "[...document.querySelectorAll('article *')].flatMap((each) => each.getAttributeNames())"
    assert set(page.run(names)) <= {"aria-label", "class", "href", "rel", "role", "tabindex", "target", "type"}
    others = "performance.getEntriesByType('resource').filter((each) => !each.name.startsWith(location.origin))"
    assert page.run(f"[window.stolen, {others}.length]") == [None, 0]


@pytest.mark.parametrize("text", ["*a " * 5000 + "a* " * 5000, "- " * 500 + "a", "```js\n" + "`${" * 5000])
def test_no_answer_is_nested_so_deeply_that_a_browser_fails(page: Page, site: FakeSite, text: str) -> None:
    site.pieces = [text]
    ask(page, "Hi!")
    depth = "((each) => { let depth = 0; for (; each !== null; each = each.parentElement) depth += 1; return depth; })"
    assert page.run(f"Math.max(...[...document.querySelectorAll('article *')].map({depth}))") < 100


def test_code_is_coloured_and_copied_as_it_was_written(page: Page, site: FakeSite) -> None:
    code = 'def f(a: int = 1) -> "str":\n    return <b>&amp;  # "that"'
    site.pieces = [f"So:\n\n```py title=x\n{code}\n```\n"]
    ask(page, "Hi!")
    assert page.run("document.querySelector('.code code').textContent") == code
    assert page.count(".code .hljs-keyword") == 2
    # There is no clipboard to read here: what is put into it is caught.
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    press(page, "Copy")
    page.wait_for_text("article.assistant .actions", "Copied")
    assert page.run("window.copied") == site.pieces[0]
    page.click(".code button")
    page.wait_for_text(".code button", "Copied")
    assert page.run("window.copied") == code
    # On a page of plain HTTP there is none: the text is selected and copied.
    page.run("[navigator.clipboard.writeText = null, window.copied = '']")
    page.run("document.addEventListener('copy', () => (window.copied = getSelection().toString()))")
    page.click(".code button")
    page.wait_for("window.copied === arguments[0]", code)


def test_headings_of_an_answer_stand_below_its_own_and_leave_no_level_out(page: Page, site: FakeSite) -> None:
    site.pieces = ["### a\n\n# b\n\n", "#### c\n\n> ## d\n\n###### e\n"]
    ask(page, "Hi!")
    levels = (
        "[...document.querySelectorAll('h1, h2, .log :is(h3, h4, h5, h6)')].map((each) => each.localName).slice(0, -2)"
    )
    assert page.run(levels) == ["h1", "h2", "h3", "h3", "h4", "h4", "h5", "h5", "h6"]
    assert page.text(LAST_SAID) == "a\nb\nc\nd\ne"
