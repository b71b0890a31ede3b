"use strict";
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");
  // Blue, orange and their neighbours stay apart for people who do not tell red from green.
  const PALETTES = {
    light: {
      peak: "#c8501e", in_use: "#2364aa", reserved: "#8e6bbf", driver: "#7a828e", host: "#1d8a6b", swap: "#b8336a",
      c0: "#2364aa", c1: "#e08a1e", c2: "#1d8a6b", c3: "#b8336a", c4: "#6f5bb5", c5: "#5aa6d6", c6: "#8a9099",
      c7: "#a8742a", estimated: "#2364aa", measured: "#e08a1e",
      text: "#1c2430", soft: "#5b6675", grid: "#e6e9ee", zero: "#c9cfd8", card: "#ffffff", mark: "#98a2b0",
      phase: "rgba(111, 91, 181, 0.13)",
    },
    dark: {
      peak: "#ff9a66", in_use: "#6cb0f5", reserved: "#bfa2f0", driver: "#a3adba", host: "#4fd0a8", swap: "#f582ae",
      c0: "#6cb0f5", c1: "#f5b04d", c2: "#4fd0a8", c3: "#f582ae", c4: "#a996ee", c5: "#a3d6f5", c6: "#a3adba",
      c7: "#d9a860", estimated: "#6cb0f5", measured: "#f5b04d",
      text: "#e4e8ee", soft: "#9aa5b4", grid: "#2a323e", zero: "#465263", card: "#1a2029", mark: "#6f7b8b",
      phase: "rgba(169, 150, 238, 0.16)",
    },
  };

  function themed(chart, colours) {
    const layout = structuredClone(chart.layout);
    const meta = layout.meta || {};
    layout.autosize = true;
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", size: 12, color: colours.soft };
    layout.hoverlabel = { bgcolor: colours.card, bordercolor: colours.zero, font: { color: colours.text, size: 12 }, namelength: -1 };
    layout.margin = Object.assign({ l: 8, r: 12, t: 8, b: 8 }, layout.margin);
    for (const axis of [layout.xaxis, layout.yaxis, layout.yaxis2]) {
      if (!axis) continue;
      Object.assign(axis, { automargin: true, gridcolor: colours.grid, zerolinecolor: colours.zero, linecolor: colours.zero });
      axis.title = Object.assign({ standoff: 8 }, axis.title);
      axis.fixedrange = narrow.matches; // a finger that scrolls the page does not zoom the chart
    }
    if (narrow.matches && meta.narrow) layout.yaxis.ticktext = meta.narrow;
    if (narrow.matches) layout.xaxis.nticks = 5;
    layout.showlegend = Boolean(meta.legend);
    layout.legend = { orientation: "h", x: 0, xanchor: "left", y: 0, yanchor: "bottom", yref: "container", traceorder: "normal" };
    if (layout.barmode && !(narrow.matches && chart.traces.length > 2)) layout.legend = Object.assign(layout.legend, { y: 1, yanchor: "bottom", yref: "paper" });
    Object.assign(layout.xaxis, { spikethickness: 1, spikedash: "solid", spikecolor: colours.mark });
    layout.dragmode = narrow.matches ? false : "zoom";
    for (const shape of layout.shapes || []) {
      if (shape.role === "phase") shape.fillcolor = colours.phase;
      else shape.line.color = colours.mark;
      delete shape.role;
    }
    const labels = layout.annotations || [];
    if (narrow.matches && labels.length > 4) layout.annotations = labels.filter((_, place) => place % 4 === 0);
    for (const note of layout.annotations || []) {
      note.font.color = colours.soft;
      delete note.role;
    }
    const traces = chart.traces.map(function (trace) {
      const colour = colours[trace.meta.role];
      const copy = Object.assign({}, trace);
      if (trace.type === "bar") copy.marker = { color: colour };
      else {
        copy.line = Object.assign({}, trace.line, { color: colour });
        copy.marker = { color: colour, size: 7 };
      }
      if (trace.error_x) copy.error_x = Object.assign({}, trace.error_x, { color: colours.text });
      return copy;
    });
    return [traces, layout];
  }

  function draw() {
    const colours = dark.matches ? PALETTES.dark : PALETTES.light;
    for (const chart of charts) {
      const [traces, layout] = themed(chart, colours);
      const element = document.getElementById(chart.name);
      // a legend takes a row for every two names in a narrow window, a few rows in a wide one
      const rows = !layout.showlegend || !narrow.matches ? 0 : Math.ceil(traces.length / 2);
      element.style.height = Number(element.dataset.height) + 20 * rows + "px";
      Plotly.react(element, traces, layout, { responsive: true, displayModeBar: false, showTips: false });
    }
  }

  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
  window.addEventListener("beforeprint", draw);
  draw();
  document.documentElement.dataset.drawn = "yes";
})();
