// An answer as it comes: what chunks add to a turn and to its entry, and the figures below it.

import { count, duration, plural, rate } from "./numbers.js";
import { addPieces } from "./tool_calls.js";

const ENDS = { length: "ended at the limit of tokens", abort: "ended by the server" };

export class Answer {
  // The turn may have a beginning, which the answer goes on with.
  constructor(entry) {
    this.entry = entry;
    this.turn = entry.turn;
    this.turn.finish = null;
    this.entry.element.setAttribute("aria-busy", "true");
    this.usage = null;
    this.numPieces = 0;
    this.start = performance.now();
    this.first = this.last = null;
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    this.turn.finish = choice?.finish_reason ?? this.turn.finish;
    const { reasoning_content: thought, content: piece, tool_calls: calls } = choice?.delta ?? {};
    if (!thought && !piece && !calls?.length) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.numPieces += 1;
    if (thought) this.#think(thought);
    else this.#stopThinking();
    if (piece) {
      this.turn.content += piece;
      this.entry.write(piece);
    }
    if (calls?.length) {
      addPieces((this.turn.calls ??= []), calls);
      this.entry.showCalls();
    }
    // A piece may hold several tokens, so until the usage comes this is only about right.
    if (this.numPieces > 1) this.#note(`about ${rate(this.#rateOf(this.numPieces))} tokens/s`);
  }

  ended() {
    this.#close([this.#spent(), ENDS[this.turn.finish]]);
  }

  stopped() {
    this.#close([this.numPieces > 1 ? `about ${rate(this.#rateOf(this.numPieces))} tokens/s` : undefined, "stopped by you"]);
  }

  failed(message) {
    this.entry.element.classList.add("failed");
    this.entry.note(message, "error");
    this.#finish();
    this.error = message;
  }

  // What a screen reader is to say at the end.
  spoken() {
    if (this.error !== undefined) return `Error: ${this.error}`;
    const called = (this.turn.calls ?? []).map((call) => `Calls ${call.name}.`);
    return [this.entry.body.textContent, ...called].join(" ").trim();
  }

  #think(thought) {
    this.turn.thoughts = (this.turn.thoughts ?? "") + thought;
    this.entry.think(thought);
  }

  #stopThinking() {
    if (!this.turn.thoughts || this.turn.thoughtSeconds !== undefined) return;
    this.turn.thoughtSeconds = (this.last - this.first) / 1000;
    this.entry.stopThinking(this.turn.thoughtSeconds);
  }

  #spent() {
    if (this.usage === null) return undefined;
    const { completion_tokens: numOut, prompt_tokens: numIn, prompt_tokens_details: details } = this.usage;
    const cached = details?.cached_tokens ? `${count(details.cached_tokens)} of ${plural(numIn, "prompt token")} reused` : undefined;
    const first = this.first === null ? undefined : `first after ${duration((this.first - this.start) / 1000)}`;
    const speed = numOut > 1 ? `${rate(this.#rateOf(numOut))} tokens/s` : undefined;
    return joined([plural(numOut, "token"), speed, first, cached]);
  }

  #rateOf(numTokens) {
    return (1000 * (numTokens - 1)) / Math.max(this.last - this.first, 1);
  }

  #close(parts) {
    this.#finish();
    this.#note(joined(parts));
  }

  #finish() {
    this.entry.element.removeAttribute("aria-busy");
    this.entry.finish();
  }

  #note(text) {
    this.turn.spent = text;
    this.entry.note(text, "spent");
  }
}

const joined = (parts) => parts.filter((part) => part !== undefined).join(" · ");
