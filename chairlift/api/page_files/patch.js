// Brings elements to a new state by the fewest changes, so that what stays is not drawn anew, and a selection holds.

// Makes the children of `old`, from that number on, like those of `fresh`, whose nodes it takes.
export function patch(old, fresh, first = 0) {
  let present = old.childNodes[first] ?? null;
  for (const node of [...fresh.childNodes]) {
    if (present === null) {
      old.append(node);
      continue;
    }
    const next = present.nextSibling;
    if (!merge(present, node)) present.replaceWith(node);
    present = next;
  }
  while (present !== null) {
    const next = present.nextSibling;
    present.remove();
    present = next;
  }
}

// False if the nodes are of different kinds, so that one has to take the other's place.
function merge(present, fresh) {
  if (present.nodeName !== fresh.nodeName) return false;
  if (present.nodeType === Node.TEXT_NODE) {
    mergeText(present, fresh.data);
    return true;
  }
  for (const name of present.getAttributeNames()) if (!fresh.hasAttribute(name)) present.removeAttribute(name);
  for (const name of fresh.getAttributeNames()) {
    const value = fresh.getAttribute(name);
    if (present.getAttribute(name) !== value) present.setAttribute(name, value);
  }
  patch(present, fresh);
  return true;
}

function mergeText(present, text) {
  if (present.data === text) return;
  if (text.startsWith(present.data)) present.appendData(text.slice(present.data.length));
  else present.data = text;
}
