// Every slot as a row that fills, all of them to one scale.

import { make } from "./dom.js";
import { count, plural } from "./numbers.js";

const ROOMY = 12; // slots, at most
const COMPACT = 48;
const SHORTEST_SCALE = 64; // tokens
const SCALE_HELD_MS = 4000; // before the scale becomes finer again
const NUM_TICKS = 4;
const PARTS = ["held", "warm", "todo", "generated", "accepted", "prefilled", "reused", "restored"]; // each begins at 0 and covers those before it

export class Slots {
  constructor(list, ticks, detail) {
    this.list = list;
    this.ticks = ticks;
    this.detail = detail;
    this.rows = [];
    this.scale = new Scale();
    this.chosen = null; // the row whose detail is shown
    list.addEventListener("keydown", (event) => this.#move(event));
    list.addEventListener("focusin", (event) => this.#choose(event.target.closest("li")));
    list.addEventListener("pointerover", (event) => this.#choose(event.target.closest("li")));
    list.addEventListener("pointerleave", () => this.#choose(document.activeElement?.closest(".slots li") ?? null));
  }

  // `own`: ids of this page's requests.
  render(snapshot, own) {
    if (this.rows.length !== snapshot.slots.length) this.#lay(snapshot.slots.length);
    const end = this.scale.endFor(snapshot.slots, snapshot.slot_len);
    if (this.end !== end) this.#drawRuler(end);
    this.rows.forEach((row, index) => row.render(snapshot.slots[index], end, own.has(snapshot.slots[index].request_id)));
    this.#describe();
  }

  #lay(numSlots) {
    this.rows = Array.from({ length: numSlots }, (_, index) => new Row(index));
    this.rows[0].element.tabIndex = 0;
    this.list.dataset.density = numSlots <= ROOMY ? "roomy" : numSlots <= COMPACT ? "compact" : "dense";
    this.list.replaceChildren(...this.rows.map((row) => row.element));
    this.chosen = null;
  }

  #drawRuler(end) {
    this.end = end;
    const ticks = Array.from({ length: NUM_TICKS + 1 }, (_, index) => {
      const tick = document.createElement("span");
      tick.textContent = count((end * index) / NUM_TICKS);
      return tick;
    });
    this.ticks.replaceChildren(...ticks);
  }

  #move(event) {
    const present = this.rows.findIndex((row) => row.element === document.activeElement);
    const steps = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (present < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const next = Math.min(Math.max(present + steps[event.key], 0), this.rows.length - 1);
    this.rows[present].element.tabIndex = -1;
    this.rows[next].element.tabIndex = 0;
    this.rows[next].element.focus();
  }

  #choose(element) {
    this.chosen = this.rows.find((row) => row.element === element) ?? null;
    this.#describe();
  }

  #describe() {
    const text = this.chosen?.description() ?? "";
    if (this.detail.textContent !== text) this.detail.textContent = text;
  }
}

// Where all rows end: a power of two, or a slot's length. It grows at once, and shrinks when it was too large for long.
class Scale {
  endFor(slots, slotLen) {
    const longest = Math.max(...slots.map((slot) => Math.max(slot.num_computed, slot.num_prompt_tokens, slot.num_tokens)));
    const wanted = Math.min(2 ** Math.ceil(Math.log2(Math.max(longest * 1.05, SHORTEST_SCALE))), slotLen);
    const now = performance.now();
    if (this.end === undefined || wanted >= this.end) this.since = now;
    if (this.end === undefined || wanted > this.end || now - this.since > SCALE_HELD_MS) this.end = wanted;
    return this.end;
  }
}

class Row {
  constructor(index) {
    this.index = index;
    this.element = document.createElement("li");
    this.element.tabIndex = -1;
    this.element.setAttribute("aria-describedby", "slot-detail");
    this.number = make("span", "number", index);
    this.parts = Object.fromEntries(PARTS.map((name) => [name, make("i", `part ${name}`)]));
    this.told = make("span", "told");
    this.element.append(this.number, make("span", "track", ...Object.values(this.parts)), this.told);
    this.drawn = {};
  }

  render(slot, end, isOwn) {
    this.slot = slot;
    this.isOwn = isOwn;
    this.#set("state", slot.state, (state) => (this.element.dataset.state = state));
    this.#set("own", isOwn, () => this.element.classList.toggle("own", isOwn));
    this.#set("told", told(slot, isOwn), (text) => (this.told.textContent = text));
    const ends = endsOf(slot);
    for (const name of PARTS) {
      // Moved rather than made wider: that needs no layout, ten times a second in hundreds of rows.
      this.#set(name, `${(100 * (ends[name] ?? 0)) / end - 100}%`, (shift) => (this.parts[name].style.translate = shift));
    }
  }

  description() {
    if (this.slot === undefined) return "";
    const { state, num_reused, num_computed, num_prompt_tokens, num_tokens, num_held, num_accepted, num_restored, num_states } =
      this.slot;
    const { request_id } = this.slot;
    const name = `Slot ${this.index}`;
    if (state === "free") return `${name} is free.`;
    const disk = num_restored === 0 ? "" : `; ${count(num_restored)} of its first tokens were filled in from disk`;
    const states = `${num_states === 0 ? "" : `; ${plural(num_states, "recurrent state")} kept along them`}${disk}`;
    if (state === "warm")
      return `${name} is free; its ${plural(num_computed, "token")} are kept for a prompt that begins with them${states}.`;
    const reused = num_reused === 0 ? "" : `, ${count(num_reused)} of them reused`;
    const prompt = `prompt of ${plural(num_prompt_tokens, "token")}${reused}`;
    const guessed = num_accepted === 0 ? "" : `, ${count(num_accepted)} of them guessed rightly`;
    const doing =
      state === "prefilling"
        ? `computing its ${prompt}; ${count(num_computed)} are there`
        : `${prompt}; ${count(num_tokens - num_prompt_tokens)} generated${guessed}`;
    const memory = num_held === 0 ? "" : `; memory for ${plural(num_held, "token")}`;
    return `${name}, request ${request_id}${this.isOwn ? " (yours)" : ""}: ${doing}${memory}${states}.`;
  }

  #set(name, value, draw) {
    if (this.drawn[name] === value) return;
    this.drawn[name] = value;
    draw(value);
  }
}

// Where each part of a slot's row ends, in tokens.
function endsOf(slot) {
  const prefilled = Math.min(slot.num_computed, slot.num_prompt_tokens);
  const restored = Math.min(slot.num_restored, slot.num_computed);
  switch (slot.state) {
    case "free":
      return {};
    case "warm":
      return { held: slot.num_held, warm: slot.num_computed, restored };
    case "prefilling":
      return { held: slot.num_held, todo: slot.num_prompt_tokens, prefilled, reused: slot.num_reused, restored };
    default:
      return {
        held: slot.num_held, generated: slot.num_tokens, accepted: acceptedEnd(slot), prefilled, reused: slot.num_reused, restored,
      };
  }
}

// Those guessed rightly are shown together, before the others, wherever they are in the answer.
function acceptedEnd(slot) {
  return slot.num_accepted === 0 ? 0 : slot.num_prompt_tokens + slot.num_accepted;
}

function told(slot, isOwn) {
  const who = isOwn ? "you: " : "";
  switch (slot.state) {
    case "free":
      return "free";
    case "warm":
      return `${count(slot.num_computed)} warm${slot.num_restored === 0 ? "" : ", disk"}`;
    case "prefilling":
      return `${who}${count(slot.num_computed)} / ${count(slot.num_prompt_tokens)}`;
    default:
      return `${who}${count(slot.num_prompt_tokens)} + ${count(slot.num_tokens - slot.num_prompt_tokens)}`;
  }
}
