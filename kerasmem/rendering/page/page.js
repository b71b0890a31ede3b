"use strict";
// Draws the charts as SVG. Colours are the style sheet's, so another theme needs no drawing; text is set as text.
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["none", "7 4", "2 3", "8 3 2 3"];
  const LETTER = 6.6; // width of a letter in CSS pixels, about
  const FAR = 3; // a limit that is so many times the largest value stands at the edge, lest it press the rest flat

  function svg(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }

  function html(parent, name, className, text) {
    const made = document.createElement(name);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }

  const said = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

  // Round numbers from `low` to `high`, at most some `count` of them.
  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(1, count);
    const ten = 10 ** Math.floor(Math.log10(raw));
    const step = ten * [1, 2, 5, 10].find((factor) => factor * ten >= raw * 0.999);
    const found = [];
    for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(place * step || 0);
    return found;
  }

  // Where an axis ends, and where on it the limit stands; `beyond`: further than the axis goes.
  function reach(largest, limit) {
    if (!limit) return { end: 1.06 * largest || 1 };
    const beyond = limit.value > FAR * largest;
    const end = beyond ? 1.12 * largest || 1 : 1.06 * Math.max(largest, limit.value);
    return { end, beyond, at: beyond ? end : limit.value, label: limit.label + (beyond ? ", beyond this chart" : "") };
  }

  class View {
    constructor(chart) {
      this.chart = chart;
      this.place = document.getElementById(chart.name);
      this.hidden = new Set();
      this.zoom = null;
      this.tip = html(this.place.parentNode, "div", "tip");
      this.tip.hidden = true;
      this.legend();
      this.width = 0;
      new ResizeObserver(() => {
        if (this.place.clientWidth !== this.width) this.draw();
      }).observe(this.place);
      this.draw();
    }

    draw() {
      this.width = this.place.clientWidth;
      this.tip.hidden = true;
      this.canvas = document.createElementNS(SVG, "svg");
      (this.chart.kind === "time" ? drawTime : drawBars)(this);
      this.place.replaceChildren(this.canvas);
    }

    size(height) {
      const { width } = this;
      for (const [key, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, class: "drawing" })) {
        this.canvas.setAttribute(key, value);
      }
    }

    // A name for each line or series; a click hides it or shows it again.
    legend() {
      const { chart } = this;
      const shown = chart.kind === "time" ? chart.panels.flatMap((panel) => panel.lines) : chart.series;
      const shades = chart.kind === "time" ? [...new Set(chart.phases.map((span) => span[2]))] : [];
      if (shown.length + shades.length < 2) return;
      const box = html(this.place.parentNode, "div", "legend");
      for (const each of shown) {
        const button = html(box, "button", "name");
        button.type = "button";
        const swatch = html(button, "i", chart.kind === "time" ? "swatch line" : "swatch");
        swatch.style.color = `var(--${each.role})`;
        if (chart.kind === "time") swatch.style.borderTopStyle = ["solid", "dashed", "dotted"][each.dash] || "dashed";
        html(button, "span", "", each.label);
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          const now = this.hidden.has(each);
          this.hidden[now ? "delete" : "add"](each);
          button.setAttribute("aria-pressed", String(now));
          this.draw();
        });
      }
      for (const name of shades) {
        const label = html(box, "span", "name");
        html(label, "i", "swatch shade");
        html(label, "span", "", name);
      }
    }

    // Tell some rows of [role, name, value] beside the pointer.
    tell(event, head, rows) {
      this.tip.replaceChildren();
      html(this.tip, "b", "", head);
      for (const [role, name, value] of rows) {
        const row = html(this.tip, "div", "row");
        if (role) html(row, "i", "swatch").style.color = `var(--${role})`;
        html(row, "span", "", name);
        html(row, "span", "value", value);
      }
      this.tip.hidden = false;
      const around = this.place.parentNode.getBoundingClientRect();
      const own = this.tip.getBoundingClientRect();
      const right = event.clientX - around.left + 14;
      const left = right + own.width <= around.width ? right : Math.max(0, right - own.width - 28);
      this.tip.style.left = `${left}px`;
      this.tip.style.top = `${Math.max(0, event.clientY - around.top - own.height - 10)}px`;
    }
  }

  // ---------------------------------------------------------------- over time

  function drawTime(view) {
    const { chart, canvas, width } = view;
    const lines = chart.panels.flatMap((panel) => panel.lines);
    const ends = lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
    let [from, to] = view.zoom || [Math.min(...ends), Math.max(...ends)];
    if (!(to > from)) [from, to] = [from - 0.5, from + 0.5];
    const box = { left: 44, right: width - 10, top: 36 };
    const x = (seconds) => box.left + ((seconds - from) / (to - from)) * (box.right - box.left);
    let bottom = 0;
    let top = box.top;
    chart.panels.forEach((panel, place) => {
      const height = place ? 110 : chart.panels.length > 1 ? 230 : 260;
      bottom = top + height;
      drawPanel(view, panel, { ...box, top, bottom, from, to, x });
      top = bottom + 40;
    });
    for (const at of ticks(from, to, width / 90)) {
      svg(canvas, "text", { x: x(at), y: bottom + 16, class: "tick", "text-anchor": "middle" }, said(at));
    }
    svg(canvas, "text", { x: (box.left + box.right) / 2, y: bottom + 32, class: "tick", "text-anchor": "middle" }, "seconds");
    view.size(bottom + 38);
    epochs(view, { ...box, bottom, from, to, x });
    pointer(view, lines, { ...box, bottom, from, to, x });
  }

  function drawPanel(view, panel, box) {
    const { canvas, chart } = view;
    const shown = panel.lines.filter((line) => !view.hidden.has(line));
    const largest = Math.max(0, ...shown.map((line) => line.y.reduce((most, value) => Math.max(most, value), 0)));
    const axis = reach(largest, panel.limit);
    const y = (value) => box.bottom - (value / axis.end) * (box.bottom - box.top);
    svg(canvas, "text", { x: box.left - 38, y: box.top - 22, class: "title" }, panel.title);
    for (const at of ticks(0, axis.end, (box.bottom - box.top) / 45)) {
      svg(canvas, "line", { x1: box.left, x2: box.right, y1: y(at), y2: y(at), class: at ? "grid" : "zero" });
      svg(canvas, "text", { x: box.left - 6, y: y(at) + 4, class: "tick", "text-anchor": "end" }, said(at));
    }
    const frame = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
    const part = { ...frame, y: frame.y - 4, height: frame.height + 8 }; // what lies outside is cut off
    const inside = svg(canvas, "svg", { ...part, viewBox: `${part.x} ${part.y} ${part.width} ${part.height}` });
    for (const [start, end] of chart.phases) {
      const span = { x: box.x(start), width: Math.max(1, box.x(end) - box.x(start)) };
      svg(inside, "rect", { ...frame, ...span, class: "shade" });
    }
    for (const line of shown) drawLine(inside, line, box.x, y);
    if (axis.label) {
      svg(canvas, "line", { x1: box.left, x2: box.right, y1: y(axis.at), y2: y(axis.at), class: "limit" });
      const text = { x: box.right - 4, y: y(axis.at) + 14, class: "limit-label", "text-anchor": "end" };
      svg(canvas, "text", text, axis.label);
    }
    svg(canvas, "rect", { ...frame, class: "plot" });
  }

  function drawLine(inside, line, x, y) {
    const look = { stroke: `var(--${line.role})`, "stroke-dasharray": DASHES[line.dash % DASHES.length], class: "mark line" };
    if (line.role === "peak") look["stroke-width"] = 2;
    const edges = [0, ...line.starts, line.x.length];
    let path = "";
    for (let part = 0; part + 1 < edges.length; part++) {
      const [start, end] = [edges[part], edges[part + 1]];
      if (end - start === 1) {
        const dot = { cx: x(line.x[start]), cy: y(line.y[start]), r: 3, fill: `var(--${line.role})`, class: "mark" };
        svg(inside, "circle", dot);
      }
      for (let place = start; place < end; place++) {
        path += `${place === start ? "M" : "L"}${x(line.x[place]).toFixed(1)} ${y(line.y[place]).toFixed(1)}`;
      }
    }
    svg(inside, "path", { d: path, ...look });
  }

  function epochs(view, box) {
    let free = -Infinity;
    for (const [seconds, number] of view.chart.epochs) {
      if (seconds < box.from || seconds > box.to) continue;
      const at = box.x(seconds);
      svg(view.canvas, "line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "epoch" });
      if (at < free) continue;
      const text = free === -Infinity ? `epoch ${number}` : String(number);
      if (at + text.length * LETTER > box.right + 8) continue;
      svg(view.canvas, "text", { x: at + 2, y: box.top - 6, class: "tick epoch-label" }, text);
      free = at + text.length * LETTER + 14;
    }
  }

  // The place of the value nearest to `seconds`.
  function nearest(line, seconds) {
    let [low, high] = [0, line.x.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (line.x[middle] < seconds) low = middle + 1;
      else high = middle;
    }
    return low && seconds - line.x[low - 1] < line.x[low] - seconds ? low - 1 : low;
  }

  function pointer(view, lines, box) {
    const { canvas, chart } = view;
    const hair = svg(canvas, "line", { y1: box.top, y2: box.bottom, class: "hair", visibility: "hidden" });
    const band = svg(canvas, "rect", { y: box.top, height: box.bottom - box.top, class: "band", visibility: "hidden" });
    let start = null;
    const secondsAt = (event) => {
      const share = (event.clientX - canvas.getBoundingClientRect().left - box.left) / (box.right - box.left);
      return box.from + Math.min(1, Math.max(0, share)) * (box.to - box.from);
    };
    canvas.addEventListener("pointermove", (event) => {
      const seconds = secondsAt(event);
      if (start !== null) {
        const [a, b] = [box.x(start), box.x(seconds)];
        for (const [key, value] of [["x", Math.min(a, b)], ["width", Math.abs(a - b)], ["visibility", "visible"]]) {
          band.setAttribute(key, value);
        }
      }
      const shown = lines.filter((line) => !view.hidden.has(line));
      if (!shown.length) return;
      const at = shown[0].x[nearest(shown[0], seconds)];
      for (const [key, value] of [["x1", box.x(at)], ["x2", box.x(at)], ["visibility", "visible"]]) hair.setAttribute(key, value);
      const epoch = chart.epochs.filter((mark) => mark[0] <= at).pop();
      const phase = chart.phases.find((span) => span[0] < at && at <= span[1]);
      const head = [`${said(at)} s`, epoch && `epoch ${epoch[1]}`, phase && phase[2]].filter(Boolean).join(" · ");
      const rows = chart.panels.flatMap((panel) =>
        panel.lines
          .filter((line) => !view.hidden.has(line))
          .map((line) => [line.role, line.label, `${said(line.y[nearest(line, at)])} ${panel.unit}`]),
      );
      view.tell(event, head, rows);
    });
    canvas.addEventListener("pointerleave", () => {
      hair.setAttribute("visibility", "hidden");
      view.tip.hidden = true;
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return; // a finger scrolls the page
      start = secondsAt(event);
      canvas.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [from, to] = [start, secondsAt(event)].sort((a, b) => a - b);
      start = null;
      band.setAttribute("visibility", "hidden");
      if (box.x(to) - box.x(from) < 8) return;
      view.zoom = [from, to];
      view.draw();
    });
    canvas.addEventListener("dblclick", () => {
      view.zoom = null;
      view.draw();
    });
  }

  // --------------------------------------------------------------------- bars

  function drawBars(view) {
    const { chart, canvas, width } = view;
    const series = chart.series.filter((each) => !view.hidden.has(each));
    const narrow = width < 560; // names stand above their bars
    const letters = Math.max(...chart.rows.map((row) => row.length));
    const left = narrow ? 4 : Math.min(0.36 * width, (letters + 1) * LETTER + 14);
    const sums = chart.rows.map((_, row) => series.reduce((sum, each) => sum + (each.bars[row] ? each.bars[row].value : 0), 0));
    const every = series.flatMap((each) => each.bars.filter(Boolean));
    const largest = Math.max(0, ...(chart.stacked ? sums : every.flatMap((bar) => [bar.value, bar.high || 0])));
    const axis = reach(largest, chart.limit);
    const right = width - (chart.stacked ? 10 : 74); // room for the value beside the longest bar
    const x = (value) => left + (value / axis.end) * (right - left);
    const plot = svg(canvas, "g", {});
    const thick = 16;
    let y = chart.limit ? 26 : 8;
    const top = y;
    const spans = chart.rows.map((name, row) => {
      const own = series.filter((each) => each.bars[row]);
      const begin = y;
      const fit = narrow ? width / LETTER : (left - 14) / LETTER;
      const label = name.length <= fit ? name : `${name.slice(0, Math.ceil(fit / 2) - 1)}…${name.slice(-Math.floor(fit / 2))}`;
      const count = chart.stacked ? 1 : Math.max(1, own.length);
      if (narrow) y += 17;
      const middle = y + (count * thick) / 2 + 4;
      const where = narrow ? { x: left, y: y - 5 } : { x: left - 8, y: middle, "text-anchor": "end" };
      svg(plot, "text", { ...where, class: "label" }, label);
      let from = 0;
      own.forEach((each, place) => {
        const bar = each.bars[row];
        const at = chart.stacked ? y : y + place * thick;
        const size = { x: x(from), y: at, width: Math.max(1, x(from + bar.value) - x(from)), height: thick - 2 };
        svg(plot, "rect", { ...size, rx: chart.stacked ? 0 : 2, fill: `var(--${each.role})`, class: "mark bar" });
        if (chart.stacked) from += bar.value;
        else interval(plot, bar, x, at + thick / 2 - 1);
      });
      y += count * thick + (narrow ? 7 : 9);
      return [begin, y];
    });
    for (const at of ticks(0, axis.end, (right - left) / 80)) {
      const line = { x1: x(at), x2: x(at), y1: top - 4, y2: y, class: at ? "grid" : "zero" };
      canvas.insertBefore(svg(canvas, "line", line), plot);
      svg(canvas, "text", { x: x(at), y: y + 15, class: "tick", "text-anchor": at ? "middle" : "start" }, said(at));
    }
    svg(canvas, "text", { x: (left + right) / 2, y: y + 31, class: "tick", "text-anchor": "middle" }, chart.unit);
    if (axis.label) {
      const at = axis.beyond ? width - 4 : x(axis.at); // beyond the chart is beyond the figures at its edge too
      svg(plot, "line", { x1: at, x2: at, y1: top - 4, y2: y, class: "limit" });
      const text = { x: Math.min(width - 4, at + 4), y: top - 10, class: "limit-label", "text-anchor": "end" };
      svg(canvas, "text", text, axis.label);
    }
    svg(canvas, "rect", { x: 0, y: top, width, height: y - top, class: "plot" });
    view.size(y + 38);
    rowPointer(view, series, spans);
  }

  // The interval claimed and the size, behind a bar; an interval that missed in the colour of a warning.
  function interval(plot, bar, x, y) {
    let end = x(bar.value);
    if (bar.high !== undefined && bar.low !== undefined) {
      const [low, high] = [x(bar.low), x(bar.high)];
      const d = `M${low} ${y}H${high}M${low} ${y - 4}v8M${high} ${y - 4}v8`;
      svg(plot, "path", { d, class: bar.missed ? "interval missed" : "interval" });
      end = Math.max(end, high);
    }
    svg(plot, "text", { x: end + 6, y: y + 4, class: bar.missed ? "value missed" : "value" }, bar.text + (bar.missed ? " ✘" : ""));
  }

  function rowPointer(view, series, spans) {
    const { chart, canvas } = view;
    canvas.addEventListener("pointermove", (event) => {
      const y = event.clientY - canvas.getBoundingClientRect().top;
      const row = spans.findIndex(([from, to]) => from <= y && y < to);
      view.tip.hidden = row < 0;
      if (row < 0) return;
      const rows = series
        .filter((each) => each.bars[row])
        .map((each) => {
          const { low, high, text, missed } = each.bars[row];
          const claim = low === undefined || high === undefined ? "" : ` (${said(low)} to ${said(high)} ${chart.unit}${missed ? ", missed" : ""})`;
          return [each.role, each.label, text + claim];
        });
      view.tell(event, chart.rows[row], rows);
    });
    canvas.addEventListener("pointerleave", () => {
      view.tip.hidden = true;
    });
  }

  for (const chart of JSON.parse(document.getElementById("charts").textContent)) new View(chart);
  document.documentElement.dataset.drawn = "yes";
})();
