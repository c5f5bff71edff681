// Turns of a conversation as plain data, and the messages that they make.
//
// {role: "user", text}
// {role: "tool", callId, name, text}
// {role: "assistant", model, text, reasoning, calls, tokens, reasoningTokens, finish, stats, usage,
//  error, isStopped}

export function userTurn(text) {
  return { role: "user", text };
}

export function toolTurn(call, text) {
  return { role: "tool", callId: call.id, name: call.name, text };
}

export function answerTurn(model) {
  return {
    role: "assistant",
    model,
    text: "",
    reasoning: "",
    calls: [],
    tokens: [],
    reasoningTokens: [],
    finish: null,
    stats: null,
    usage: null,
    error: null,
    isStopped: false,
  };
}

// Adds a part of the stream to an answer; returns whether it had output.
export function addPart(turn, part) {
  turn.text += part.text;
  turn.reasoning += part.reasoning;
  (part.reasoning ? turn.reasoningTokens : turn.tokens).push(...part.tokens);
  for (const { index, id, name, arguments: text } of part.calls) {
    turn.calls[index] ??= { id: "", name: "", arguments: "" };
    const call = turn.calls[index];
    if (id) call.id = id;
    call.name += name;
    call.arguments += text;
  }
  turn.finish = part.finish ?? turn.finish;
  turn.usage = part.usage ?? turn.usage;
  return Boolean(part.text || part.reasoning || part.calls.length || part.tokens.length);
}

// Returns the messages of a request. Answers without content (failed, or stopped at once) are left
// out; reasoning is sent back only within a turn that calls tools, where models expect it.
export function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") messages.push({ role: "user", content: turn.text });
    else if (turn.role === "tool")
      messages.push({ role: "tool", tool_call_id: turn.callId, content: turn.text });
    else if (turn.calls.length) messages.push(callingMessage(turn));
    else if (turn.text) messages.push({ role: "assistant", content: turn.text });
  }
  return messages;
}

function callingMessage(turn) {
  const message = { role: "assistant", content: turn.text || null };
  if (turn.reasoning) message.reasoning_content = turn.reasoning;
  message.tool_calls = turn.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return message;
}

// Returns the calls of the last answer that have no result yet.
export function openCalls(turns) {
  const at = turns.findLastIndex((turn) => turn.role === "assistant");
  if (at < 0) return [];
  const answered = new Set(turns.slice(at + 1).map((turn) => turn.callId));
  return turns[at].calls.filter((call) => !answered.has(call.id));
}
