// The server: its address, the API key, and its errors. Paths are relative to the page, so the page
// works below any root path.

import { stored } from "./dom.js";

export const BASE = new URL("./", document.baseURI);
const saved = stored("sessionStorage", `remora.key ${BASE.pathname}`);
let key = saved.read("");

// An answer that is not 2xx; `status` is 0 if there was none.
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function apiKey() {
  return key;
}

export function useKey(value) {
  key = value.trim();
  saved.write(key || null);
}

export function urlOf(path) {
  return new URL(path, BASE);
}

// Sends a request and returns its response. Throws ApiError with the server's own sentence.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  if (options.json !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(urlOf(path), {
      method: options.json === undefined ? "GET" : "POST",
      headers,
      body: options.json === undefined ? undefined : JSON.stringify(options.json),
      signal: options.signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch {
    return text.slice(0, 300) || `The server answered ${response.status}.`;
  }
}

// Returns the models and adapters that are served, as [{id, parent, max_model_len}].
export async function listModels() {
  const list = await (await ask("v1/models")).json();
  return list.data;
}

// Returns the Prometheus text.
export async function readMetrics(signal) {
  return (await ask("metrics", { signal })).text();
}

// Returns the autoscaling policy's last decision; of several models, one for each.
export async function readAutoscaling() {
  return (await ask("autoscaling/explain")).json();
}
