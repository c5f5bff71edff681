// The page that describes the API: every operation of openapi.json, with a form to try it.

import { ApiError, apiKey, ask, urlOf, useKey } from "./api.js";
import { byId, copy, h, iconButton } from "./dom.js";
import { fieldsOf, typeOf } from "./schema_view.js";
import { shellQuoted } from "./snippets.js";

const JSON_TYPE = "application/json";
const METHODS = ["get", "post", "put", "delete"];
const MAX_SHOWN = 100_000; // characters of a response

let description = null;

async function load() {
  const notice = byId("notice");
  notice.hidden = true;
  try {
    description = await (await ask("openapi.json")).json();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    notice.textContent = error.status === 401 ? "Enter an API key." : error.message;
    notice.hidden = false;
    return;
  }
  byId("served").textContent = description.info.summary ?? "";
  show("");
}

function show(wanted) {
  const main = byId("operations");
  main.replaceChildren(...description.tags.map(({ name }) => group(name, wanted)).filter(Boolean));
  main.setAttribute("aria-busy", "false");
}

function group(name, wanted) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const [path, operations] of Object.entries(description.paths)) {
    for (const method of METHODS) {
      const operation = operations[method];
      if (!operation || operation.tags[0] !== name) continue;
      const text = `${method} ${path} ${operation.summary}`.toLowerCase();
      if (words.every((word) => text.includes(word))) found.push([method, path, operation]);
    }
  }
  if (!found.length) return null;
  const id = `group-${name.toLowerCase().replaceAll(" ", "-")}`;
  const items = found.map(([method, path, operation]) => item(method, path, operation));
  return h(
    "section",
    { class: "group", "aria-labelledby": id },
    h("h2", { id }, name),
    ...items,
  );
}

function item(method, path, operation) {
  const name = method.toUpperCase();
  const head = h(
    "summary",
    {},
    h("span", { class: "method", "data-method": name }, name),
    h("span", { class: "path" }, path),
    h("span", { class: "muted" }, operation.summary),
  );
  const details = h("details", { class: "operation", id: operation.operationId }, head);
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) {
      details.append(body(name, path, operation));
    }
  });
  return details;
}

function body(method, path, operation) {
  const schemas = description.components?.schemas ?? {};
  const parts = [h("p", {}, operation.description)];
  if (operation.parameters?.length) {
    parts.push(h("h3", {}, "Parameters"), parameterList(operation.parameters, schemas));
  }
  const sent = operation.requestBody?.content?.[JSON_TYPE];
  if (sent) {
    parts.push(h("h3", {}, `Body: ${typeOf(sent.schema, schemas)}`));
    parts.push(fieldsOf(sent.schema, schemas));
  }
  for (const [status, response] of Object.entries(operation.responses)) {
    const kinds = Object.entries(response.content ?? {});
    const names = kinds.map(([kind]) => kind).join(", ");
    parts.push(h("h3", {}, `${status}: ${response.description} ${names}`));
    for (const [, { schema }] of kinds) parts.push(fieldsOf(schema, schemas));
  }
  parts.push(h("h3", {}, "Try it"), form(method, path, operation, sent));
  return h("div", { class: "body" }, ...parts);
}

function parameterList(parameters, schemas) {
  const items = parameters.map((one) =>
    h(
      "li",
      {},
      h("code", {}, one.name),
      h("span", { class: "type" }, ` ${typeOf(one.schema ?? {}, schemas)}, in the ${one.in}`),
    ),
  );
  return h("ul", { class: "fields" }, ...items);
}

function form(method, path, operation, sent) {
  const parameters = (operation.parameters ?? []).filter((one) => one.in !== "header");
  const inputs = parameters.map((one) => {
    const input = h("input", { placeholder: one.name, "aria-label": one.name });
    return { ...one, input };
  });
  const text = sent
    ? h("textarea", { rows: 6, spellcheck: "false", "aria-label": "Body" })
    : null;
  if (text) text.value = JSON.stringify(sent.example ?? {}, null, 2);
  const output = h("pre", { class: "code", tabindex: "0", "aria-label": "Response", hidden: true });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const target = () => addressOf(path, inputs);
  const curl = iconButton("copy", "Copy as curl", () =>
    copy(curlOf(method, target(), text?.value), curl),
  );
  const onsubmit = async (event) => {
    event.preventDefault();
    send.disabled = true;
    output.hidden = false;
    output.textContent = "";
    try {
      await run(method, target(), text?.value, output);
    } catch (error) {
      output.textContent += error.message;
    }
    send.disabled = false;
  };
  return h(
    "form",
    { class: "tried", onsubmit },
    ...inputs.map(({ input }) => input),
    text,
    h("div", { class: "tried-actions" }, send, curl),
    output,
  );
}

function addressOf(path, inputs) {
  let place = path.slice(1);
  const query = new URLSearchParams();
  for (const { name, in: where, input } of inputs) {
    if (where === "path") place = place.replace(`{${name}}`, encodeURIComponent(input.value));
    else if (input.value) query.set(name, input.value);
  }
  return urlOf(query.size ? `${place}?${query}` : place || "./");
}

function curlOf(method, url, text) {
  const lines = [`curl -N -X ${method} ${shellQuoted(String(url))}`];
  if (apiKey()) lines.push('-H "authorization: Bearer $REMORA_API_KEY"');
  if (text) lines.push(`-H 'content-type: ${JSON_TYPE}'`, `-d ${shellQuoted(text)}`);
  return lines.join(" \\\n  ");
}

// Sends a request and writes what arrives, as it arrives.
async function run(method, url, text, output) {
  const headers = apiKey() ? { authorization: `Bearer ${apiKey()}` } : {};
  // Browsers send no body with GET.
  const sends = text && method !== "GET";
  if (sends) headers["content-type"] = JSON_TYPE;
  const response = await fetch(url, { method, headers, body: sends ? text : undefined });
  output.textContent = `${response.status} ${response.headers.get("content-type") ?? ""}\n`;
  const ignored = response.headers.get("x-remora-ignored-fields");
  if (ignored) output.textContent += `ignored fields: ${ignored}\n`;
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    output.append(part.value);
    if (output.textContent.length > MAX_SHOWN) {
      output.append("\n...");
      await reader.cancel();
      return;
    }
  }
}

const key = byId("key");
key.value = apiKey();
key.addEventListener("change", () => {
  useKey(key.value);
  load();
});
byId("search").addEventListener("input", (event) => description && show(event.target.value));
load();
