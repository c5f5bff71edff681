// A small line chart of the last minutes, in SVG: one or two lines, and the newest values in words.

import { h, s } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 72;

export class Chart {
  // title; lines: [{key, label, format}]; top: the largest value of the axis, null = of the data;
  // span: number of points across; isSparse: values are known now and then, and lines connect them
  constructor({ title, hint, lines, top = null, span, isSparse = false }) {
    this.title = title;
    this.lines = lines;
    this.top = top;
    this.isSparse = isSparse;
    this.span = span;
    this.points = [];
    this.paths = lines.map((_, at) => ({
      area: s("path", { class: `area line-${at}` }),
      line: s("path", { class: `line line-${at}`, "vector-effect": "non-scaling-stroke" }),
    }));
    this.cursor = s("line", {
      class: "cursor",
      y1: 0,
      y2: HEIGHT,
      "vector-effect": "non-scaling-stroke",
      visibility: "hidden",
    });
    this.svg = s(
      "svg",
      {
        class: "plot",
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": title,
      },
      s("line", {
        class: "axis",
        x1: 0,
        x2: WIDTH,
        y1: HEIGHT,
        y2: HEIGHT,
        "vector-effect": "non-scaling-stroke",
      }),
      ...this.paths.flatMap(({ area, line }) => [area, line]),
      this.cursor,
    );
    this.values = lines.map(({ label }, at) => ({
      value: h("span", { class: "value" }, "–"),
      label,
      at,
    }));
    this.when = h("span", { class: "when" }, "");
    this.element = h(
      "figure",
      { class: "card chart" },
      h("figcaption", {}, h("span", { class: "card-title", title: hint }, title), this.when),
      h(
        "div",
        { class: "values" },
        ...this.values.map(({ value, label, at }) =>
          h(
            "span",
            { class: `reading line-${at}` },
            value,
            label ? h("span", { class: "label" }, label) : null,
          ),
        ),
      ),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  // Draws points, the newest last; each has `at` in milliseconds.
  draw(points) {
    this.points = points;
    const all = points
      .flatMap((point) => this.lines.map(({ key }) => point[key]))
      .filter((value) => value !== null);
    const top = this.top ?? niceTop(Math.max(0, ...all));
    this.lines.forEach(({ key }, at) => {
      const runs = runsOf(
        points.map((point) => point[key]),
        this.isSparse,
      );
      const place = ([index, value]) =>
        `${this.x(index).toFixed(1)} ${heightOf(value / top).toFixed(1)}`;
      const lines = runs.map(
        (run) => `M${run.map(place).join("L")}${run.length === 1 ? "h0.01" : ""}`,
      );
      this.paths[at].line.setAttribute("d", lines.join(""));
      this.paths[at].area.setAttribute(
        "d",
        runs
          .map(
            (run) =>
              `M${this.x(run[0][0])} ${HEIGHT}L${run.map(place).join("L")}` +
              `L${this.x(run.at(-1)[0])} ${HEIGHT}Z`,
          )
          .join(""),
      );
    });
    if (this.cursor.getAttribute("visibility") === "hidden") this.showNewest();
  }

  // Shows the newest values that are known.
  showNewest() {
    const known = ({ key }) => [
      key,
      (this.isSparse ? this.points.findLast((point) => point[key] !== null) : this.points.at(-1))?.[
        key
      ] ?? null,
    ];
    this.show(Object.fromEntries(this.lines.map(known)));
  }

  x(index) {
    return WIDTH - ((this.points.length - 1 - index) * WIDTH) / (this.span - 1);
  }

  show(point) {
    const texts = this.lines.map(({ key, format }) =>
      point[key] === null ? "–" : format(point[key]),
    );
    texts.forEach((text, at) => (this.values[at].value.textContent = text));
    const words = this.lines.map(({ label }, at) => `${label ? `${label} ` : ""}${texts[at]}`);
    this.svg.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
  }

  point(event) {
    if (event === null || !this.points.length) {
      this.cursor.setAttribute("visibility", "hidden");
      this.when.textContent = "";
      this.showNewest();
      return;
    }
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    const back = Math.round((1 - share) * (this.span - 1));
    const index = Math.max(0, this.points.length - 1 - back);
    this.cursor.setAttribute("x1", this.x(index));
    this.cursor.setAttribute("x2", this.x(index));
    this.cursor.setAttribute("visibility", "visible");
    const age = (this.points.at(-1).at - this.points[index].at) / 1000;
    this.when.textContent = age < 0.5 ? "now" : `${age.toFixed(0)} s ago`;
    this.show(this.points[index]);
  }
}

// Returns the y of a share of the axis; there is room for the line's width above.
function heightOf(share) {
  return HEIGHT - (HEIGHT - 4) * Math.min(1, share);
}

// Returns runs of [index, value] without gaps, or across them.
function runsOf(values, crossesGaps) {
  const runs = [];
  values.forEach((value, index) => {
    if (value === null) return;
    if (runs.length && (crossesGaps || values[index - 1] !== null))
      runs.at(-1).push([index, value]);
    else runs.push([[index, value]]);
  });
  return runs;
}

// Returns a round number that is not less, so that the axis does not move with every point.
export function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}
