// Text within a block of Markdown: code, emphasis, links. Scans from left to right; a mark whose
// end is missing is text, and is not searched again.

import { h } from "./dom.js";

const MAX_DEPTH = 6;
const MAX_LABEL = 1000; // characters of a link's text
const ESCAPED = /[!-/:-@[-`{-~]/;
const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "s"],
  ["*", "em"],
  ["_", "em"],
];
const ADDRESS = /(?:https?:\/\/|mailto:)[^\s<>"'`]+/y;
const WORD = /[\p{L}\p{N}]/u;

// Returns the nodes of a text.
export function inlineNodes(text, depth = 0) {
  const scan = new Scan(text, depth);
  while (scan.at < text.length) scan.step();
  return scan.end();
}

class Scan {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.nodes = [];
    this.plain = "";
    this.missing = new Set(); // marks without an end in the rest
    this.middle = -1; // of the next link
  }

  end() {
    if (this.plain) this.nodes.push(document.createTextNode(this.plain));
    this.plain = "";
    return this.nodes;
  }

  add(node, at) {
    this.end();
    this.nodes.push(node);
    this.at = at;
  }

  step() {
    const { text, at } = this;
    const char = text[at];
    if (char === "\\" && ESCAPED.test(text[at + 1] ?? "")) {
      this.plain += text[at + 1];
      this.at += 2;
      return;
    }
    const isDone =
      (char === "`" && this.code()) ||
      ((char === "[" || (char === "!" && text[at + 1] === "[")) && this.link()) ||
      ((char === "*" || char === "_" || char === "~") && this.emphasis()) ||
      ((char === "h" || char === "m" || char === "<") && this.address());
    if (!isDone) {
      this.plain += char;
      this.at += 1;
    }
  }

  code() {
    const { text, at } = this;
    let length = 1;
    while (text[at + length] === "`") length += 1;
    const mark = "`".repeat(length);
    let close = this.missing.has(mark) ? -1 : text.indexOf(mark, at + length);
    while (close >= 0 && text[close + length] === "`") {
      let next = close + length;
      while (text[next] === "`") next += 1;
      close = text.indexOf(mark, next);
    }
    if (close < 0) {
      this.missing.add(mark);
      this.plain += mark;
      this.at += length;
      return true;
    }
    const inner = text.slice(at + length, close).replaceAll("\n", " ");
    const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
    this.add(h("code", {}, isPadded ? inner.slice(1, -1) : inner), close + length);
    return true;
  }

  emphasis() {
    if (this.depth >= MAX_DEPTH) return false;
    const { text, at } = this;
    const found = MARKS.find(([mark]) => text.startsWith(mark, at));
    if (!found) return false;
    const [mark, tag] = found;
    const start = at + mark.length;
    const opens =
      /\S/.test(text[start] ?? "") && !(mark[0] === "_" && WORD.test(text[at - 1] ?? ""));
    if (!opens || this.missing.has(mark)) return false;
    const close = this.closing(mark, start);
    if (close < 0) {
      this.missing.add(mark);
      return false;
    }
    this.add(
      h(tag, {}, ...inlineNodes(text.slice(start, close), this.depth + 1)),
      close + mark.length,
    );
    return true;
  }

  closing(mark, start) {
    const { text } = this;
    let close = text.indexOf(mark, start + 1);
    while (close >= 0) {
      const after = text[close + mark.length] ?? "";
      const isLonger = mark.length === 1 && (after === mark || text[close - 1] === mark);
      const isWithin = mark[0] === "_" && WORD.test(after);
      if (!isLonger && !isWithin && /\S/.test(text[close - 1])) return close;
      close = text.indexOf(mark, close + (isLonger ? 2 : 1));
    }
    return -1;
  }

  link() {
    if (this.depth >= MAX_DEPTH || this.missing.has("](")) return false;
    const { text, at } = this;
    const start = text[at] === "!" ? at + 2 : at + 1;
    if (this.middle < start) this.middle = text.indexOf("](", start);
    const { middle } = this;
    const close = middle < 0 ? -1 : text.indexOf(")", middle);
    if (close < 0) {
      this.missing.add("](");
      return false;
    }
    // Of brackets within brackets the inner ones are the link.
    if (
      text.slice(start, Math.min(middle, start + MAX_LABEL)).includes("[") ||
      middle - start > MAX_LABEL
    )
      return false;
    const address = text
      .slice(middle + 2, close)
      .trim()
      .split(/\s/)[0];
    const href = safeAddress(address.replace(/^<|>$/g, ""));
    if (!href) return false;
    // An image is a link too: showing it would tell its server of the reader.
    const label = inlineNodes(text.slice(start, middle), MAX_DEPTH);
    this.add(anchor(href, label.length ? label : [address]), close + 1);
    return true;
  }

  address() {
    const { text, at } = this;
    const isQuoted = text[at] === "<";
    if (!isQuoted && WORD.test(text[at - 1] ?? "")) return false;
    ADDRESS.lastIndex = isQuoted ? at + 1 : at;
    const match = ADDRESS.exec(text);
    if (!match) return false;
    const found = isQuoted ? match[0] : match[0].replace(/[.,;:!?)\]*_~]+$/, "");
    const href = safeAddress(found);
    const end = at + found.length + (isQuoted ? 2 : 0);
    if (!href || (isQuoted && text[end - 1] !== ">")) return false;
    this.add(anchor(href, [found]), end);
    return true;
  }
}

function anchor(href, label) {
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...label);
}

// Returns an address that is safe to follow; null for scripts, files and relative ones.
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
