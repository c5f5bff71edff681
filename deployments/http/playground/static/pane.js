// One conversation with one model: its turns, the answer that is streaming, and what can be done to
// both. Two of them side by side compare models.

import { addPart, answerTurn, messagesOf, openCalls, toolTurn, userTurn } from "./conversation.js";
import { announce, h, iconButton } from "./dom.js";
import { Stopwatch, streamChat } from "./stream.js";
import { AnswerView, questionView } from "./turn_view.js";

export class Pane {
  // settings: Settings; onchange(): turns or state have changed; oncode(pane), onfail(error)
  constructor(name, settings, { onchange, oncode, onfail }) {
    this.settings = settings;
    this.callbacks = { onchange, oncode, onfail };
    this.turns = [];
    this.views = [];
    this.abort = null;
    this.select = h("select", { "aria-label": name, class: "model" });
    this.log = h("div", {
      class: "log",
      tabindex: "0",
      role: "region",
      "aria-label": `Conversation, ${name}`,
    });
    this.empty = h(
      "div",
      { class: "empty" },
      h("p", { class: "empty-title" }, "What would you like to know?"),
      h(
        "p",
        {},
        "Settings hold the system prompt, sampling, tools and schemas. " +
          "Compare asks two models at once.",
      ),
    );
    this.log.append(this.empty);
    this.element = h(
      "section",
      { class: "pane", "aria-label": name },
      h(
        "div",
        { class: "pane-head" },
        this.select,
        iconButton("code", "Copy as curl or Python", () => oncode(this)),
      ),
      this.log,
    );
    this.isAtEnd = true;
    this.log.addEventListener("scroll", () => {
      this.isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    });
  }

  get isBusy() {
    return this.abort !== null;
  }

  get model() {
    return this.select.value;
  }

  // Offers models; adapters follow their base. The choice stays if it is still there.
  offer(models, preferred) {
    const wanted = this.select.value || preferred;
    const ids = new Set(models.map(({ id }) => id));
    // An adapter may be served without its base.
    const bases = models.filter(({ parent }) => !ids.has(parent));
    const option = (model) => h("option", { value: model.id }, model.id);
    // Of several models behind a gateway, the name of an adapter does not say whose it is.
    const full = (base) => (model) =>
      h("option", { value: bases.length > 1 ? `${base.id}:${model.id}` : model.id }, model.id);
    this.select.replaceChildren(
      ...bases.flatMap((base) => {
        const adapters = models.filter((model) => model.parent === base.id);
        if (!adapters.length) return [option(base)];
        return [
          option(base),
          h("optgroup", { label: `Adapters of ${base.id}` }, ...adapters.map(full(base))),
        ];
      }),
    );
    this.choose(wanted);
  }

  // Selects a model if it is offered.
  choose(name) {
    if ([...this.select.options].some(({ value }) => value === name)) this.select.value = name;
  }

  // Shows a conversation in place of this one.
  load(turns) {
    this.cut(0);
    for (const turn of turns) this.show(structuredClone(turn));
    this.views.at(-1)?.update?.({ isStreaming: false });
    this.offerResults();
  }

  // Returns the body of a request for the turns so far. Throws SettingError.
  body(turns = this.turns) {
    return {
      model: this.model,
      messages: messagesOf(turns, this.settings.system),
      stream: true,
      stream_options: { include_usage: true },
      ...this.settings.request(),
    };
  }

  send(text) {
    if (this.isBusy) return Promise.resolve();
    this.isAtEnd = true;
    this.show(userTurn(text));
    return this.answer();
  }

  stop() {
    this.abort?.abort();
  }

  // Answers the question before a turn again; without an index, the last one.
  retry(index = this.turns.length) {
    const at = this.turns.slice(0, index).findLastIndex((turn) => turn.role !== "assistant");
    if (this.isBusy || at < 0) return Promise.resolve();
    this.cut(at + 1);
    return this.answer();
  }

  edit(index, text) {
    const turn = this.turns[index];
    if (this.isBusy || turn === undefined) return;
    if (turn.role === "assistant") {
      Object.assign(turn, { text, tokens: [], reasoningTokens: [] });
      this.views[index].showsTokens = false;
      this.views[index].update({ isStreaming: false });
      this.callbacks.onchange();
    } else if (text.trim()) {
      this.cut(index);
      this.send(text);
    }
  }

  // Opens the editor of the last question.
  editLast() {
    const at = this.turns.findLastIndex((turn) => turn.role === "user");
    this.views[at]?.element.querySelector("[data-action=edit]")?.click();
  }

  cut(length) {
    const hadFocus = this.log.contains(document.activeElement);
    for (const view of this.views.splice(length)) view.element.remove();
    this.turns.splice(length);
    // The button that was pressed may be gone; the keyboard goes on from here.
    if (hadFocus && document.activeElement === document.body)
      this.log.focus({ preventScroll: true });
    this.empty.hidden = this.turns.length > 0;
  }

  show(turn) {
    const actions = {
      canEdit: () => !this.isBusy,
      edit: (text) => this.edit(this.turns.indexOf(turn), text),
      retry: () => this.retry(this.turns.indexOf(turn)),
      sendResults: (texts) => this.sendResults(turn, texts),
    };
    const view =
      turn.role === "assistant" ? new AnswerView(turn, actions) : questionView(turn, actions);
    view.update?.({ isStreaming: false });
    this.turns.push(turn);
    this.views.push(view);
    this.log.append(view.element);
    this.empty.hidden = true;
    this.follow();
    return view;
  }

  follow() {
    if (this.isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  async answer() {
    let body;
    try {
      body = this.body();
    } catch (error) {
      this.callbacks.onfail(error);
      return;
    }
    const turn = answerTurn(this.model);
    const view = this.show(turn);
    this.abort = new AbortController();
    this.callbacks.onchange();
    announce("The answer begins.");
    const watch = new Stopwatch(performance.now());
    const refresh = this.refresher(view);
    try {
      for await (const part of streamChat(body, this.abort.signal)) {
        if (addPart(turn, part)) watch.note(performance.now());
        refresh.soon();
      }
    } catch (error) {
      if (error.name === "AbortError") turn.isStopped = true;
      else this.fail(turn, error);
    }
    refresh.stop();
    this.abort = null;
    turn.stats = watch.result(turn.usage);
    view.update({ isStreaming: false });
    this.offerResults();
    this.follow();
    announce(
      turn.error
        ? `The answer failed: ${turn.error}`
        : `${turn.isStopped ? "Stopped" : "Finished"}: ${turn.text.slice(0, 600)}`,
    );
    this.callbacks.onchange();
  }

  fail(turn, error) {
    turn.error = error.message;
    this.callbacks.onfail(error);
  }

  // Updates a view at most once a frame, however fast tokens arrive.
  refresher(view) {
    let frame = 0;
    const update = () => {
      frame = 0;
      view.update({ isStreaming: true });
      this.follow();
    };
    update();
    return {
      soon: () => (frame ||= requestAnimationFrame(update)),
      stop: () => cancelAnimationFrame(frame),
    };
  }

  offerResults() {
    const last = this.turns.at(-1);
    if (last?.role === "assistant" && last.calls.length && openCalls(this.turns).length)
      this.views.at(-1).askForResults();
  }

  sendResults(turn, texts) {
    if (this.isBusy) return;
    this.cut(this.turns.indexOf(turn) + 1);
    turn.calls.forEach((call, at) => this.show(toolTurn(call, texts[at])));
    this.answer();
  }
}
