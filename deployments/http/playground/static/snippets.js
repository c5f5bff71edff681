// A request as a command of curl and as a Python program. Pure: texts in, texts out. A key is never
// part of them; they read it from REMORA_API_KEY.

// Parameters of OpenAI's Python client; others go through extra_body.
const KNOWN = new Set([
  "model",
  "messages",
  "stream",
  "stream_options",
  "temperature",
  "top_p",
  "max_completion_tokens",
  "seed",
  "stop",
  "presence_penalty",
  "frequency_penalty",
  "logprobs",
  "top_logprobs",
  "reasoning_effort",
  "tools",
  "tool_choice",
  "response_format",
]);

// Returns the curl command that sends a body to a URL.
export function asCurl(url, body, hasKey) {
  const lines = [`curl -N ${shellQuoted(url)}`, "-H 'content-type: application/json'"];
  if (hasKey) lines.push('-H "authorization: Bearer $REMORA_API_KEY"');
  lines.push(`-d ${shellQuoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}

export function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

// Returns the program that sends a chat to the API at `base` (which ends in /v1).
export function asPython(base, body, hasKey) {
  const known = Object.entries(body).filter(
    ([name]) => KNOWN.has(name) && name !== "stream_options",
  );
  const others = Object.entries(body).filter(([name]) => !KNOWN.has(name));
  const lines = known.map(([name, value]) => `    ${name}=${pythonLiteral(value, 4)},`);
  if (others.length) lines.push(`    extra_body=${pythonLiteral(Object.fromEntries(others), 4)},`);
  const key = hasKey ? 'os.environ["REMORA_API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${pythonLiteral(base, 0)}, api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...lines,
    ")",
    "for chunk in stream:",
    "    if chunk.choices and chunk.choices[0].delta.content:",
    '        print(chunk.choices[0].delta.content, end="", flush=True)',
    "print()",
  ].join("\n");
}

// Returns a JSON value as Python source.
export function pythonLiteral(value, indent) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  // JSON's escapes are Python's too, once no half of a surrogate pair stands alone.
  if (typeof value === "string") return JSON.stringify(value.toWellFormed());
  if (typeof value !== "object") return String(value);
  const isList = Array.isArray(value);
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const items = isList
    ? value.map((item) => pythonLiteral(item, indent + 4))
    : Object.entries(value).map(
        ([name, item]) => `${JSON.stringify(name)}: ${pythonLiteral(item, indent + 4)}`,
      );
  const short = `${open}${items.join(", ")}${close}`;
  if (short.length + indent < 80 && !short.includes("\n")) return short;
  const pad = " ".repeat(indent + 4);
  const lines = items.map((item) => `${pad}${item},\n`).join("");
  return `${open}\n${lines}${" ".repeat(indent)}${close}`;
}
