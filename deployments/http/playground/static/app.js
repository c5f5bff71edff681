// Puts the page together: views, panes, settings, dialogs, keyboard.

import { ApiError, apiKey, BASE, listModels, urlOf, useKey } from "./api.js";
import { announce, byId, copy, stored } from "./dom.js";
import { EngineView } from "./engine_view.js";
import { Pane } from "./pane.js";
import { SettingError, Settings } from "./settings.js";
import { asCurl, asPython } from "./snippets.js";

const UNAUTHORIZED = 401;
const RETRY_MS = 3000;
const KEY_TEXT =
  "It is kept in this browser tab until the tab is closed, and sent to this server only.";
const EXAMPLE = "What is the capital of France?";
const chats = stored("sessionStorage", `remora.chats ${BASE.pathname}`);

const settings = new Settings(byId("settings"));
const engine = new EngineView(byId("engine"));
const prompt = byId("prompt");
const panes = [];
let models = [];
let codePane = null;

function newPane(name) {
  const pane = new Pane(name, settings, { onchange, onfail: showFailure, oncode: showCode });
  panes.push(pane);
  byId("panes").append(pane.element);
  pane.offer(models, models[panes.length - 1]?.id ?? models[0]?.id);
  return pane;
}

function onchange() {
  const isBusy = panes.some((pane) => pane.isBusy);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (!isBusy) chats.write(panes.map((pane) => ({ model: pane.model, turns: pane.turns })));
}

// -- models and the key ---------------------------------------------------------------------------

async function loadModels() {
  try {
    models = await listModels();
    for (const pane of panes) pane.offer(models, models[0]?.id);
    notice("");
  } catch (error) {
    showFailure(error);
    if (error.status === 0 || error.status >= 500) setTimeout(loadModels, RETRY_MS);
  }
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function showFailure(error) {
  if (error instanceof ApiError && error.status === UNAUTHORIZED) {
    askForKey(apiKey() ? "The server does not know this key." : "This server needs an API key.");
  } else if (error instanceof SettingError) {
    showSettings(true);
    error.field.focus();
    announce(error.message);
  } else if (!panes.some((pane) => pane.turns.at(-1)?.error === error.message)) {
    notice(error.message);
  }
}

function askForKey(reason) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key-text").textContent = `${reason ? `${reason} ` : ""}${KEY_TEXT}`;
  byId("key").value = apiKey();
  dialog.returnValue = "";
  dialog.showModal();
  byId("key").focus();
}

// Not a button that submits: Enter in the field would press the first of those.
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-dialog").addEventListener("close", ({ target }) => {
  if (target.returnValue !== "save") return;
  useKey(byId("key").value);
  loadModels();
});

// -- views ----------------------------------------------------------------------------------------

function openView(name) {
  for (const view of ["chat", "engine"]) {
    const isOpen = view === name;
    byId(view).hidden = !isOpen;
    byId(`tab-${view}`).setAttribute("aria-selected", String(isOpen));
    byId(`tab-${view}`).tabIndex = isOpen ? 0 : -1;
  }
  document.body.dataset.view = name;
  if (name === "engine") engine.start();
}

for (const tab of document.querySelectorAll("[role=tab]")) {
  const name = tab.getAttribute("aria-controls");
  tab.addEventListener("click", () => openView(name));
  tab.addEventListener("keydown", ({ key }) => {
    if (key !== "ArrowLeft" && key !== "ArrowRight") return;
    const other = name === "chat" ? "engine" : "chat";
    openView(other);
    byId(`tab-${other}`).focus();
  });
}

const isNarrow = matchMedia("(max-width: 60rem)");

function showSettings(isShown) {
  byId("settings").hidden = !isShown;
  byId("open-settings").setAttribute("aria-expanded", String(isShown));
  document.body.classList.toggle("with-settings", isShown);
  if (isShown && isNarrow.matches) byId("close-settings").focus();
}

byId("open-settings").addEventListener("click", () => showSettings(byId("settings").hidden));
byId("close-settings").addEventListener("click", () => {
  showSettings(false);
  byId("open-settings").focus();
});

// -- comparing ------------------------------------------------------------------------------------

function compare(isOn) {
  byId("compare").setAttribute("aria-pressed", String(isOn));
  if (isOn && panes.length === 1) {
    newPane("Second model").load(panes[0].turns);
  } else if (!isOn && panes.length > 1) {
    const pane = panes.pop();
    pane.stop();
    pane.element.remove();
  }
  document.body.classList.toggle("comparing", isOn);
  onchange();
}

byId("compare").addEventListener("click", () => compare(panes.length === 1));

// -- asking ---------------------------------------------------------------------------------------

function fit() {
  prompt.style.height = ""; // by script: the policy forbids style attributes
  if (prompt.value)
    prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function stopAll() {
  for (const pane of panes) pane.stop();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value;
  if (!text.trim() || panes.some((pane) => pane.isBusy)) return;
  prompt.value = "";
  fit();
  for (const pane of panes) pane.send(text);
});
byId("stop").addEventListener("click", () => {
  stopAll();
  prompt.focus();
});
byId("new-chat").addEventListener("click", newChat);
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !prompt.value && panes.length === 1) {
    event.preventDefault();
    panes[0].editLast();
  }
});

function newChat() {
  stopAll();
  for (const pane of panes) pane.load([]);
  onchange();
  openView("chat");
  prompt.focus();
}

// -- code -----------------------------------------------------------------------------------------

function showCode(pane) {
  codePane = pane;
  if (writeCode()) byId("code-dialog").showModal();
}

function writeCode() {
  const isPython = byId("code-python").getAttribute("aria-pressed") === "true";
  // The request behind the last answer, or the next one's.
  const at = codePane.turns.findLastIndex((turn) => turn.role !== "assistant");
  const question = { role: "user", text: prompt.value || EXAMPLE };
  const turns =
    at < 0 || prompt.value ? [...codePane.turns, question] : codePane.turns.slice(0, at + 1);
  try {
    const body = codePane.body(turns);
    const hasKey = Boolean(apiKey());
    byId("code-text").textContent = isPython
      ? asPython(urlOf("v1").href, body, hasKey)
      : asCurl(urlOf("v1/chat/completions").href, body, hasKey);
    return true;
  } catch (error) {
    showFailure(error);
    return false;
  }
}

for (const [id, other] of [
  ["code-curl", "code-python"],
  ["code-python", "code-curl"],
]) {
  byId(id).addEventListener("click", () => {
    byId(id).setAttribute("aria-pressed", "true");
    byId(other).setAttribute("aria-pressed", "false");
    writeCode();
  });
}
byId("code-copy").addEventListener("click", ({ currentTarget }) =>
  copy(byId("code-text").textContent, currentTarget),
);

// -- theme, help and keyboard ---------------------------------------------------------------------

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showTheme() {
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}

byId("theme").addEventListener("click", () => {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem("remora.theme", chosen);
  } catch {
    // The choice lasts as long as the page.
  }
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
byId("open-key").addEventListener("click", () => askForKey(""));
byId("open-help").addEventListener("click", () => byId("help-dialog").showModal());

const WITH_ALT = {
  KeyN: newChat,
  KeyR: () => panes.forEach((pane) => pane.retry()),
  KeyC: () => compare(panes.length === 1),
  KeyS: () => showSettings(byId("settings").hidden),
  KeyE: () => openView(byId("chat").hidden ? "chat" : "engine"),
};

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const run = event.altKey && !event.ctrlKey && !event.metaKey && WITH_ALT[event.code];
  if (run) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape") {
    if (panes.some((pane) => pane.isBusy)) stopAll();
    else if (isNarrow.matches && !byId("settings").hidden) byId("close-settings").click();
  } else if (event.key === "/" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    byId("help-dialog").showModal();
  }
});

// -- start ----------------------------------------------------------------------------------------

newPane("Model");
const earlier = chats.read([]);
const wanted = earlier.map(({ model }) => model);
panes[0].load(earlier[0]?.turns ?? []);
if (earlier.length > 1) {
  compare(true);
  panes[1].load(earlier[1].turns);
}
showTheme();
if (!isNarrow.matches) showSettings(true);
loadModels().then(() => {
  panes.forEach((pane, at) => pane.choose(wanted[at]));
  document.body.dataset.ready = "true";
});
openView("chat");
prompt.focus();
