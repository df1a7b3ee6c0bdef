// Small charts as SVG paths, one for each kind of mark; style.css gives them their colours.

import { axis, count, niceAtLeast, rate } from "./numbers.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100; // in units of the drawing, which is stretched over the figure
const GAP = 0.25; // between bars, of a bar's width

// Bars of the last steps: decoded rows upwards from the middle line, prefilled tokens downwards, each to its own scale.
export class StepStrip {
  constructor(figure, numSteps) {
    this.numSteps = numSteps;
    this.canvas = new Canvas(figure, numSteps, ["prefilled", "generated", "axis"]);
    this.middle = HEIGHT * 0.55;
  }

  render(steps, numSlots) {
    const mostPrefill = niceAtLeast(Math.max(...steps.map((step) => step.prefill), 1));
    const shift = this.numSteps - steps.length;
    const bars = (height) => steps.map((step, index) => bar(shift + index, this.middle, height(step))).join("");
    this.canvas.draw("generated", bars((step) => (-step.decode / numSlots) * (this.middle - 2)));
    this.canvas.draw("prefilled", bars((step) => (step.prefill / mostPrefill) * (HEIGHT - this.middle - 2)));
    this.canvas.draw("axis", `M0 ${this.middle}H${this.numSteps}`);
    this.canvas.label({ top: axis(numSlots), bottom: axis(mostPrefill) });
    const latest = steps.at(-1);
    this.canvas.tell(
      latest === undefined
        ? "No step yet"
        : `The newest step decoded ${count(latest.decode)} rows and prefilled ${count(latest.prefill)} tokens`,
    );
  }
}

// One value for each second, as an area; null is a gap.
export class AreaChart {
  constructor(figure, numSeconds, unit) {
    this.numSeconds = numSeconds;
    this.unit = unit;
    this.canvas = new Canvas(figure, numSeconds - 1, ["grid", "area", "line"]);
  }

  render(values) {
    const known = values.filter((value) => value !== null);
    const top = niceAtLeast(Math.max(...known, 1));
    const points = values.map((value, index) => (value === null ? null : [index, HEIGHT - (value / top) * (HEIGHT - 4)]));
    const runs = runsOf(points);
    this.canvas.draw("area", runs.map((run) => `M${run[0][0]} ${HEIGHT}L${run.join("L")}L${run.at(-1)[0]} ${HEIGHT}Z`).join(""));
    this.canvas.draw("line", runs.map((run) => `M${run.join("L")}${run.length === 1 ? "h.01" : ""}`).join(""));
    this.canvas.draw("grid", `M0 4H${this.numSeconds}M0 ${(HEIGHT + 4) / 2}H${this.numSeconds}`);
    this.canvas.label({ top: axis(top), bottom: "0", start: `${this.numSeconds} s ago`, end: "now" });
    this.canvas.tell(known.length === 0 ? "Nothing in the last minute" : `Lately ${rate(known.at(-1))} ${this.unit}`);
  }
}

// An SVG of named paths, with words at its corners.
class Canvas {
  constructor(figure, width, names) {
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.paths = Object.fromEntries(names.map((name) => [name, this.#path(name)]));
    this.words = {};
    this.figure = figure;
    figure.replaceChildren(this.svg);
  }

  draw(name, d) {
    this.paths[name].setAttribute("d", d);
  }

  // By place: "top" and "bottom" of the left edge, "start" and "end" below.
  label(texts) {
    for (const [place, text] of Object.entries(texts)) {
      const word = (this.words[place] ??= this.#word(place));
      if (word.textContent !== text) word.textContent = text;
    }
  }

  tell(text) {
    this.svg.setAttribute("aria-label", text);
  }

  #word(place) {
    const word = document.createElement("span");
    word.className = `word ${place}`;
    word.setAttribute("aria-hidden", "true");
    this.figure.append(word);
    return word;
  }

  #path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    this.svg.append(path);
    return path;
  }
}

function bar(index, base, height) {
  return height === 0 ? "" : `M${index + GAP / 2} ${base}v${height.toFixed(2)}h${1 - GAP}v${(-height).toFixed(2)}z`;
}

// The longest pieces without a gap.
function runsOf(points) {
  const runs = [];
  let previous = null;
  for (const point of points) {
    if (point !== null && previous === null) runs.push([point]);
    else if (point !== null) runs.at(-1).push(point);
    previous = point;
  }
  return runs;
}
