// One turn on the page: the question, or the answer with its reasoning, calls and numbers, and the
// buttons. Shows what it is given; what the buttons do is the pane's.

import { copy, h, icon, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { tokenView } from "./tokens.js";

const ENDS = {
  length: "stopped at the most tokens",
  content_filter: "filtered",
  abort: "aborted by the server",
  error: "ended with an error",
};

// Returns the view of a question or of a tool's result. actions: {edit(text), canEdit()}
export function questionView(turn, actions) {
  const isTool = turn.role === "tool";
  const bubble = h("div", { class: "bubble" }, turn.text);
  const name = isTool ? `Result of ${turn.name}` : "You";
  const element = h("article", { class: isTool ? "turn tool" : "turn user", "aria-label": name });
  const head = h("h3", { class: isTool ? "who" : "sr-only" }, name);
  const copyButton = iconButton("copy", "Copy", () => copy(turn.text, copyButton));
  const buttons = h("div", { class: "turn-actions" }, copyButton);
  if (!isTool)
    buttons.append(
      iconButton("edit", "Edit", () => openEditor(element, turn.text, "Send", actions), {
        "data-action": "edit",
      }),
    );
  element.append(head, bubble, buttons);
  return { element };
}

// Replaces what a turn shows by an editor until it is saved or left.
function openEditor(element, text, verb, actions) {
  if (element.querySelector(".editor") || !actions.canEdit()) return;
  const field = h("textarea", {
    class: "edit",
    "aria-label": "Text of this turn",
    rows: Math.min(12, text.split("\n").length + 1),
  });
  field.value = text;
  const close = () => {
    editor.remove();
    element.classList.remove("editing");
    element.querySelector("[data-action=edit]")?.focus();
  };
  const save = () => {
    const { value } = field;
    close();
    actions.edit(value);
  };
  const editor = h(
    "form",
    {
      class: "editor",
      onsubmit: (event) => {
        event.preventDefault();
        save();
      },
    },
    field,
    h(
      "div",
      { class: "editor-actions" },
      h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
      h("button", { type: "submit", class: "primary" }, verb),
    ),
  );
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      save();
    }
  });
  element.classList.add("editing");
  element.append(editor);
  field.focus();
  field.setSelectionRange(text.length, text.length);
}

// The view of an answer, which `update` brings up to date.
// actions: {retry(), edit(text), canEdit(), sendResults([text])}
export class AnswerView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.showsTokens = false;
    this.reasoning = h("div", { class: "reasoning-text markdown" });
    this.reasoningTitle = h("span", {}, "Reasoning");
    this.details = h(
      "details",
      { class: "reasoning", hidden: true },
      h("summary", {}, this.reasoningTitle),
      this.reasoning,
    );
    this.body = h("div", { class: "answer markdown" });
    this.calls = h("div", { class: "calls" });
    this.error = h("p", { class: "fault", role: "alert", hidden: true });
    this.stats = h("p", { class: "stats" });
    const copyButton = iconButton("copy", "Copy the answer", () =>
      copy(this.turn.text, copyButton),
    );
    this.tokensButton = iconButton("tokens", "Show the tokens", () => this.toggleTokens(), {
      "aria-pressed": "false",
      hidden: true,
    });
    this.buttons = h(
      "div",
      { class: "turn-actions" },
      copyButton,
      iconButton("retry", "Answer again", () => actions.retry(), { "data-action": "retry" }),
      iconButton(
        "edit",
        "Edit the answer",
        () => openEditor(this.element, this.turn.text, "Save", actions),
        { "data-action": "edit" },
      ),
      this.tokensButton,
    );
    this.element = h(
      "article",
      { class: "turn assistant", "aria-label": `Answer of ${turn.model}` },
      h("h3", { class: "who" }, turn.model),
      this.details,
      this.body,
      this.calls,
      this.error,
      h("div", { class: "turn-foot" }, this.buttons, this.stats),
    );
  }

  // Shows the turn as it is now; an answer that is streaming has no buttons yet.
  update({ isStreaming }) {
    const { turn } = this;
    this.element.setAttribute("aria-busy", String(isStreaming));
    this.element.classList.toggle("streaming", isStreaming);
    this.element.classList.toggle(
      "waiting",
      isStreaming && !turn.text && !turn.reasoning && !turn.calls.length,
    );
    this.updateReasoning(isStreaming);
    if (!this.showsTokens) showMarkdown(this.body, turn.text);
    this.calls.replaceChildren(...turn.calls.map(callNode));
    this.error.hidden = !turn.error;
    this.error.textContent = turn.error ?? "";
    this.buttons.hidden = isStreaming;
    this.tokensButton.hidden = isStreaming || !(turn.tokens.length + turn.reasoningTokens.length);
    this.stats.replaceChildren(...(isStreaming ? [] : statNodes(turn)));
  }

  updateReasoning(isStreaming) {
    const { turn } = this;
    if (!turn.reasoning) return;
    if (this.details.hidden) {
      this.details.hidden = false;
      this.details.open = true;
    }
    const isThinking = isStreaming && !turn.text;
    this.reasoningTitle.textContent = isThinking ? "Reasoning …" : "Reasoning";
    // Folded once the answer begins, unless the reader has folded or opened it before.
    if (!isThinking && !this.wasFolded) {
      this.details.open = false;
      this.wasFolded = true;
    }
    showMarkdown(this.reasoning, turn.reasoning);
  }

  toggleTokens() {
    this.showsTokens = !this.showsTokens;
    this.tokensButton.setAttribute("aria-pressed", String(this.showsTokens));
    this.body.replaceChildren();
    this.body.markdownBlocks = [];
    if (!this.showsTokens) {
      showMarkdown(this.body, this.turn.text);
      return;
    }
    for (const [label, tokens] of [
      ["Tokens of the reasoning", this.turn.reasoningTokens],
      ["Tokens of the answer", this.turn.tokens],
    ]) {
      if (tokens.length)
        this.body.append(h("p", { class: "token-label" }, label), tokenView(tokens, label));
    }
  }

  // Asks for the results of the calls; a result sends the conversation on once all are there.
  askForResults() {
    const fields = this.turn.calls.map((call, at) => {
      const field = h("textarea", {
        rows: 2,
        class: "mono",
        "aria-label": `Result of call ${at + 1}, ${call.name}`,
        placeholder: `Result of ${call.name}`,
      });
      return field;
    });
    const form = h(
      "form",
      {
        class: "results",
        onsubmit: (event) => {
          event.preventDefault();
          form.remove();
          this.actions.sendResults(fields.map((field) => field.value));
        },
      },
      ...fields,
      h(
        "button",
        { type: "submit", class: "primary" },
        fields.length > 1 ? "Send the results" : "Send the result",
      ),
    );
    this.calls.append(form);
  }
}

function callNode(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // Still streaming, or not JSON: shown as it is.
  }
  return h(
    "div",
    { class: "call" },
    h("div", { class: "call-name" }, icon("code"), h("code", {}, call.name)),
    h("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${call.name}` }, shown),
  );
}

export function duration(milliseconds) {
  return milliseconds < 1000
    ? `${milliseconds.toFixed(0)} ms`
    : `${(milliseconds / 1000).toFixed(2)} s`;
}

function statNodes({ stats, usage, finish, isStopped }) {
  const found = [];
  const add = (text, title) => found.push(h("span", { title }, text));
  if (stats && stats.ttftMs !== null) {
    add(
      `${stats.isExact ? "" : "≈ "}${stats.tokens} tokens`,
      "Tokens of the answer, with its reasoning",
    );
    if (stats.speed !== null)
      add(`${stats.speed.toFixed(1)} tokens/s`, "Tokens a second after the first one");
    add(`TTFT ${duration(stats.ttftMs)}`, "Time to the first token, as this browser sees it");
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    add(
      `prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`,
      "Tokens of the prompt, and how many were in the prefix cache",
    );
  }
  if (isStopped) add("stopped", "You stopped the answer");
  else if (ENDS[finish]) add(ENDS[finish], `finish_reason: ${finish}`);
  return found;
}
