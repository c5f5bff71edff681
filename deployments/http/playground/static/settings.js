// The settings of a request: their fields, their values, and what they add to its body.
// An empty field leaves its parameter to the server's default.

import { byId, h, icon, stored } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top-k", { min: -1, step: 1 }],
  ["min_p", "Min-p", { min: 0, max: 1, step: 0.01 }],
  ["max_completion_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 2, step: 0.01 }],
];
const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"],
  additionalProperties: false,
};
const saved = stored("localStorage", `remora.settings ${new URL("./", document.baseURI).pathname}`);

// A setting that cannot be sent; `field` is its element.
export class SettingError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

export class Settings {
  constructor(panel) {
    this.form = h("form", { class: "settings-form", onsubmit: (event) => event.preventDefault() });
    const close = h(
      "button",
      { type: "button", class: "quiet small", id: "close-settings", title: "Close the settings" },
      icon("close"),
      h("span", { class: "sr-only" }, "Close the settings"),
    );
    panel.append(h("div", { class: "settings-head" }, h("h2", {}, "Settings"), close), this.form);
    this.form.append(
      group("Instructions", textArea("system", "System prompt", { rows: 3 })),
      group(
        "Sampling",
        h(
          "div",
          { class: "grid" },
          ...NUMBERS.map(([name, label, limits]) => number(name, label, limits)),
        ),
        textArea("stop", "Stop texts, one a line", { rows: 1 }),
      ),
      group(
        "Reasoning and probabilities",
        h(
          "div",
          { class: "grid" },
          select("reasoning_effort", "Reasoning effort", [
            ["", "default"],
            "none",
            "minimal",
            "low",
            "medium",
            "high",
          ]),
          select("top_logprobs", "Probabilities", [
            ["", "off"],
            ["0", "of the tokens"],
            ["3", "and 3 others"],
            ["5", "and 5 others"],
            ["10", "and 10 others"],
          ]),
        ),
      ),
      group(
        "Tools",
        jsonArea("tools", "Tools, a JSON list", EXAMPLE_TOOLS),
        select("tool_choice", "Tool choice", [["", "default"], "auto", "none", "required"]),
      ),
      group("Output", jsonArea("schema", "JSON schema of the answer", EXAMPLE_SCHEMA)),
      h("button", { type: "button", class: "quiet", onclick: () => this.reset() }, "Reset all"),
    );
    this.restore(saved.read({}));
    this.form.addEventListener("input", ({ target }) => {
      clearFault(target);
      saved.write(this.values());
    });
    this.form.addEventListener("change", ({ target }) => {
      if (target.dataset.json) this.check(target);
    });
  }

  values() {
    return Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value !== ""));
  }

  restore(values) {
    for (const [name, value] of Object.entries(values)) {
      const field = this.form.elements.namedItem(name);
      if (field) field.value = value;
    }
  }

  reset() {
    this.form.reset();
    for (const field of this.form.elements) clearFault(field);
    saved.write(null);
  }

  get system() {
    return this.values().system?.trim() ?? "";
  }

  // Returns the fields of a body other than model and messages. Throws SettingError.
  request() {
    const values = this.values();
    const body = {};
    for (const [name, label] of NUMBERS) {
      const field = this.form.elements.namedItem(name);
      if (!field.validity.valid) throw fault(field, `${label}: ${field.validationMessage}`);
      if (values[name] !== undefined) body[name] = Number(values[name]);
    }
    const stop = (values.stop ?? "").split("\n").filter(Boolean);
    if (stop.length) body.stop = stop;
    if (values.reasoning_effort) body.reasoning_effort = values.reasoning_effort;
    if (values.top_logprobs)
      Object.assign(body, { logprobs: true, top_logprobs: Number(values.top_logprobs) });
    const tools = this.check(this.form.elements.namedItem("tools"), { throws: true });
    if (tools) body.tools = tools;
    if (tools && values.tool_choice) body.tool_choice = values.tool_choice;
    const schema = this.check(this.form.elements.namedItem("schema"), { throws: true });
    if (schema)
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    return body;
  }

  // Returns the JSON value of a field, undefined if it is empty, and shows what is wrong with it.
  check(field, { throws = false } = {}) {
    clearFault(field);
    if (!field.value.trim()) return undefined;
    try {
      const value = JSON.parse(field.value);
      const isRight =
        field.name === "tools" ? Array.isArray(value) : value !== null && typeof value === "object";
      if (!isRight)
        throw new Error(field.name === "tools" ? "a list is needed" : "an object is needed");
      return value;
    } catch (error) {
      const found = fault(field, `${field.dataset.json}: ${error.message}`);
      if (throws) throw found;
      return undefined;
    }
  }
}

function fault(field, message) {
  field.setAttribute("aria-invalid", "true");
  const text = byId(`${field.id}-fault`);
  if (text) text.textContent = message;
  return new SettingError(message, field);
}

function clearFault(field) {
  field.removeAttribute("aria-invalid");
  const text = byId(`${field.id}-fault`);
  if (text) text.textContent = "";
}

function group(title, ...fields) {
  return h("fieldset", {}, h("legend", {}, title), ...fields);
}

function labelled(name, label, field, ...others) {
  return h("div", { class: "field" }, h("label", { for: `set-${name}` }, label), field, ...others);
}

function number(name, label, limits) {
  const field = h("input", {
    id: `set-${name}`,
    name,
    type: "number",
    inputmode: "decimal",
    placeholder: "default",
    autocomplete: "off",
    ...limits,
  });
  return labelled(name, label, field);
}

function textArea(name, label, options) {
  return labelled(
    name,
    label,
    h("textarea", { id: `set-${name}`, name, autocomplete: "off", ...options }),
  );
}

function select(name, label, options) {
  const entries = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const choices = entries.map(([value, text]) => h("option", { value }, text));
  return labelled(name, label, h("select", { id: `set-${name}`, name }, ...choices));
}

function jsonArea(name, label, example) {
  const field = h("textarea", {
    id: `set-${name}`,
    name,
    rows: 4,
    class: "mono",
    spellcheck: "false",
    autocomplete: "off",
    "data-json": label,
    "aria-describedby": `set-${name}-fault`,
  });
  const insert = () => {
    field.value = JSON.stringify(example, null, 2);
    field.dispatchEvent(new Event("input", { bubbles: true }));
    field.focus();
  };
  return labelled(
    name,
    label,
    field,
    h("p", { id: `set-${name}-fault`, class: "fault", role: "alert" }),
    h("button", { type: "button", class: "quiet small", onclick: insert }, "Insert an example"),
  );
}
