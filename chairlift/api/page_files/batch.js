// The right half: the batch as the newest snapshot has it.

import { AreaChart, StepStrip } from "./charts.js";
import { at, say } from "./dom.js";
import { History, NUM_SECONDS, NUM_STEPS, median } from "./history.js";
import { count, duration, plural, rate } from "./numbers.js";
import { Slots } from "./slots.js";

const TICK_MS = 500; // time goes on in the charts while nothing comes

export class Batch {
  // `own`: a set with the ids of this page's requests.
  constructor(own) {
    this.own = own;
    this.history = new History();
    this.slots = new Slots(at("slots"), at("ticks"), at("slot-detail"));
    this.strip = new StepStrip(at("steps"), NUM_STEPS);
    this.throughput = new AreaChart(at("throughput"), NUM_SECONDS, "tokens per second");
    this.latency = new AreaChart(at("latency"), NUM_SECONDS, "milliseconds per token");
    this.snapshot = null;
    this.isDirty = false;
    setInterval(() => this.#drawLater(), TICK_MS);
  }

  // How many tokens a request can have; Infinity while nobody knows.
  get slotLen() {
    return this.snapshot?.slot_len ?? Infinity;
  }

  // `isFirst` of a connection: what was between it and the one before, nobody knows.
  take(snapshot, isFirst) {
    if (isFirst) this.history.forget();
    this.history.take(snapshot);
    this.snapshot = snapshot;
    this.#drawLater();
  }

  // However many snapshots come, a picture is drawn once, and only where it can be seen.
  #drawLater() {
    if (this.isDirty || this.snapshot === null) return;
    this.isDirty = true;
    requestAnimationFrame(() => {
      this.isDirty = false;
      this.#draw(this.snapshot);
    });
  }

  #draw(snapshot) {
    const numRunning = snapshot.slots.filter((slot) => slot.state === "prefilling" || slot.state === "decoding").length;
    this.#drawFigures(snapshot, numRunning);
    this.slots.render(snapshot, this.own);
    this.#drawQueue(snapshot);
    this.strip.render(this.history.steps, snapshot.slots.length);
    this.throughput.render(this.history.series((second) => second.generated));
    this.latency.render(this.history.series((second) => median(second.ms)));
    const first = this.history.firstToken();
    say("first-token", first === null ? "" : `first token after ${duration(first)}`);
  }

  #drawFigures(snapshot, numRunning) {
    const { num_prompt_tokens: numPrompt, num_cached_tokens: numCached, num_finished: numFinished } = snapshot.totals;
    say("num-running", count(numRunning));
    say("num-slots", `of ${plural(snapshot.slots.length, "slot")}`);
    say("num-waiting", count(snapshot.num_waiting));
    say("token-rate", rate(this.history.tokenRate()));
    this.#drawMemory(snapshot.cache);
    say("reuse", numPrompt === 0 ? "–" : count((100 * numCached) / numPrompt));
    at("accepted-key").hidden = snapshot.totals.num_drafted_tokens === 0;
    if (snapshot.slots.some((slot) => slot.num_restored > 0)) at("restored-key").hidden = false;
    say("batch-summary", `${plural(numFinished, "request")} done · slots of ${plural(snapshot.slot_len, "token")}`);
    say("batch-brief", `${numRunning}/${snapshot.slots.length}`);
  }

  // What requests hold of the cache's memory, and behind it what warm slots do.
  #drawMemory({ num_tokens: numTokens, num_running: numRunning = 0, num_warm: numWarm = 0 } = {}) {
    if (!numTokens) return;
    const bar = at("memory-bar");
    const draw = (name, end) => (bar.querySelector(`.${name}`).style.translate = `${(100 * end) / numTokens - 100}%`);
    draw("generated", numRunning);
    draw("warm", numRunning + numWarm);
    bar.title = `of ${plural(numTokens, "token")} requests hold ${count(numRunning)}, and ${count(numWarm)} are kept warm`;
    say("memory", count((100 * numRunning) / numTokens));
    say("memory-of", `% of ${plural(numTokens, "token")}`);
  }

  #drawQueue(snapshot) {
    const texts = snapshot.waiting.map((each) => `${count(each.num_prompt_tokens)} · ${duration(each.seconds)}`);
    const list = at("queue");
    while (list.children.length > texts.length) list.lastChild.remove();
    while (list.children.length < texts.length) list.append(document.createElement("li"));
    texts.forEach((text, index) => {
      list.children[index].textContent = text;
      list.children[index].classList.toggle("own", this.own.has(snapshot.waiting[index].request_id));
    });
    const numMore = snapshot.num_waiting - texts.length;
    say("queue-rest", numMore > 0 ? `and ${count(numMore)} more` : "");
    say("queue-words", snapshot.num_waiting === 0 ? "nobody" : "prompt tokens · time since it came");
  }
}
