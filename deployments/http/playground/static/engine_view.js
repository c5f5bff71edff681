// The engine, live: charts of /metrics, the replicas, and the autoscaling policy's reasons.
// Reads from when it is first shown, while the tab is visible.

import { ApiError, readAutoscaling, readMetrics } from "./api.js";
import { Chart } from "./chart.js";
import { h } from "./dom.js";
import { parseMetrics } from "./prometheus.js";
import { hasFallen, modelsOf, pointOf, replicasOf, WANTED } from "./readings.js";

const SPAN = 120; // points
const PERIOD_MS = 1000;
const PATIENCE = 10; // a reading that takes long makes the period this many times as long
const SCALING_PERIOD_MS = 4000;

const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const percent = (value) => `${value.toFixed(0)} %`;
const milliseconds = (value) =>
  value < 1000 ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : `${(value / 1000).toFixed(2)} s`;

const CHARTS = [
  {
    title: "Requests",
    hint: "Sequences in the engine",
    lines: [
      { key: "running", label: "running", format: count },
      { key: "waiting", label: "waiting", format: count },
    ],
  },
  {
    title: "Output",
    hint: "Tokens a second",
    lines: [{ key: "outputRate", label: "tokens/s", format: count }],
  },
  {
    title: "KV cache",
    hint: "Share of the pages",
    top: 100,
    lines: [
      { key: "kvHeld", label: "in use", format: percent },
      { key: "kvCached", label: "prefix cache", format: percent },
    ],
  },
  {
    title: "Cache hits",
    isSparse: true,
    hint: "Share of prompt tokens found in the prefix cache",
    top: 100,
    lines: [{ key: "hitRate", label: "of prompt tokens", format: percent }],
  },
  {
    title: "Step time",
    isSparse: true,
    hint: "Mean of the engine's steps",
    lines: [{ key: "stepMs", label: "a step", format: milliseconds }],
  },
  {
    title: "Latency",
    isSparse: true,
    hint: "Means of the requests since the last reading",
    lines: [
      { key: "ttftMs", label: "first token", format: milliseconds },
      { key: "gapMs", label: "between tokens", format: milliseconds },
    ],
  },
];

export class EngineView {
  constructor(element) {
    this.charts = CHARTS.map((chart) => new Chart({ ...chart, span: SPAN }));
    this.model = h("select", { id: "engine-model" }, h("option", { value: "" }, "All models"));
    this.model.addEventListener("change", () => this.redraw());
    this.modelField = h(
      "div",
      { class: "engine-model", hidden: true },
      h("label", { for: "engine-model" }, "Model"),
      this.model,
    );
    this.message = h("p", { class: "notice", hidden: true });
    this.replicas = h("div", { class: "card wide" });
    this.scaling = h("div", { class: "card wide scaling", hidden: true });
    element.append(
      h("div", { class: "engine-head" }, h("h2", {}, "Engine"), this.modelField),
      this.message,
      h(
        "div",
        { class: "cards" },
        ...this.charts.map((chart) => chart.element),
        this.replicas,
        this.scaling,
      ),
    );
    this.readings = []; // {at, samples}
    this.isOn = false;
    this.numFalls = 0;
    this.scalingAt = 0;
    document.addEventListener("visibilitychange", () => this.next(0));
  }

  start() {
    if (!this.isOn) {
      this.isOn = true;
      this.next(0);
    }
  }

  next(delay) {
    clearTimeout(this.timer);
    this.reading?.abort();
    if (this.isOn && !document.hidden) this.timer = setTimeout(() => this.read(), delay);
  }

  async read() {
    const begun = performance.now();
    this.reading = new AbortController();
    try {
      const text = await readMetrics(this.reading.signal);
      this.take(parseMetrics(text, WANTED));
      this.say("");
    } catch (error) {
      if (error.name === "AbortError") return;
      this.say(error.message);
    }
    const took = performance.now() - begun;
    this.next(Math.max(PERIOD_MS - took, took * PATIENCE));
    if (begun - this.scalingAt >= SCALING_PERIOD_MS) {
      this.scalingAt = begun;
      await this.readScaling();
    }
  }

  say(text) {
    const falls =
      this.numFalls > 1
        ? "Several replicas share this address, and each reading is of one of them. " +
          "With routing.gateway: on, all are shown."
        : "";
    this.message.textContent = text || falls;
    this.message.hidden = !this.message.textContent;
  }

  take(samples) {
    this.numFalls += hasFallen(this.readings.at(-1)?.samples, samples);
    this.readings.push({ at: performance.now(), samples });
    this.readings.splice(0, this.readings.length - SPAN - 1);
    this.offerModels(modelsOf(samples));
    this.redraw();
    this.replicas.replaceChildren(...replicaNodes(replicasOf(samples)));
  }

  offerModels(models) {
    this.modelField.hidden = models.length < 2;
    const names = models.join("\n");
    if (names === this.modelNames) return;
    this.modelNames = names;
    const { value } = this.model;
    this.model.replaceChildren(
      h("option", { value: "" }, "All models"),
      ...models.map((name) => h("option", { value: name }, name)),
    );
    this.model.value = models.includes(value) ? value : "";
  }

  redraw() {
    const points = this.readings.slice(1).map(({ at, samples }, index) => {
      const before = this.readings[index];
      return { at, ...pointOf(before.samples, samples, (at - before.at) / 1000, this.model.value) };
    });
    if (!points.length && this.readings.length) {
      const [{ at, samples }] = this.readings;
      points.push({ at, ...pointOf(null, samples, 0, this.model.value) });
    }
    for (const chart of this.charts) chart.draw(points);
  }

  async readScaling() {
    try {
      const record = await readAutoscaling();
      const records = record.replicas ? { "": record } : record;
      this.scaling.hidden = false;
      this.scaling.replaceChildren(
        h("h3", { class: "card-title" }, "Autoscaling"),
        ...Object.entries(records).flatMap(([model, found]) => scalingNodes(model, found)),
      );
    } catch (error) {
      // 404: it is off; 401 and 403: not for this key. Neither changes soon.
      if (error instanceof ApiError && error.status >= 400 && error.status < 500)
        this.scalingAt = Infinity;
      this.scaling.hidden = error.status !== 503;
      this.scaling.replaceChildren(
        h("h3", { class: "card-title" }, "Autoscaling"),
        h("p", {}, error.message),
      );
    }
  }
}

function table(caption, head, rows) {
  return h(
    "div",
    { class: "table-wrap", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map((cell) => h("th", { scope: "col" }, cell)))),
      h(
        "tbody",
        {},
        ...rows.map((cells) => h("tr", {}, ...cells.map((cell) => h("td", {}, cell)))),
      ),
    ),
  );
}

function replicaNodes(rows) {
  const cells = rows.map((row) => [
    row.replica || "this one",
    row.model,
    count(row.running ?? 0),
    count(row.waiting ?? 0),
    row.kv === null ? "–" : percent(row.kv),
    count(row.generated ?? 0),
  ]);
  return [
    h("h3", { class: "card-title" }, "Replicas"),
    table(
      "Replicas",
      ["Replica", "Model", "Running", "Waiting", "KV in use", "Tokens so far"],
      cells,
    ),
  ];
}

function scalingNodes(model, record) {
  const title = model ? [h("h4", {}, model)] : [];
  if (!record) return [...title, h("p", {}, "No decision yet.")];
  const { replicas, pending } = record;
  const signals = (record.signals ?? []).map((signal) => [
    signal.signal,
    shown(signal.value),
    shown(signal.target),
    shown(signal.replicas),
    signal.note || "",
  ]);
  const changes = (record.history ?? [])
    .slice(-5)
    .reverse()
    .map((change) =>
      h("li", {}, `${clock(change.time)}: ${change.from} → ${change.to}, ${change.reason}`),
    );
  return [
    ...title,
    h(
      "p",
      { class: "scaling-line" },
      h("strong", {}, `${replicas.ready} ready`),
      ` of ${replicas.target}${replicas.starting ? `, ${replicas.starting} starting` : ""}; `,
      `${replicas.min} to ${replicas.max} allowed`,
    ),
    h(
      "p",
      {},
      `${record.reason}${record.winner ? ` (${record.winner})` : ""}`,
      pending
        ? `; ${pending.replicas} for ${shown(pending.since_s)} of ${shown(pending.delay_s)} s`
        : "",
      record.note ? `. ${record.note}` : "",
    ),
    signals.length
      ? table("Signals of autoscaling", ["Signal", "Value", "Target", "Replicas", ""], signals)
      : null,
    changes.length ? h("ul", { class: "changes" }, ...changes) : null,
  ].filter(Boolean);
}

function shown(value) {
  if (typeof value !== "number") return "–";
  return value.toLocaleString("en", { maximumFractionDigits: 2 });
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString();
}
