// Calls of tools: put together from the pieces of a stream, and shown with a field for the result of each.

import { make } from "./dom.js";

// Adds pieces of calls, as a chunk has them, to the calls of a turn.
export function addPieces(calls, pieces) {
  for (const piece of pieces) {
    const call = (calls[piece.index ?? calls.length] ??= { id: "", name: "", input: "", isCustom: false });
    const called = piece.function ?? piece.custom ?? {};
    call.isCustom ||= piece.type === "custom";
    call.id ||= piece.id ?? "";
    call.name += called.name ?? "";
    call.input += called.arguments ?? called.input ?? "";
  }
}

// The messages that tell a model of its own calls and of their results, which all have to be there.
export function messagesOfCalls(calls) {
  const written = calls.map(({ id, name, input, isCustom }) =>
    isCustom ? { id, type: "custom", custom: { name, input } } : { id, type: "function", function: { name, arguments: input } },
  );
  return { written, results: calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result })) };
}

export const areAnswered = (calls) => calls.every((call) => call.result !== undefined);

// The calls of one turn. `onResults` is called when the person has given a result to each, with what takes them over.
export class CallsView {
  constructor(onResults) {
    this.onResults = onResults;
    this.element = make("form", "calls");
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.onResults(() => this.#take());
    });
  }

  // Draws the calls as they are. `isOpen`: results may be given.
  draw(calls, isOpen) {
    this.calls = calls;
    const cards = calls.map((call, index) => card(call, index, isOpen));
    const send = isOpen && !areAnswered(calls) ? [make("button", "", calls.length === 1 ? "Send the result" : "Send the results")] : [];
    this.element.replaceChildren(...cards, ...send);
  }

  #take() {
    const fields = [...this.element.querySelectorAll("textarea")];
    fields.forEach((field, index) => (this.calls[index].result = field.value));
    this.draw(this.calls, false);
  }
}

function card(call, index, isOpen) {
  const title = make("p", "call-name", "Calls ", make("code", "", call.name));
  const input = make("pre", "", make("code", "", indented(call.input)));
  input.tabIndex = 0;
  input.role = "group";
  input.ariaLabel = `Arguments of ${call.name}`;
  const element = make("div", "call", title, input);
  if (call.result !== undefined) element.append(make("p", "call-name", "Result"), make("pre", "", make("code", "", call.result)));
  else if (isOpen) element.append(resultField(call, index));
  return element;
}

function resultField(call, index) {
  const field = make("textarea");
  field.rows = 2;
  field.name = `result-${index}`;
  field.placeholder = "what the tool returns";
  return make("label", "", `Result of ${call.name}`, field);
}

// Arguments as they are written for people, if they are JSON.
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // of a custom tool, or not whole yet
  }
}
