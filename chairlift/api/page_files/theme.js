// Light or dark: as the system has it, until the button says otherwise.

import { local } from "./storage.js";

const THEME = "chairlift-theme";
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");

function show() {
  const chosen = local.getItem(THEME);
  const isDark = chosen === null ? system.matches : chosen === "dark";
  if (chosen !== null) document.documentElement.dataset.theme = chosen;
  button.setAttribute("aria-pressed", String(isDark));
  return isDark;
}

button.addEventListener("click", () => {
  local.setItem(THEME, show() ? "light" : "dark");
  show();
});
system.addEventListener("change", show);
show();
