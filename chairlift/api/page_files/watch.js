// Snapshots of the batch, for as long as the page is looked at. Reconnects by itself.

import { eventsOf, request } from "./api.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const SILENCE_MS = 30000; // the server sends something every ten seconds, if only a comment

const SLOT = { state: "free", request_id: "", num_reused: 0, num_computed: 0, num_prompt_tokens: 0, num_tokens: 0, num_held: 0, num_accepted: 0, num_restored: 0, num_states: 0 };
const TOTALS = {
  num_prompt_tokens: 0,
  num_cached_tokens: 0,
  num_generated_tokens: 0,
  num_drafted_tokens: 0,
  num_finished: 0,
  num_first_tokens: 0,
  seconds_to_first_token: 0,
};

// Calls `onSnapshot` for each snapshot, with true for the first of a connection, and `onState` with "live", "connecting", "gone" or "refused" and a few words.
export function watch(onSnapshot, onState) {
  let connection = null;
  const follow = () => {
    connection?.abort();
    connection = null;
    if (document.hidden) return;
    connection = new AbortController();
    keepWatching(onSnapshot, onState, connection);
  };
  document.addEventListener("visibilitychange", follow);
  window.addEventListener("online", follow);
  follow();
}

async function keepWatching(onSnapshot, onState, connection) {
  let wait = FIRST_WAIT_MS;
  onState("connecting", "connecting");
  while (!connection.signal.aborted) {
    try {
      await watchOnce(connection.signal, (snapshot, isFirst) => {
        wait = FIRST_WAIT_MS;
        onState("live", "live");
        onSnapshot(snapshot, isFirst);
      });
    } catch (error) {
      if (connection.signal.aborted) return;
      if (error.status !== undefined) onState("refused", error.message);
      else onState("gone", "the server is gone; trying again");
    }
    await pause(wait * (0.75 + 0.5 * Math.random()), connection.signal);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
}

// Until the stream ends; then, or when nothing more can be heard of the server, it throws.
async function watchOnce(signal, onSnapshot) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  const onLife = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  try {
    const response = await request("watch", { signal: AbortSignal.any([signal, silence.signal]) });
    let isFirst = true;
    for await (const data of eventsOf(response, onLife)) {
      onSnapshot(complete(JSON.parse(data)), isFirst);
      isFirst = false;
    }
  } finally {
    clearTimeout(timer);
  }
  throw new TypeError("the stream ended");
}

// The server leaves out what has its default value.
function complete(snapshot) {
  return {
    ...snapshot,
    slots: snapshot.slots.map((slot) => ({ ...SLOT, ...slot })),
    totals: { ...TOTALS, ...snapshot.totals },
  };
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
