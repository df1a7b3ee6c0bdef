// How the model is to answer. A field that is left empty is not sent: the model's own default holds.

const panel = document.getElementById("settings");
const brief = document.getElementById("settings-brief");
const system = document.getElementById("system");
const fields = [...panel.querySelectorAll("input")];

export function readSettings() {
  const given = fields.filter((field) => field.value !== "");
  return {
    system: system.value.trim(),
    sampling: Object.fromEntries(given.map((field) => [field.name, field.valueAsNumber])),
  };
}

// What is set shows beside the word Settings, so that the panel may stay closed.
panel.addEventListener("input", () => {
  const given = fields.filter((field) => field.value !== "").map((field) => `${field.labels[0].firstChild.data.trim()} ${field.value}`);
  if (system.value.trim() !== "") given.unshift("system message");
  brief.textContent = given.join(", ");
});

// A field with a mistake must be seen before the browser can point at it.
panel.addEventListener("invalid", () => (panel.open = true), { capture: true });
