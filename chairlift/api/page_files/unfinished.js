// Markdown of which the rest is still to come: how to show it so that what is shown does not change its form later.
// What can still become several things is held back, for a few characters; what has begun is ended.

const CONTAINERS = /(?:[\s>]|(?:[-+*]|\d{1,3}[.)])[ \t])*/.source; // of the lists and quotes that a line is in
const ONLY_MARKS = new RegExp(`^${CONTAINERS}(?:[-=*+#_]+|\\d{1,3}[.)]?)?[ \\t]*$`); // a line that may begin anything
const FENCE = new RegExp(`^${CONTAINERS}(?:\`{1,2}$|\`{3,}[^\`]*$|~{1,2}$|~{3,}.*$)`); // one, or a part of one
const DELIMITER_ROW = /^[\s|:-]*$/; // the second line of a table
const PART = /(?:<[^\s<>]{0,60}|&#?\w{0,10}|\\|!)$/; // of a tag, an entity, an escape or an image
const MARKS = /\\[^]|(`+)|(\*+|_+|~+)|(\]\()|(\[)/g;
const LONGEST_MARKS = 100; // of a line that is held back
const LONGEST_LABEL = 100; // of a link: what is longer is a bracket in a text
const MOST_OPEN = 10; // marks of emphasis within each other: nobody writes more
const WORD = /[\p{L}\p{N}]/u;

// The text without its last lines, as long as these are undecided.
export function withoutUndecided(text) {
  const lines = text.split("\n");
  const last = lines.at(-1);
  if (last.length < LONGEST_MARKS && (ONLY_MARKS.test(last) || FENCE.test(last))) lines.pop();
  let numRows = 0; // lines at the end that may be rows of a table
  while (numRows < lines.length && lines.at(-1 - numRows).trimStart().startsWith("|")) numRows += 1;
  if (numRows === 1 || (numRows === 2 && DELIMITER_ROW.test(lines.at(-1)))) lines.length -= numRows;
  return lines.join("\n");
}

// The text of a paragraph, where code, emphasis and the address of a link are ended if they have begun.
export function completed(source) {
  const text = source.replace(PART, "");
  const open = []; // marks of emphasis, the innermost last
  MARKS.lastIndex = 0;
  for (let found = MARKS.exec(text); found !== null; found = MARKS.exec(text)) {
    const [all, ticks, mark, address, bracket] = found;
    const start = found.index;
    const end = start + all.length;
    if (ticks !== undefined) {
      const close = endOfCode(text, end, ticks.length);
      if (close === null) return codeCompleted(text, start, ticks, open);
      MARKS.lastIndex = close;
    } else if (mark !== undefined) {
      if (end === text.length) return closed(text.slice(0, start), open); // it may become longer
      takeMark(open, mark, text[start - 1] ?? " ", text[end]);
    } else if (address !== undefined) {
      const close = text.indexOf(")", end);
      if (close === -1) return closed(`${text.trimEnd()})`, open);
      MARKS.lastIndex = close;
    } else if (bracket !== undefined && mayBeLabel(text, end)) {
      return closed(text.slice(0, start).replace(/!$/, ""), open);
    }
  }
  return closed(text, open);
}

// Where the code ends that begins here; null if it does not.
function endOfCode(text, from, numTicks) {
  const runs = /`+/g;
  runs.lastIndex = from;
  for (let run = runs.exec(text); run !== null; run = runs.exec(text)) {
    if (run[0].length === numTicks) return runs.lastIndex;
  }
  return null;
}

// Ticks at the end of code may be the first of those that end it.
function codeCompleted(text, start, ticks, open) {
  const code = text.slice(start + ticks.length).replace(/`+$/, "").trimEnd();
  if (code === "") return closed(text.slice(0, start), open);
  const space = code.startsWith(" ") ? " " : ""; // on both sides, it is no part of the code
  return closed(`${text.slice(0, start)}${ticks}${code}${space}${ticks}`, open);
}

// True of a bracket that has not ended, or of which what follows is not known.
function mayBeLabel(text, from) {
  if (text.length - from > LONGEST_LABEL) return false;
  const close = text.indexOf("]", from);
  return close === -1 || close === text.length - 1;
}

// A mark ends emphasis, begins it, or is a character like others, which depends on what is beside it. Within a word it
// begins none: there it is more often a product or a name.
function takeMark(open, mark, before, after) {
  let rest = mark;
  if (!/\s/.test(before) && !(mark[0] === "_" && WORD.test(after))) {
    while (open.length > 0 && rest.startsWith(open.at(-1))) rest = rest.slice(open.pop().length);
  }
  if (/\s/.test(after) || WORD.test(before) || open.length >= MOST_OPEN) return;
  const [one, two] = [rest[0], rest.slice(0, 2)];
  if (rest === "~~") open.push(rest);
  else if (one !== "~" && rest.length === 3) open.push(two, one);
  else if (one !== "~" && rest.length > 0 && rest.length < 3) open.push(rest);
}

function closed(text, open) {
  let end = text.trimEnd();
  while (open.length > 0 && end.endsWith(open.at(-1))) end = end.slice(0, -open.pop().length).trimEnd(); // nothing is in it yet
  return end + open.reverse().join("");
}
