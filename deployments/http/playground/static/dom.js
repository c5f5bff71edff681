// Makes and finds elements. Text enters the page as text nodes only, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Returns an element. Attributes: null and false are left out, true is "", and functions named
// onclick, oninput and so on become listeners.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// Returns an SVG element; attributes as for h.
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function icon(name) {
  return s("svg", { class: "icon", "aria-hidden": "true" }, s("use", { href: `#icon-${name}` }));
}

// Returns a button with an icon whose name is read aloud and shown on hover.
export function iconButton(name, label, onclick, attributes = {}) {
  const text = h("span", { class: "sr-only" }, label);
  return h(
    "button",
    { type: "button", class: "quiet small", title: label, onclick, ...attributes },
    icon(name),
    text,
  );
}

export function byId(id) {
  return document.getElementById(id);
}

let clearing = 0;

// Says a sentence to screen readers.
export function announce(text) {
  const status = byId("status");
  status.textContent = text;
  clearTimeout(clearing);
  clearing = setTimeout(() => (status.textContent = ""), 5000);
}

// Copies a text and says so on the button for a moment.
export async function copy(text, button) {
  let outcome = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    outcome = "Copying is blocked here: select the text instead";
  }
  announce(outcome);
  button.classList.toggle("done", outcome === "Copied");
  setTimeout(() => button.classList.remove("done"), 1200);
}

// Reads and writes a JSON value in localStorage or sessionStorage; storage may be blocked.
export function stored(storage, name) {
  return {
    read(otherwise) {
      try {
        return JSON.parse(window[storage].getItem(name)) ?? otherwise;
      } catch {
        return otherwise;
      }
    },
    write(value) {
      try {
        if (value === null) window[storage].removeItem(name);
        else window[storage].setItem(name, JSON.stringify(value));
      } catch {
        // The value lasts as long as the page.
      }
    },
  };
}
