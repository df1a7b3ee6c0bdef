// What snapshots tell over time: the last steps one by one, and sums for each of the last seconds.

export const NUM_STEPS = 160;
export const NUM_SECONDS = 60;

export class History {
  constructor() {
    this.forget();
  }

  forget() {
    this.steps = []; // oldest first: {prefill, decode, ms}
    this.seconds = new Map(); // whole second of the server's clock -> {generated, firsts, firstSeconds, ms}
    this.since = null; // the server's clock at the first snapshot: nothing is known of before
    this.last = null;
  }

  take(snapshot) {
    this.since ??= snapshot.time;
    const numNew = this.last === null ? snapshot.launches.length : snapshot.num_launches - this.last.num_launches;
    const launches = numNew > 0 ? snapshot.launches.slice(-numNew) : [];
    const second = this.#secondAt(snapshot.time);
    for (const launch of launches) this.#addLaunch(launch, this.last === null ? null : second);
    if (this.last !== null) {
      second.generated += snapshot.totals.num_generated_tokens - this.last.totals.num_generated_tokens;
      second.firsts += snapshot.totals.num_first_tokens - this.last.totals.num_first_tokens;
      second.firstSeconds += snapshot.totals.seconds_to_first_token - this.last.totals.seconds_to_first_token;
    }
    this.last = snapshot;
    this.arrived = performance.now();
  }

  // The server's clock as it is now: nothing is sent while nothing changes.
  now() {
    return this.last === null ? 0 : this.last.time + (performance.now() - this.arrived) / 1000;
  }

  // `value(second)` of each of the last whole seconds, oldest first; null of those that nobody saw. `ms` of a second are
  // those of its decoding steps.
  series(value) {
    const present = Math.floor(this.now());
    const keys = Array.from({ length: NUM_SECONDS }, (_, index) => present - NUM_SECONDS + index);
    return keys.map((key) => (key < this.since ? null : value(this.seconds.get(key) ?? EMPTY)));
  }

  // Mean seconds from a request's coming to its first token, of those that got theirs lately; null if none did.
  firstToken() {
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const num = sum(this.series((second) => second.firsts));
    return num === 0 ? null : sum(this.series((second) => second.firstSeconds)) / num;
  }

  // Tokens generated per second, over the last whole seconds.
  tokenRate(numSeconds = 2) {
    const recent = this.series((second) => second.generated).slice(-numSeconds);
    return recent.reduce((sum, count) => sum + count, 0) / numSeconds;
  }

  #addLaunch(launch, second) {
    const ms = (1000 * launch.seconds) / launch.num_steps;
    for (let step = 0; step < launch.num_steps; step += 1) {
      this.steps.push({ prefill: step === 0 ? launch.num_prefill_tokens : 0, decode: launch.num_decode_rows, ms });
    }
    this.steps.splice(0, this.steps.length - NUM_STEPS);
    if (second !== null && launch.num_decode_rows > 0) second.ms.push(ms);
  }

  #secondAt(time) {
    const key = Math.floor(time);
    for (const old of this.seconds.keys()) if (old < key - NUM_SECONDS - 1) this.seconds.delete(old);
    if (!this.seconds.has(key)) this.seconds.set(key, { generated: 0, firsts: 0, firstSeconds: 0, ms: [] });
    return this.seconds.get(key);
  }
}

const EMPTY = Object.freeze({ generated: 0, firsts: 0, firstSeconds: 0, ms: Object.freeze([]) });

export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
