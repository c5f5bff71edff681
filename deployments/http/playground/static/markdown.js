// Blocks of Markdown as DOM nodes. A model's text never becomes HTML: nodes are made one by one,
// and tags in the text are shown as text. Work grows with the text's length, whatever it says.

import { copy, h, icon } from "./dom.js";
import { inlineNodes } from "./inline.js";

const MAX_DEPTH = 8; // of quotes and lists within one another
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const DIVIDER = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;

// Shows a text in an element. Called again with a longer text, it keeps the nodes of blocks that
// are as before, so that a stream costs little and a selection stays.
export function showMarkdown(element, text) {
  const blocks = blocksOf(text.split(/\r?\n/));
  const shown = element.markdownBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && shown[same] === blocks[same].raw) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map((block) => blockNode(block, 0)));
  element.markdownBlocks = blocks.map((block) => block.raw);
}

// Returns the blocks of some lines: {kind, raw, lines, ...}; `raw` has all that a block is made of.
export function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = blockAt(lines, at);
    block.raw = `${block.kind}\n${lines.slice(at, block.end).join("\n")}`;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].trimEnd().replace(/[ \t]#+$/, "");
    return { kind: "heading", level: heading[1].length, text, end: at + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) return quoteBlock(lines, at);
  if (ITEM.test(line)) return listBlock(lines, at);
  if (isTable(lines, at)) return tableBlock(lines, at);
  return paragraph(lines, at);
}

function codeBlock(lines, at, [, marks, language]) {
  let end = at + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= marks.length && text === marks[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return {
    kind: "code",
    language: language.trim().split(/\s/)[0],
    text,
    end: Math.min(end + 1, lines.length),
  };
}

function quoteBlock(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { kind: "quote", lines: inner, end };
}

function widthOf(line) {
  return /^[ \t]*/.exec(line)[0].replaceAll("\t", "    ").length;
}

function listBlock(lines, at) {
  const indent = widthOf(lines[at]);
  const isOrdered = /^\s*\d/.test(lines[at]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1];
      const goesOn =
        next?.trim() && (widthOf(next) > indent || (ITEM.test(next) && widthOf(next) === indent));
      if (!goesOn) break;
      items.at(-1).push("");
    } else if (widthOf(line) <= indent + 1 && ITEM.test(line)) {
      if (/^\s*\d/.test(line) !== isOrdered) break;
      items.push([line.replace(ITEM, "")]);
    } else if (widthOf(line) > indent) {
      items.at(-1).push(dedented(line, indent + 2));
    } else if (lines[end - 1].trim() && !startsBlock(lines, end)) {
      items.at(-1).push(line.trim()); // goes on with the item's paragraph
    } else break;
    end += 1;
  }
  const first = isOrdered ? parseInt(lines[at].trim(), 10) : null;
  return { kind: "list", first, items, end };
}

function dedented(line, width) {
  let text = line.replaceAll("\t", "    ");
  const have = text.length - text.trimStart().length;
  return text.slice(Math.min(have, width));
}

function isTable(lines, at) {
  const next = lines[at + 1];
  return (
    lines[at].includes("|") &&
    next !== undefined &&
    next.includes("-") &&
    DIVIDER.test(next.trim()) &&
    cellsOf(next).length === cellsOf(lines[at]).length
  );
}

function tableBlock(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end += 1;
  return {
    kind: "table",
    head: cellsOf(lines[at]),
    rows: lines.slice(at + 2, end).map(cellsOf),
    end,
  };
}

function cellsOf(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function startsBlock(lines, at) {
  const line = lines[at];
  return (
    [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line)) || isTable(lines, at)
  );
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end += 1;
  return { kind: "text", text: lines.slice(at, end).join("\n").trim(), end };
}

function blockNode(block, depth) {
  switch (block.kind) {
    case "heading":
      return h(`h${Math.min(block.level + 2, 6)}`, {}, ...inlineNodes(block.text));
    case "rule":
      return h("hr");
    case "code":
      return codeNode(block);
    case "quote":
      return h("blockquote", {}, ...innerNodes(block.lines, depth));
    case "list":
      return listNode(block, depth);
    case "table":
      return tableNode(block);
    default:
      return h("p", {}, ...inlineNodes(block.text));
  }
}

function innerNodes(lines, depth) {
  if (depth >= MAX_DEPTH) return [h("p", {}, lines.join("\n"))];
  return blocksOf(lines).map((block) => blockNode(block, depth + 1));
}

function listNode(block, depth) {
  const items = block.items.map((lines) => {
    const nodes = innerNodes(lines, depth);
    // A tight item: its text is not a paragraph of its own.
    if (nodes[0]?.tagName === "P")
      nodes.splice(0, 1, h("span", { class: "item" }, ...nodes[0].childNodes));
    return h("li", {}, ...nodes);
  });
  if (block.first === null) return h("ul", {}, ...items);
  return h("ol", { start: block.first === 1 ? null : block.first }, ...items);
}

function codeNode(block) {
  const code = h("code", {}, block.text);
  const button = h(
    "button",
    { type: "button", class: "quiet small", title: "Copy the code" },
    icon("copy"),
  );
  button.append(h("span", { class: "sr-only" }, "Copy the code"));
  button.addEventListener("click", () => copy(block.text, button));
  const label = block.language || "text";
  return h(
    "figure",
    { class: "code-block" },
    h("figcaption", {}, h("span", {}, label), button),
    h("pre", { tabindex: "0", "aria-label": `Code: ${label}`, role: "region" }, code),
  );
}

function tableNode(block) {
  const row = (tag, cells) =>
    h("tr", {}, ...block.head.map((_, at) => h(tag, {}, ...inlineNodes(cells[at] ?? ""))));
  return h(
    "div",
    { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, row("th", block.head)),
      h("tbody", {}, ...block.rows.map((cells) => row("td", cells))),
    ),
  );
}
