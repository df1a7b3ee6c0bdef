// Blocks of code: coloured where their language is known, with a button that copies them.

import highlighter from "./vendor/highlight.js";
import { copy } from "./clipboard.js";
import { make } from "./dom.js";

const MAX_COLOURED = 50000; // characters: more would take too long
const DEEPEST = 50; // elements within each other: browsers fail at some thousands
const COPIED_MS = 2000;

// The elements of a block; `info` is what stands behind its fence.
export function codeBlock(text, info) {
  const language = info.trim().split(/[\s,{]/, 1)[0].slice(0, 30);
  const bar = make("div", "code-bar", make("span", "", language || "text"), copyButton());
  const pre = make("pre", "", coloured(text.replace(/\n$/, ""), language));
  pre.tabIndex = 0; // the arrow keys scroll it
  pre.role = "group";
  pre.ariaLabel = "Code";
  return make("div", "code", bar, pre);
}

// The parser's own tree is turned into elements; the markup that it could write as well is not used.
function coloured(text, language) {
  const plain = make("code", "", text);
  if (text.length > MAX_COLOURED || highlighter.getLanguage(language) === undefined) return plain;
  const tree = highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.root;
  const code = make("code", "", ...tree.children.map((part) => nodeOf(part, 1)));
  return code.textContent === text ? code : plain; // after an error of the parser there is only a part
}

function nodeOf(part, depth) {
  if (typeof part === "string") return part;
  if (depth === DEEPEST) return textOf(part);
  const name = part.scope.startsWith("language:") ? "" : `hljs-${part.scope.split(".", 1)[0]}`;
  return make("span", name, ...part.children.map((each) => nodeOf(each, depth + 1)));
}

function textOf(part) {
  const texts = [];
  const rest = [part]; // what is next stands last
  while (rest.length > 0) {
    const next = rest.pop();
    if (typeof next === "string") texts.push(next);
    else rest.push(...next.children.toReversed());
  }
  return texts.join("");
}

function copyButton() {
  const element = make("button", "quiet copy", "Copy");
  element.type = "button";
  return element;
}

// One listener for all blocks of a log: those of an answer that streams come and go.
export function copyOnClick(log) {
  log.addEventListener("click", async (event) => {
    if (!event.target.matches(".code .copy")) return;
    const isCopied = await copy(event.target.closest(".code").querySelector("code").textContent);
    tellCopied(event.target, isCopied);
  });
}

// Says on a button for a moment that it has done what it is for.
export function tellCopied(element, isCopied) {
  const label = element.dataset.label ?? element.textContent;
  element.dataset.label = label;
  element.textContent = isCopied ? "Copied" : "Not copied";
  setTimeout(() => (element.textContent = label), COPIED_MS);
}
