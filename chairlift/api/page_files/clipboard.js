// Copies text. Browsers offer the clipboard to pages of https and of this machine only; others select and copy.

import { make } from "./dom.js";

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // there is none, or the person has not allowed it
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const field = make("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
