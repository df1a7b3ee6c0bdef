// Finding and making elements. Text is only ever text: nothing here reads it as markup.

export const at = (id) => document.getElementById(id);

// Changes an element's text where it differs, so that nothing is drawn or read out again for nothing.
export function say(id, text) {
  const element = at(id);
  if (element.textContent !== text) element.textContent = text;
}

// Makes an element; children are nodes or texts.
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className !== "") element.className = className;
  element.append(...children);
  return element;
}

// Makes a button; `name` says what it does where its label alone would not.
export function button(label, onClick, { className = "quiet", name } = {}) {
  const element = make("button", className, label);
  element.type = "button";
  if (name !== undefined) element.ariaLabel = name;
  element.addEventListener("click", onClick);
  return element;
}
