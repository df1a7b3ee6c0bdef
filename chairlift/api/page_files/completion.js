// Asks the server for the next turn of a conversation, and reads its chunks.

import { eventsOf, request } from "./api.js";
import { areAnswered, messagesOfCalls } from "./tool_calls.js";

const PATH = "v1/chat/completions";
const END = "[DONE]";

// The chunks of an answer to these turns. `continues`: of the last turn's rest. ApiError if the server refuses.
export async function* completionOf(turns, { system, sampling, tools }, continues, signal) {
  const messages = turns.flatMap(messagesOf);
  if (system !== "") messages.unshift({ role: "system", content: system });
  const body = { ...sampling, messages, stream: true, stream_options: { include_usage: true } };
  if (tools !== undefined) body.tools = tools;
  if (continues) Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  const response = await ask(body, signal);
  for await (const data of eventsOf(response)) {
    if (data === END) return;
    const chunk = JSON.parse(data);
    if (chunk.error !== undefined) throw Object.assign(new Error(chunk.error.message), { status: response.status });
    yield chunk;
  }
}

// Once more without the limit of tokens where less than that fits: then what fits is the limit.
async function ask(body, signal) {
  try {
    return await request(PATH, { body, signal });
  } catch (error) {
    if (error.param !== "max_tokens" || error.code !== "context_length_exceeded") throw error;
    const { max_tokens: _, ...rest } = body;
    return await request(PATH, { body: rest, signal });
  }
}

// The messages that a turn consists of: none if it came to nothing. Calls that nobody answered are left out.
function messagesOf({ role, content, thoughts, calls }) {
  if (role === "user") return [{ role, content }];
  const { written, results } = calls && areAnswered(calls) ? messagesOfCalls(calls) : { written: [], results: [] };
  if (content === "" && written.length === 0) return [];
  const message = { role, content };
  if (thoughts) message.reasoning_content = thoughts;
  if (written.length > 0) message.tool_calls = written;
  return [message, ...results];
}
