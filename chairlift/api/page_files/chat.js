// The left half: a conversation with the served model.

import { eventsOf, request } from "./api.js";
import { copyOnClick } from "./code.js";
import { MarkdownView } from "./markdown_view.js";
import { count, duration, plural, rate } from "./numbers.js";
import { readSettings } from "./settings.js";

const END = "[DONE]";
const NEAR_PX = 80; // who is that near to the end of the log wants to stay there

const at = (id) => document.getElementById(id);

export class Chat {
  // `own`: a set that is given the ids of requests as the batch shows them.
  constructor(own) {
    this.own = own;
    this.messages = [];
    this.answering = null; // while an answer streams: what stops it
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    at("message").addEventListener("keydown", (event) => this.#sendOnEnter(event));
    at("stop").addEventListener("click", () => this.answering?.abort());
    at("new-chat").addEventListener("click", () => this.#startAnew());
    at("openers").addEventListener("click", (event) => {
      if (event.target.matches("button")) this.#send(event.target.textContent);
    });
    copyOnClick(at("log"));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.answering?.abort();
    });
  }

  #sendOnEnter(event) {
    const wantsLine = event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches;
    if (event.key !== "Enter" || wantsLine) return;
    event.preventDefault();
    at("composer").requestSubmit();
  }

  #send(text = at("message").value.trim()) {
    if (text === "" || this.answering !== null) return;
    at("message").value = "";
    at("welcome").hidden = true;
    this.messages.push({ role: "user", content: text });
    new Entry("user").write(text);
    this.#answer();
  }

  async #answer() {
    this.answering = new AbortController();
    this.#showAnswering(true);
    const answer = new Answer();
    try {
      await this.#stream(answer, this.answering.signal);
    } catch (error) {
      if (error.name === "AbortError") answer.stopped();
      else answer.failed(error.status === undefined ? "The server is gone. What came until then stands above." : error.message);
    }
    // What failed before its first word is taken back, so that it can be sent once more.
    if (answer.text !== "") this.messages.push({ role: "assistant", content: answer.text });
    else at("message").value ||= this.messages.pop().content;
    this.answering = null;
    this.#showAnswering(false);
    at("announcer").textContent = answer.spoken();
  }

  async #stream(answer, signal) {
    this.own.clear();
    const { system, sampling } = readSettings();
    const body = {
      ...sampling,
      messages: system === "" ? this.messages : [{ role: "system", content: system }, ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await request("v1/chat/completions", { body, signal });
    for await (const data of eventsOf(response)) {
      if (data === END) break;
      const chunk = JSON.parse(data);
      if (chunk.error !== undefined) throw Object.assign(new Error(chunk.error.message), { status: response.status });
      this.own.add(shortId(`${chunk.id}-0`));
      keepingEndInSight(() => answer.take(chunk));
    }
    answer.ended();
  }

  #showAnswering(isAnswering) {
    at("send").hidden = isAnswering;
    at("stop").hidden = !isAnswering;
    at("new-chat").disabled = isAnswering || this.messages.length === 0;
    at(isAnswering ? "stop" : "message").focus({ preventScroll: true });
  }

  #startAnew() {
    this.messages = [];
    for (const entry of at("log").querySelectorAll("article")) entry.remove();
    at("welcome").hidden = false;
    at("new-chat").disabled = true;
    at("message").focus();
  }
}

// One turn in the log. What the person wrote is shown as it is, what the model wrote as Markdown.
class Entry {
  constructor(role) {
    this.element = document.createElement("article");
    this.element.className = role;
    const name = document.createElement("h3");
    name.textContent = role === "user" ? "You" : "Model";
    this.body = document.createElement("div");
    this.body.className = "text";
    this.element.append(name, this.body);
    this.view = role === "user" ? null : new MarkdownView(this.body, keepingEndInSight);
    keepingEndInSight(() => at("log").append(this.element), true);
  }

  write(text) {
    if (this.view === null) this.body.append(text);
    else this.view.write(text);
  }

  // What a model thinks stands above its answer, and is folded when that begins.
  think(text) {
    if (this.thoughts === undefined) {
      this.thoughts = document.createElement("details");
      this.thoughts.className = "thoughts";
      this.thoughts.open = true;
      const summary = document.createElement("summary");
      summary.textContent = "Thinking";
      const thinking = document.createElement("div");
      thinking.className = "text";
      this.thoughtsView = new MarkdownView(thinking, keepingEndInSight);
      this.thoughts.append(summary, thinking);
      this.body.before(this.thoughts);
    }
    this.thoughtsView.write(text);
  }

  // The last pieces are drawn, and nothing more comes.
  finish() {
    this.view.finish();
    this.thoughtsView?.finish();
  }

  stopThinking(seconds) {
    if (this.thoughts === undefined) return;
    this.thoughts.open = false;
    this.thoughts.firstChild.textContent = `Thought for ${duration(seconds)}`;
  }

  note(text, className) {
    const note = this.element.querySelector(`.${className}`) ?? this.element.appendChild(document.createElement("p"));
    note.className = className;
    note.textContent = text;
  }
}

// An answer as it comes, and the figures below it.
class Answer {
  constructor() {
    this.entry = new Entry("assistant");
    this.entry.element.setAttribute("aria-busy", "true");
    this.text = "";
    this.usage = null;
    this.finish = null;
    this.numPieces = 0;
    this.start = performance.now();
    this.first = this.last = null;
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    this.finish = choice?.finish_reason ?? this.finish;
    const { reasoning_content: thought, content: piece } = choice?.delta ?? {};
    if (!thought && !piece) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.numPieces += 1;
    if (thought) this.entry.think(thought);
    if (piece) {
      if (this.text === "") this.entry.stopThinking((this.last - this.first) / 1000);
      this.text += piece;
      this.entry.write(piece);
    }
    // A piece may hold several tokens, so until the usage comes this is only about right.
    if (this.numPieces > 1) this.#figures(`about ${rate(this.#rateOf(this.numPieces))} tokens/s`);
  }

  ended() {
    const why = { length: "ended at the most tokens", abort: "ended by the server" }[this.finish];
    this.#close([this.#spent(), why]);
  }

  stopped() {
    this.#close([this.numPieces > 1 ? `about ${rate(this.#rateOf(this.numPieces))} tokens/s` : null, "stopped by you"]);
  }

  failed(message) {
    this.entry.element.classList.add("failed");
    this.entry.note(message, "error");
    this.#finish();
    this.error = message;
  }

  // What a screen reader is to say at the end.
  spoken() {
    return this.error === undefined ? this.entry.body.textContent : `Error: ${this.error}`;
  }

  #spent() {
    if (this.usage === null) return null;
    const { completion_tokens: numOut, prompt_tokens: numIn, prompt_tokens_details: details } = this.usage;
    const cached = details?.cached_tokens ? `${count(details.cached_tokens)} of ${plural(numIn, "prompt token")} reused` : null;
    const first = this.first === null ? null : `first after ${duration((this.first - this.start) / 1000)}`;
    const speed = numOut > 1 ? `${rate(this.#rateOf(numOut))} tokens/s` : null;
    return [plural(numOut, "token"), speed, first, cached].filter((part) => part !== null).join(" · ");
  }

  #rateOf(numTokens) {
    return (1000 * (numTokens - 1)) / Math.max(this.last - this.first, 1);
  }

  #finish() {
    this.entry.element.removeAttribute("aria-busy");
    this.entry.finish();
  }

  #close(parts) {
    this.#finish();
    this.#figures(parts.filter((part) => part !== null && part !== undefined).join(" · "));
  }

  #figures(text) {
    this.entry.note(text, "spent");
  }
}

// The log follows its end, unless the person has scrolled away from it.
function keepingEndInSight(change, always = false) {
  const log = at("log");
  const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  change();
  if (always || isNear) log.scrollTop = log.scrollHeight;
}

// `short_id` of chairlift/engine/journal.py: the CRC-32 of a text in ASCII, as eight hexadecimal digits.
function shortId(text) {
  let crc = -1;
  for (let index = 0; index < text.length; index += 1) {
    crc ^= text.charCodeAt(index);
    for (let bit = 0; bit < 8; bit += 1) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return (~crc >>> 0).toString(16).padStart(8, "0");
}
