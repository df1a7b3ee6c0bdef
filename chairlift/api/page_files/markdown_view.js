// A text in Markdown that grows, and the elements that show it.

import { blocksOf } from "./markdown.js";
import { patch } from "./patch.js";
import { withoutUndecided } from "./unfinished.js";

const REST = 4; // times as long as drawing took, nothing is drawn

export class MarkdownView {
  // `around` is called with each change of the elements, to do what belongs before and after it.
  constructor(element, around = (change) => change()) {
    this.element = element;
    this.around = around;
    this.text = "";
    this.isWaiting = false;
    this.cost = 0; // ms of the last drawing
    this.#forget();
  }

  // Adds to the text. It is drawn soon, however many pieces come.
  write(piece) {
    this.text += piece.replace(/\r\n?/g, "\n"); // as the parser counts lines
    if (this.isWaiting) return;
    this.isWaiting = true;
    setTimeout(() => requestAnimationFrame(() => this.isWaiting && this.draw()), REST * this.cost);
  }

  // Draws what has come. Blocks before the last one are settled: they are neither parsed nor touched again.
  draw() {
    this.isWaiting = false;
    const start = performance.now();
    const rest = withoutUndecided(this.text.slice(this.settled.end));
    const { known, levels } = this.settled;
    const blocks = blocksOf(rest, { known, levels, isFinished: false });
    this.around(() => patch(this.element, fragmentOf(blocks), this.settled.numBlocks));
    this.#settle(rest, blocks);
    this.cost = performance.now() - start;
  }

  // Draws the whole text as it is: nothing more comes for now.
  finish() {
    this.isWaiting = false;
    this.around(() => patch(this.element, fragmentOf(blocksOf(this.text))));
    this.#forget();
  }

  #forget() {
    this.settled = { end: 0, numBlocks: 0, levels: [], known: {} };
  }

  // A line that is not whole may still belong to the block before it.
  #settle(rest, blocks) {
    if (blocks.length < 2) return;
    const last = blocks.at(-1);
    const begin = startOfLine(rest, last.line);
    if (rest.indexOf("\n", begin) === -1) return;
    this.settled.end += begin;
    this.settled.numBlocks += blocks.length - 1;
    this.settled.levels = last.levels;
  }
}

function fragmentOf(blocks) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks.map((block) => block.element));
  return fragment;
}

function startOfLine(text, number) {
  let start = 0;
  for (let line = 0; line < number; line += 1) start = text.indexOf("\n", start) + 1;
  return start;
}
