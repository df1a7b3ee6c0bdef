// The conversations that this browser keeps: {id, title, isNamed, changed, turns, settings}. They are no more than so many
// and so large; the oldest make room for new ones. Servers behind other paths of the same site have their own.

import { local } from "./storage.js";

const PREFIX = `chairlift-chat:${location.pathname}:`;
const MAX_KEPT = 100;
const MAX_CHARACTERS = 2_000_000; // of all; browsers hold about twice that for a site
const LONGEST_TITLE = 60;

// Newest first.
export function listConversations() {
  return keys().map(read).filter((each) => each !== null).sort((one, other) => other.changed - one.changed);
}

export const findConversation = (id) => read(PREFIX + id);

// Keeps a conversation, and forgets the oldest others if there is no room. False if there is none for it alone.
export function keepConversation(conversation) {
  const text = JSON.stringify(conversation);
  if (text.length > MAX_CHARACTERS) return false;
  const others = listConversations().filter((each) => each.id !== conversation.id);
  let size = others.reduce((sum, each) => sum + each.size, text.length);
  while (others.length >= MAX_KEPT || size > MAX_CHARACTERS) {
    const oldest = others.pop();
    size -= oldest.size;
    removeConversation(oldest.id);
  }
  while (!write(PREFIX + conversation.id, text)) {
    if (others.length === 0) return false;
    removeConversation(others.pop().id);
  }
  return true;
}

export function renameConversation(id, title) {
  const conversation = findConversation(id);
  if (conversation === null) return; // another tab has deleted it
  const { size, ...kept } = conversation;
  write(PREFIX + id, JSON.stringify({ ...kept, title, isNamed: true }));
}

export function removeConversation(id) {
  local.removeItem(PREFIX + id);
}

// Calls when another tab has changed what is kept.
export function onOtherTabs(call) {
  window.addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) call();
  });
}

// A conversation's title until the person gives it one: what it begins with.
export function titleOf(turns) {
  const line = turns[0].content.split("\n", 1)[0].trim();
  return line.length <= LONGEST_TITLE ? line : `${line.slice(0, LONGEST_TITLE - 1)}…`;
}

function keys() {
  const all = Array.from({ length: local.length }, (_, index) => local.key(index));
  return all.filter((key) => key.startsWith(PREFIX));
}

// `size` is that of its text. null if it is not there, or if it is none.
function read(key) {
  const text = local.getItem(key);
  try {
    const conversation = JSON.parse(text);
    return Array.isArray(conversation?.turns) ? { ...conversation, size: text.length } : null;
  } catch {
    return null; // something else has written it
  }
}

// False if there is no room.
function write(key, text) {
  try {
    local.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}
