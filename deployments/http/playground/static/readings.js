// From samples of /metrics to the numbers that the engine's page shows. Pure.
//
// Rates are differences between two readings. Series of different replicas are compared one by one,
// so that a replica that starts or ends does not show as a jump.

const GAUGES = {
  running: "remora_num_running",
  waiting: "remora_num_waiting",
  pages: "remora_num_pages",
  held: "remora_num_held_pages",
  cachedPages: "remora_num_cached_pages",
};
const COUNTERS = {
  prompt: "remora_prompt_tokens_total",
  cached: "remora_cached_tokens_total",
  generated: "remora_generated_tokens_total",
  steps: "remora_steps_total",
  stepSeconds: "remora_step_time_seconds_total",
  preemptions: "remora_preemptions_total",
  ttftSeconds: "remora_time_to_first_token_seconds_sum",
  ttftCount: "remora_time_to_first_token_seconds_count",
  gapSeconds: "remora_inter_token_latency_seconds_sum",
  gapCount: "remora_inter_token_latency_seconds_count",
};
const HELD = "remora_gateway_held_requests";

export const WANTED = new Set([...Object.values(GAUGES), ...Object.values(COUNTERS), HELD]);

// Returns the names of the models in a reading.
export function modelsOf(samples) {
  const found = (samples.get(GAUGES.running) ?? []).map(({ labels }) => labels.model_name);
  return [...new Set(found)].sort();
}

// Returns one point of the charts, from this reading and the one before it.
// seconds: between the two; model: "" = all. Values that are not known are null.
export function pointOf(before, now, seconds, model) {
  const of = (samples, name) =>
    (samples?.get(name) ?? []).filter(({ labels }) => !model || labels.model_name === model);
  const gauge = (name) => sum(of(now, name));
  const grown = Object.fromEntries(
    Object.entries(COUNTERS).map(([key, name]) => [
      key,
      before ? growth(of(before, name), of(now, name)) : null,
    ]),
  );
  const pages = gauge(GAUGES.pages);
  const share = (part) => (pages > 0 ? (100 * part) / pages : null);
  return {
    running: gauge(GAUGES.running),
    waiting: gauge(GAUGES.waiting),
    held: gauge(HELD),
    kvHeld: share(gauge(GAUGES.held)),
    kvCached: share(gauge(GAUGES.cachedPages)),
    pages,
    outputRate: rate(grown.generated, seconds),
    promptRate: rate(grown.prompt, seconds),
    hitRate: quotient(grown.cached, grown.prompt, 100),
    stepMs: quotient(grown.stepSeconds, grown.steps, 1000),
    ttftMs: quotient(grown.ttftSeconds, grown.ttftCount, 1000),
    gapMs: quotient(grown.gapSeconds, grown.gapCount, 1000),
    preemptions: grown.preemptions,
  };
}

// Returns the rows of the table of replicas: [{replica, model, running, waiting, kv}].
export function replicasOf(samples) {
  const rows = new Map();
  const fill = (name, key) => {
    for (const { labels, value } of samples.get(name) ?? []) {
      const id = `${labels.model_name} ${labels.replica ?? ""}`;
      if (!rows.has(id)) rows.set(id, { replica: labels.replica ?? "", model: labels.model_name });
      rows.get(id)[key] = value;
    }
  };
  for (const [key, name] of Object.entries(GAUGES)) fill(name, key);
  fill(COUNTERS.generated, "generated");
  return [...rows.values()].map((row) => ({
    ...row,
    kv: row.pages ? (100 * row.held) / row.pages : null,
  }));
}

// Returns whether a counter has fallen: another replica has answered, or this one has restarted.
export function hasFallen(before, now) {
  const name = COUNTERS.steps;
  return [...pairs(before?.get(name) ?? [], now.get(name) ?? [])].some(
    ([old, value]) => value < old,
  );
}

function sum(samples) {
  return samples.reduce((total, { value }) => total + value, 0);
}

function* pairs(before, now) {
  const key = (labels) => JSON.stringify(Object.entries(labels).sort());
  const old = new Map(before.map(({ labels, value }) => [key(labels), value]));
  for (const { labels, value } of now) {
    const known = old.get(key(labels));
    if (known !== undefined) yield [known, value];
  }
}

function growth(before, now) {
  let total = 0;
  for (const [old, value] of pairs(before, now)) total += Math.max(0, value - old);
  return total;
}

function rate(amount, seconds) {
  return amount === null || seconds <= 0 ? null : amount / seconds;
}

function quotient(part, whole, factor) {
  return part === null || !whole ? null : (factor * part) / whole;
}
