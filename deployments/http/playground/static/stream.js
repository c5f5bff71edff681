// Streamed chats: server-sent events, and what their chunks add to an answer.

import { ApiError, ask } from "./api.js";

// Yields the parsed data of each event of a byte stream, whatever its chunks.
export async function* readEvents(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // comments keep the connection alive
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
      if (done) return;
    }
  } finally {
    // Also when the caller stops early: the server then ends the request.
    await reader.cancel().catch(() => {});
  }
}

// Yields what each chunk of a chat adds:
// {text, reasoning, calls: [{index, id, name, arguments}], tokens, finish, usage}.
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", { json: body, signal });
  for await (const chunk of readEvents(response.body)) {
    if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error), 500);
    yield partOf(chunk);
  }
}

export function partOf(chunk) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  return {
    text: delta.content ?? "",
    reasoning: delta.reasoning_content ?? delta.reasoning ?? "",
    calls: (delta.tool_calls ?? []).map((call) => ({
      index: call.index ?? 0,
      id: call.id,
      name: call.function?.name ?? "",
      arguments: call.function?.arguments ?? "",
    })),
    tokens: choice?.logprobs?.content ?? [],
    finish: choice?.finish_reason ?? null,
    usage: chunk.usage ?? null,
  };
}

// Times one answer; `now` is in milliseconds.
export class Stopwatch {
  constructor(now) {
    this.started = now;
    this.first = null;
    this.last = null;
    this.parts = 0;
  }

  // Notes that a part with output has arrived.
  note(now) {
    this.first ??= now;
    this.last = now;
    this.parts += 1;
  }

  // Returns {ttftMs, tokens, speed, isExact}; speed is in tokens a second after the first, and null
  // for an answer that came in one piece. Without usage, parts stand for tokens.
  result(usage) {
    const tokens = usage?.completion_tokens ?? this.parts;
    const seconds = this.first === null ? 0 : (this.last - this.first) / 1000;
    return {
      ttftMs: this.first === null ? null : this.first - this.started,
      tokens,
      speed: seconds > 0 && tokens > 1 ? (tokens - 1) / seconds : null,
      isExact: usage !== null && usage !== undefined,
    };
  }
}
