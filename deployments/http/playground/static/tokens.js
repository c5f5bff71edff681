// An answer as its tokens, with the probabilities of each on hover, touch, or by arrow keys.

import { h } from "./dom.js";

let numViews = 0;

// Returns the element for tokens with log-probabilities, as in OpenAI's `logprobs.content`.
export function tokenView(tokens, label) {
  numViews += 1;
  const id = `tokens-${numViews}`;
  const spans = textsOf(tokens).map((text, at) =>
    h(
      "span",
      {
        role: "option",
        id: `${id}-${at}`,
        class: `token ${level(tokens[at].logprob)}`,
        "aria-selected": "false",
        "aria-label": text.trim() ? null : quoted(tokens[at].token), // spaces are not read aloud
      },
      text,
    ),
  );
  const detail = h("div", { class: "token-detail", hidden: true });
  const spoken = h("p", { class: "sr-only", role: "status" });
  const list = h(
    "div",
    {
      class: "token-list",
      role: "listbox",
      tabindex: "0",
      "aria-label": label,
      "aria-orientation": "horizontal",
    },
    ...spans,
  );
  const view = h("div", { class: "token-view" }, list, detail, spoken);
  let current = -1;

  const choose = (at, { speaks = false } = {}) => {
    spans[current]?.setAttribute("aria-selected", "false");
    current = at;
    detail.hidden = at < 0;
    if (at < 0) {
      list.removeAttribute("aria-activedescendant");
      return;
    }
    spans[at].setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", spans[at].id);
    detail.replaceChildren(...detailOf(tokens[at]));
    place(detail, spans[at], view);
    if (speaks) spoken.textContent = sentence(tokens[at]);
  };

  list.addEventListener("pointerover", ({ target }) => choose(spans.indexOf(target)));
  list.addEventListener("pointerleave", () => choose(-1));
  list.addEventListener("blur", () => choose(-1));
  list.addEventListener("keydown", (event) => {
    const to = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: spans.length - 1 }[
      event.key
    ];
    if (to === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(spans.length - 1, to)), { speaks: true });
  });
  return view;
}

// Returns the text of each token; the bytes of a character may be spread over several.
export function textsOf(tokens) {
  const decoder = new TextDecoder();
  return tokens.map(({ token, bytes }) =>
    bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token,
  );
}

function level(logprob) {
  const share = Math.exp(logprob);
  return ["unlikely", "rare", "likely", "sure"][(share > 0.1) + (share > 0.5) + (share > 0.9)];
}

export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 10 ? `${share.toFixed(0)} %` : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}

function quoted(text) {
  return JSON.stringify(text);
}

function sentence(token) {
  const others = (token.top_logprobs ?? [])
    .filter((other) => other.token !== token.token)
    .slice(0, 3);
  const list = others.map((other) => `${quoted(other.token)} ${percent(other.logprob)}`).join(", ");
  return `${quoted(token.token)}, ${percent(token.logprob)}${list ? `; instead of ${list}` : ""}`;
}

function detailOf(token) {
  const top = token.top_logprobs ?? [];
  const rows = top.some((other) => other.token === token.token) ? top : [token, ...top];
  const chosen = rows.findIndex((row) => row.token === token.token);
  return rows.map((row, at) => {
    const bar = h("span", { class: "share" });
    // By script: the policy forbids style attributes.
    bar.style.width = `${100 * Math.exp(row.logprob)}%`;
    return h(
      "div",
      { class: at === chosen ? "row chosen" : "row" },
      h("code", {}, quoted(row.token)),
      h("span", { class: "track" }, bar),
      h("span", { class: "number" }, percent(row.logprob)),
    );
  });
}

function place(detail, span, view) {
  const box = view.getBoundingClientRect();
  const token = span.getBoundingClientRect();
  const left = Math.min(token.left - box.left, box.width - detail.offsetWidth);
  detail.style.left = `${Math.max(0, left)}px`;
  detail.style.top = `${token.bottom - box.top + 4}px`;
}
