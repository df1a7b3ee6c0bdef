// How the model is to answer. A field that is empty is not sent: the model's own default holds.

import { at } from "./dom.js";

const panel = at("settings");
const brief = at("settings-brief");
const tools = at("tools");
const fields = [...panel.querySelectorAll("input, textarea")]; // each has a name
const numbers = fields.filter((field) => field.type === "number");

// What a request takes of them. `tools` is undefined where none are given. A limit of tokens that no answer reaches, of
// `slotLen` tokens at most, is left out.
export function readSettings(slotLen) {
  const given = numbers.filter((field) => field.value !== "" && !(field.name === "max_tokens" && field.valueAsNumber >= slotLen));
  return {
    system: at("system").value.trim(),
    sampling: Object.fromEntries(given.map((field) => [field.name, field.valueAsNumber])),
    tools: tools.value.trim() === "" ? undefined : JSON.parse(tools.value),
  };
}

// What stands in the fields, by name, to be kept with a conversation.
export function readFields() {
  return Object.fromEntries(fields.map((field) => [field.name, field.value]));
}

export function writeFields(values) {
  for (const field of fields) field.value = values?.[field.name] ?? field.defaultValue;
  checkTools();
  showBrief();
}

function checkTools() {
  tools.setCustomValidity(tools.value.trim() === "" || isList(tools.value) ? "" : "Write a list of tools as JSON, as the API takes them");
}

function isList(text) {
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}

// What is set shows beside the word Settings, so that the panel may stay closed.
function showBrief() {
  const changed = fields.filter((field) => field.value.trim() !== field.defaultValue);
  brief.textContent = changed.map((field) => (field.type === "number" ? `${labelOf(field)} ${field.value || field.placeholder}` : labelOf(field).toLowerCase())).join(", ");
}

const labelOf = (field) => field.labels[0].firstChild.data.trim();

panel.addEventListener("input", () => {
  checkTools();
  showBrief();
});

// A field with a mistake must be seen before the browser can point at it.
panel.addEventListener("invalid", () => (panel.open = true), { capture: true });
