// The way to the server: requests with the API key, errors in its own words, and server-sent events.

import { session } from "./storage.js";

const KEY = "chairlift-key";
const keyDialog = document.getElementById("key-dialog");
const keyField = document.getElementById("key");
const keyReason = document.getElementById("key-reason");

let asking = null; // while the dialog is open: the promise that all who need a key wait for

export class ApiError extends Error {
  // `param` and `code`: which field the server complains of, and why, in its terms.
  constructor(status, message, { param, code } = {}) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

export const hasKey = () => session.getItem(KEY) !== null;

// Fetches a path, once more for each key that the person enters. ApiError unless the server agrees.
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = session.getItem(KEY);
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const options = body === undefined ? { headers, signal } : { ...posting(body, headers), signal };
    const response = await fetch(path, { cache: "no-store", ...options });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401) throw error;
    // Another request may have been told the new key meanwhile.
    if (session.getItem(KEY) === key) await askForKey(key === null ? null : "That key is not one of this server's.");
    signal?.throwIfAborted();
  }
}

// Opens the dialog; all who call meanwhile wait for the same answer.
export function askForKey(reason) {
  if (reason !== null) keyReason.textContent = reason;
  asking ??= new Promise((resolve) => {
    keyField.value = "";
    keyDialog.showModal();
    keyDialog.addEventListener(
      "close",
      () => {
        asking = null;
        resolve();
      },
      { once: true },
    );
  });
  return asking;
}

document.getElementById("key-form").addEventListener("submit", () => {
  session.setItem(KEY, keyField.value.trim());
});
// Nothing on the page works without a key, so there is no way out of the dialog but one.
keyDialog.addEventListener("cancel", (event) => {
  if (!hasKey()) event.preventDefault();
});

// The data of each event of a stream; `onLife` is called for whatever arrives, comments too.
export async function* eventsOf(response, onLife = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onLife();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) yield event.slice("data: ".length);
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // the connection may be gone already, which is what is wanted
  }
}

function posting(body, headers) {
  return { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(response.status, error.message, error);
  } catch {
    return new ApiError(response.status, `the server answered with status ${response.status}`); // a proxy's own page
  }
}
