// Markdown as elements. A parser says what a text consists of, and the elements are made one by one from a short list of
// kinds: no markup is ever parsed, so whatever a model writes cannot run, load or send anything.

import { codeBlock } from "./code.js";
import { make } from "./dom.js";
import { completed } from "./unfinished.js";
import MarkdownIt from "./vendor/markdown-it.js";

const BLOCKS = {
  blockquote: "blockquote",
  bullet_list: "ul",
  list_item: "li",
  ordered_list: "ol",
  paragraph: "p",
  tbody: "tbody",
  td: "td",
  th: "th",
  thead: "thead",
  tr: "tr",
};
const INLINE = { em: "em", strong: "strong", s: "s" };
const ADDRESS = /^(?:https?:\/\/|mailto:)/i;
const LINE_BREAK = /^<br\s*\/?>$/i;
const OUTER_LEVEL = 3; // of the heading above an answer
const LOWEST_LEVEL = 6;
const DEEPEST = 50; // elements within each other: browsers fail at some thousands

// Markup is text, but for line breaks, which models write into the cells of tables.
const parser = new MarkdownIt({ html: true, linkify: true, breaks: true }).disable("html_block");
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false }); // main.py is no address

// The blocks of a text in order: {line, element, levels}, with the line that each begins in and the levels of the
// headings that it stands under. `known` takes the addresses that the text names, for the texts behind it. The end of an
// unfinished text is shown as it will probably be.
export function blocksOf(text, { known = {}, levels = [], isFinished = true } = {}) {
  const tokens = parser.parse(text, known);
  if (!isFinished) completeLast(tokens, known);
  const builder = new Builder([...levels]);
  const blocks = [];
  for (const group of groupsOf(tokens)) {
    const before = [...builder.levels];
    blocks.push({ line: group[0].map[0], levels: before, element: builder.build(group) });
  }
  return blocks;
}

// Ends what has begun in the last text, if nothing stands behind it but empty cells of its row.
function completeLast(tokens, known) {
  const last = tokens.findLast((token) => token.nesting === 0 && (token.type !== "inline" || token.content !== ""));
  if (last?.type !== "inline") return;
  const content = completed(last.content);
  if (content !== last.content) last.children = parser.parseInline(content, known)[0].children;
}

// The tokens of each outermost block.
function groupsOf(tokens) {
  const groups = [];
  let depth = 0;
  for (const token of tokens) {
    if (depth === 0) groups.push([]);
    groups.at(-1).push(token);
    depth += token.nesting;
  }
  return groups;
}

class Builder {
  constructor(levels) {
    this.levels = levels; // of the headings that what comes next stands under, as the text has them
  }

  build(tokens) {
    const root = document.createDocumentFragment();
    this.open = [root];
    for (const token of tokens) this.#take(token);
    return root.firstElementChild;
  }

  #take(token) {
    if (token.nesting === 1) this.open.push(this.#begin(token));
    else if (token.nesting === -1) this.open.pop();
    else if (token.type === "inline") token.children.forEach((child) => this.#take(child));
    else this.#add(this.#leaf(token));
  }

  #add(node) {
    this.open.at(-1).append(node);
    return node;
  }

  // The element that takes what comes until the token's counterpart.
  #begin(token) {
    const isHidden = token.hidden; // a paragraph of a list without blank lines
    if (isHidden || this.open.length > DEEPEST) return this.open.at(-1);
    const kind = token.type.replace(/_open$/, "");
    if (kind === "heading") return this.#add(this.#heading(Number(token.tag[1])));
    if (kind === "table") return this.#add(tableBox()).firstChild;
    if (kind === "link") return this.#add(linkTo(token.attrGet("href")));
    const element = make(BLOCKS[kind] ?? INLINE[kind] ?? "span");
    if (kind === "ordered_list" && token.attrGet("start") !== null) element.start = token.attrGet("start");
    const align = /^text-align:(center|right)$/.exec(token.attrGet("style") ?? "");
    if (align !== null) element.className = align[1];
    return this.#add(element);
  }

  // Each heading is one level below those that it stands under, so that none is left out.
  #heading(level) {
    while (this.levels.length > 0 && this.levels.at(-1) >= level) this.levels.pop();
    this.levels.push(level);
    const depth = Math.min(OUTER_LEVEL + this.levels.length, LOWEST_LEVEL);
    return make(`h${depth}`, `level-${Math.min(level, 4)}`);
  }

  #leaf(token) {
    switch (token.type) {
      case "fence":
        return codeBlock(token.content, token.info);
      case "code_block":
        return codeBlock(token.content, "");
      case "code_inline":
        return make("code", "", token.content);
      case "hr":
        return make("hr");
      case "softbreak":
      case "hardbreak":
        return make("br");
      case "image": {
        const link = linkTo(token.attrGet("src"));
        link.append(token.content || "image");
        return link;
      }
      case "html_inline":
        return LINE_BREAK.test(token.content) ? make("br") : document.createTextNode(token.content);
      default:
        return document.createTextNode(token.content);
    }
  }
}

// Wide tables scroll in a box of their own.
function tableBox() {
  const box = make("div", "table", make("table"));
  box.tabIndex = 0;
  box.role = "group";
  box.ariaLabel = "Table";
  return box;
}

// Only addresses of other sites and of people are links: an answer has no business with this server.
function linkTo(address) {
  if (!ADDRESS.test(address)) return make("span");
  const link = make("a");
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  return link;
}
