// Prometheus' text format. Pure.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([+-]?(?:[\d.][\d.eE+-]*|Inf)|NaN)(?: |$)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

// Returns name -> [{labels, value}] of the samples whose names are wanted.
export function parseMetrics(text, wanted) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const name = /^[\w:]+/.exec(line)?.[0];
    if (!wanted.has(name)) continue;
    const [, , labels = "", value] = SAMPLE.exec(line) ?? [];
    if (value === undefined) continue;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels: labelsOf(labels), value: numberOf(value) });
  }
  return found;
}

function labelsOf(text) {
  const unescaped = (value) => value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
  return Object.fromEntries(
    [...text.matchAll(LABEL)].map(([, name, value]) => [name, unescaped(value)]),
  );
}

function numberOf(text) {
  return { "+Inf": Infinity, "-Inf": -Infinity, NaN: NaN }[text] ?? Number(text);
}
