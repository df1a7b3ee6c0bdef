// The page's parts, put together.

import { askForKey, hasKey, request } from "./api.js";
import { Batch } from "./batch.js";
import { Chat } from "./chat.js";
import { ConversationList } from "./conversation_list.js";
import { at, say } from "./dom.js";
import "./theme.js";
import { watch } from "./watch.js";

const ownRequests = new Set();
const batch = new Batch(ownRequests);
const conversations = new ConversationList();
conversations.chat = new Chat(ownRequests, () => batch.slotLen, () => conversations.draw());

let isModelKnown = false;

watch(
  (snapshot, isFirst) => batch.take(snapshot, isFirst),
  (state, words) => {
    document.body.dataset.link = state;
    at("link").dataset.state = state;
    say("link", words);
    if (state === "live" && !isModelKnown) showModel();
  },
);

async function showModel() {
  isModelKnown = true;
  try {
    const models = await (await request("v1/models")).json();
    at("model").textContent = models.data[0].id;
    document.title = `${models.data[0].id} · Chairlift`;
    at("change-key").hidden = !hasKey();
  } catch {
    isModelKnown = false; // asked again with the next snapshot
  }
}

// On a narrow screen one half shows at a time.
for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.shows;
    for (const each of document.querySelectorAll("[data-shows]")) {
      each.setAttribute("aria-pressed", String(each === button));
    }
  });
}

at("change-key").addEventListener("click", () => askForKey(null));
