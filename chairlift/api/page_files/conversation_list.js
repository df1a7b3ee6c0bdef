// The panel that lists the kept conversations, to open, rename and delete them.

import { listConversations, onOtherTabs, removeConversation, renameConversation } from "./conversations.js";
import { at, button, make, say } from "./dom.js";

export class ConversationList {
  // `chat` opens conversations; it is given after this list, which it tells of changes.
  constructor() {
    this.chat = null;
    at("delete-all").addEventListener("click", (event) => this.#confirm(event.target, "Delete all chats?", () => this.#removeAll()));
    at("chats").addEventListener("toggle", () => this.draw());
    onOtherTabs(() => this.draw());
  }

  draw() {
    if (this.chat === null || !at("chats").matches(":popover-open")) return;
    const kept = listConversations();
    at("chat-list").replaceChildren(...kept.map((each) => this.#row(each)));
    at("no-chats").hidden = kept.length > 0;
    at("delete-all").hidden = kept.length === 0;
  }

  #row({ id, title }) {
    const open = button(title, () => this.#open(id), { className: "quiet title" });
    if (id === this.chat.id) open.setAttribute("aria-current", "true");
    const row = make("li");
    const rename = button("Rename", () => this.#rename(row, id, title), { name: `Rename ${title}` });
    const remove = button("Delete", () => this.#confirm(remove, "Delete?", () => this.#remove(id)), { name: `Delete ${title}` });
    row.append(open, rename, remove);
    return row;
  }

  #open(id) {
    at("chats").hidePopover();
    this.chat.open(id);
  }

  #rename(row, id, title) {
    const field = make("input");
    field.value = title;
    field.maxLength = 200;
    field.ariaLabel = "Name of the chat";
    const form = make("form", "", field, make("button", "quiet", "Save"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      renameConversation(id, field.value.trim() || title);
      this.#redraw();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault(); // the panel stays open
      this.#redraw();
    });
    row.replaceChildren(form);
    field.select();
  }

  // A second press on the same place deletes; to leave it does not.
  #confirm(element, question, onSure) {
    if (element.classList.contains("asked")) {
      onSure();
      return;
    }
    const [label, name] = [element.textContent, element.ariaLabel];
    const show = (text, spoken, isAsked) => {
      element.textContent = text;
      element.ariaLabel = spoken;
      element.classList.toggle("asked", isAsked);
    };
    show(question, null, true);
    say("announcer", `${question} Press again to delete.`);
    element.addEventListener("blur", () => show(label, name, false), { once: true });
  }

  async #remove(id) {
    if (id === this.chat.id) await this.chat.remove();
    else removeConversation(id);
    this.#redraw();
  }

  async #removeAll() {
    await this.chat.remove();
    for (const { id } of listConversations()) removeConversation(id);
    this.#redraw();
  }

  #redraw() {
    this.draw();
    at("chats").querySelector("button:not([hidden])")?.focus();
  }
}
