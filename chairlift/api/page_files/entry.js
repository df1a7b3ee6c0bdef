// One turn of a conversation in the log. What the person wrote is shown as it is, what the model wrote as Markdown.

import { button, make } from "./dom.js";
import { MarkdownView } from "./markdown_view.js";
import { duration } from "./numbers.js";
import { CallsView } from "./tool_calls.js";

export class Entry {
  constructor(turn) {
    this.turn = turn;
    const isUser = turn.role === "user";
    this.body = make("div", "text");
    this.actions = make("div", "actions");
    this.element = make("article", turn.role, make("h3", "", isUser ? "You" : "Model"), this.body, this.actions);
    if (isUser) this.body.textContent = turn.content;
    else this.view = new MarkdownView(this.body, keepingEndInSight);
  }

  // Shows a turn of the model that is there already.
  showAnswer(onResults) {
    const { content, thoughts, thoughtSeconds, calls, spent } = this.turn;
    if (thoughts) {
      this.think(thoughts);
      this.stopThinking(thoughtSeconds);
    }
    this.view.write(content);
    this.view.finish();
    if (calls) this.showCalls(onResults);
    if (spent) this.note(spent, "spent");
  }

  write(text) {
    this.view.write(text);
  }

  // What a model thinks stands above its answer, and is folded when that begins.
  think(text) {
    if (this.thoughts === undefined) {
      const thinking = make("div", "text");
      this.thoughts = make("details", "thoughts", make("summary", "", "Thinking"), thinking);
      this.thoughts.open = true;
      this.thoughtsView = new MarkdownView(thinking, keepingEndInSight);
      this.body.before(this.thoughts);
    }
    this.thoughtsView.write(text);
  }

  // `seconds` undefined: nobody knows how long it took.
  stopThinking(seconds) {
    if (this.thoughts === undefined) return;
    this.thoughtsView.finish();
    this.thoughts.open = false;
    this.thoughts.firstChild.textContent = seconds === undefined ? "Thoughts" : `Thought for ${duration(seconds)}`;
  }

  // `onResults` undefined: the calls are still being written.
  showCalls(onResults) {
    if (this.callsView === undefined) {
      this.callsView = new CallsView((take) => this.onResults(take));
      this.body.after(this.callsView.element);
    }
    this.onResults = onResults;
    keepingEndInSight(() => this.callsView.draw(this.turn.calls, onResults !== undefined));
  }

  // The last pieces are drawn, and nothing more comes for now.
  finish() {
    this.view.finish();
    this.thoughtsView?.finish();
  }

  note(text, className) {
    const note = this.element.querySelector(`:scope > .${className}`) ?? make("p", className);
    this.actions.before(note);
    note.textContent = text;
  }

  // What the person can do with this turn: [label, what is called].
  offer(actions) {
    this.actions.replaceChildren(...actions.map(([label, onClick]) => button(label, (event) => onClick(event.target))));
  }

  // Turns the text into a field. `onSend` gets what is in it when the person sends it.
  edit(onSend) {
    const field = make("textarea");
    field.value = this.turn.content;
    field.ariaLabel = "Message";
    const send = make("button", "primary", "Send");
    const form = make("form", "edit", field, send, button("Cancel", () => this.stopEditing(), { className: "" }));
    form.append(make("p", "aside", "What stands below this message is removed."));
    const whenSent = (event) => {
      event.preventDefault();
      if (field.value.trim() !== "") onSend(field.value.trim());
    };
    form.addEventListener("submit", whenSent);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopEditing();
      else if (isSendKey(event)) whenSent(event);
    });
    this.body.hidden = this.actions.hidden = true;
    this.body.after(form);
    this.form = form;
    field.focus();
  }

  stopEditing() {
    if (this.form === undefined) return;
    this.form.remove();
    this.form = undefined;
    this.body.hidden = this.actions.hidden = false;
    this.actions.querySelector("button")?.focus();
  }
}

// Enter sends, but not where a keyboard on the screen has no other key for a new line.
export function isSendKey(event) {
  const wantsLine = event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches;
  return event.key === "Enter" && !wantsLine;
}

const NEAR_PX = 80; // who is that near to the end of the log wants to stay there

// The log follows its end, unless the person has scrolled away from it.
export function keepingEndInSight(change, always = false) {
  const log = document.getElementById("log");
  const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  change();
  if (always || isNear) log.scrollTop = log.scrollHeight;
}
