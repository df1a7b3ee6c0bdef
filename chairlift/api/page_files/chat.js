// The left half: a conversation with the served model.

import { Answer } from "./answer.js";
import { copy } from "./clipboard.js";
import { copyOnClick, tellCopied } from "./code.js";
import { completionOf } from "./completion.js";
import { findConversation, keepConversation, removeConversation, titleOf } from "./conversations.js";
import { at, say } from "./dom.js";
import { Entry, isSendKey, keepingEndInSight } from "./entry.js";
import { readFields, readSettings, writeFields } from "./settings.js";
import { session } from "./storage.js";

const OPEN = "chairlift-open-chat"; // in this tab, so that a reload comes back to it
const TOO_LONG = "This chat is too long for this browser to keep.";
const GONE = "The server is gone.";

export class Chat {
  // `own`: a set that is given the ids of requests as the batch shows them. `slotLen` says how many tokens a request can
  // have. `onKept` is called when what is kept changes.
  constructor(own, slotLen, onKept) {
    this.own = own;
    this.slotLen = slotLen;
    this.onKept = onKept;
    this.entries = []; // of all turns
    this.answering = null; // while an answer streams: what stops it
    this.answered = Promise.resolve();
    this.#begin(session.getItem(OPEN));
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(at("message").value.trim());
    });
    at("message").addEventListener("keydown", (event) => {
      if (!isSendKey(event)) return;
      event.preventDefault();
      at("composer").requestSubmit();
    });
    at("stop").addEventListener("click", () => this.answering?.abort());
    at("new-chat").addEventListener("click", () => this.open(null));
    at("openers").addEventListener("click", (event) => {
      if (event.target.matches("button")) this.#send(event.target.textContent);
    });
    document.addEventListener("keydown", (event) => {
      const isOther = document.querySelector("dialog[open], :popover-open") !== null; // it is what Escape closes
      if (event.key === "Escape" && !isOther) this.answering?.abort();
    });
    window.addEventListener("pagehide", () => this.answering !== null && this.#keep());
    copyOnClick(at("log"));
  }

  // Shows a conversation that is kept, or with null a new one. An answer that streams is stopped.
  async open(id) {
    this.answering?.abort();
    await this.answered;
    this.#begin(id);
    at("message").focus();
  }

  // Deletes this conversation, and shows a new one.
  async remove() {
    this.answering?.abort();
    await this.answered;
    removeConversation(this.id);
    this.#begin(null);
  }

  #begin(id) {
    const kept = id === null ? null : findConversation(id);
    this.id = kept?.id ?? newId();
    this.#remove(this.entries);
    if (kept === null) {
      session.removeItem(OPEN);
    } else {
      session.setItem(OPEN, this.id);
      writeFields(kept.settings);
      for (const turn of kept.turns) this.#add(turn);
    }
    this.#showState();
    this.onKept();
  }

  get #turns() {
    return this.entries.map((entry) => entry.turn).filter((turn) => turn.content || turn.thoughts || turn.calls);
  }

  #send(text) {
    if (text === "" || !this.#mayAnswer()) return;
    at("message").value = "";
    this.#add({ role: "user", content: text });
    this.#answer();
  }

  // The turns of an entry and of those below it are taken back, and another message takes their place.
  #sendInstead(entry, text) {
    if (!this.#mayAnswer()) return;
    this.#remove(this.entries.slice(this.entries.indexOf(entry)));
    this.#send(text);
  }

  #sendResults(take) {
    if (!this.#mayAnswer()) return;
    take();
    this.#answer();
  }

  #answerAgain() {
    if (!this.#mayAnswer()) return;
    if (this.entries.at(-1).turn.role === "assistant") this.#remove(this.entries.slice(-1));
    this.#answer();
  }

  // False while an answer streams, and where a setting has a mistake, which is then shown.
  #mayAnswer() {
    return this.answering === null && at("composer").reportValidity();
  }

  #answer(continues = false) {
    if (!this.#mayAnswer()) return;
    this.answered = this.#streamAnswer(continues);
  }

  async #streamAnswer(continues) {
    this.answering = new AbortController();
    this.#showState();
    at("stop").focus({ preventScroll: true });
    this.#keep();
    const turns = this.#turns;
    const entry = continues ? this.entries.at(-1) : this.#add({ role: "assistant", content: "" });
    const answer = new Answer(entry);
    this.own.clear();
    try {
      for await (const chunk of completionOf(turns, readSettings(this.slotLen()), continues, this.answering.signal)) {
        this.own.add(shortId(`${chunk.id}-0`));
        keepingEndInSight(() => answer.take(chunk));
      }
      answer.ended();
    } catch (error) {
      if (error.name === "AbortError") answer.stopped();
      else answer.failed(error instanceof TypeError ? GONE : error.message); // what came stays above it
    }
    if (entry.turn.calls) entry.showCalls((take) => this.#sendResults(take));
    this.answering = null;
    this.#showState();
    at("message").focus({ preventScroll: true });
    this.#keep();
    at("announcer").textContent = answer.spoken();
  }

  #add(turn) {
    const entry = new Entry(turn);
    this.entries.push(entry);
    at("welcome").hidden = true;
    keepingEndInSight(() => at("log").append(entry.element), true);
    if (turn.role === "assistant") entry.showAnswer((take) => this.#sendResults(take));
    return entry;
  }

  #remove(entries) {
    for (const entry of entries) entry.element.remove();
    this.entries = this.entries.filter((entry) => !entries.includes(entry));
    at("welcome").hidden = this.entries.length > 0;
  }

  #keep() {
    const turns = this.#turns;
    if (turns.length === 0) return;
    const kept = findConversation(this.id);
    const title = kept?.isNamed ? kept.title : titleOf(turns);
    const conversation = { id: this.id, title, isNamed: kept?.isNamed ?? false, changed: Date.now(), turns, settings: readFields() };
    say("not-kept", keepConversation(conversation) ? "" : TOO_LONG);
    session.setItem(OPEN, this.id);
    this.onKept();
  }

  #showState() {
    const isAnswering = this.answering !== null;
    at("send").hidden = isAnswering;
    at("stop").hidden = !isAnswering;
    at("new-chat").disabled = this.entries.length === 0;
    keepingEndInSight(() => {
      for (const entry of this.entries) {
        entry.stopEditing();
        entry.offer(isAnswering ? [] : this.#actionsOf(entry));
      }
    });
  }

  #actionsOf(entry) {
    const { role, content, calls, finish } = entry.turn;
    const isLast = entry === this.entries.at(-1);
    const again = () => this.#answerAgain();
    if (role === "user") {
      const edit = ["Edit", () => entry.edit((text) => this.#sendInstead(entry, text))];
      return isLast ? [edit, ["Answer", again]] : [edit];
    }
    const actions = [];
    if (content !== "") actions.push(["Copy", async (button) => tellCopied(button, await copy(content))]);
    if (isLast && finish === "length" && content !== "" && !calls) actions.push(["Continue", () => this.#answer(true)]);
    if (isLast) actions.push([content === "" && !calls ? "Try again" : "Regenerate", again]);
    return actions;
  }
}

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

// `short_id` of chairlift/engine/journal.py: the CRC-32 of a text in ASCII, as eight hexadecimal digits.
function shortId(text) {
  let crc = -1;
  for (let index = 0; index < text.length; index += 1) {
    crc ^= text.charCodeAt(index);
    for (let bit = 0; bit < 8; bit += 1) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return (~crc >>> 0).toString(16).padStart(8, "0");
}
