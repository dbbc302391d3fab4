// ---- cards of curves, and what one does with them

// Each: whether the card is wide, then metrics with their titles: the first that changes is shown.
const OVERVIEW = [
  ["wide", {"critic/score/mean": "Training score"}],
  ["wide", {"val/score/mean": "Held-out score"}],
  ["", {"critic/vf_explained_var": "Explained variance"}],
  [
    "",
    {
      "actor/ref_kl": "KL to the reference",
      "critic/ref_kl": "KL to the reference",
      "actor/ppo_kl": "KL of the update",
    },
  ],
  ["", {"actor/entropy": "Entropy"}],
  ["", {"response_length/mean": "Response length"}],
  ["", {"perf/throughput": "Tokens a second"}],
  ["", {"timing_s/step": "Seconds a step"}],
];
// by name [[run, steps, values], ...]
const metrics = new Map(data.groups.flatMap(([, found]) => found));
// the card of what functions and reward model gave: lines [run, steps, values, part]
const PARTS = "critic/reward";
const parts = [...metrics.keys()]
  .map((name) => name.match(/^critic\/reward(?:_(model)|\/(.+?)(?:\/score)?)\/mean$/))
  .filter(Boolean)
  .map(([name, model, part]) => ({name, part: part ?? model}));
const charts = [];
const logs = new Set(); // metrics whose own log button was pressed
const hidden = new Set(); // numbers of runs
let zoom = null; // [from, to] on the x axis; null: all of it
let extent = [0, 1];

const isConstant = (name) =>
  metrics.get(name).every(([, , values]) => values.every((value) => value === values[0]));
const isLog = (name) => byId("log-y").checked !== logs.has(name);
const hasBands = data.runs.some((run, i) => run.group !== i);
const place = (x) =>
  byId("unit").value === "steps" ? `step ${Math.round(x)}` : `${number(x)} ${byId("unit").value}`;

function fillCurves() {
  for (const [size, titles] of OVERVIEW) {
    const found = Object.keys(titles).filter((name) => metrics.has(name));
    const name = found.find((name) => !isConstant(name)) ?? found[0];
    if (name) addChart(byId("overview"), name, titles[name], size);
  }
  if (parts.length > 1) {
    const lines = parts.flatMap(({name, part}) =>
      metrics.get(name).map((line) => [...line, part]),
    );
    metrics.set(PARTS, lines);
    addChart(byId("overview"), PARTS, "Parts of the reward", "parts");
  }
  for (const [title, found] of data.groups) {
    const names = found.map(([name]) => name).filter((name) => !isConstant(name));
    if (!names.length) continue;
    const group = put(byId("groups"), "details", {"data-group": title});
    const summary = put(group, "summary");
    put(summary, "b", {}, title);
    put(
      summary,
      "span",
      {class: "soft"},
      names.map((name) => name.replace(`${title}/`, "")).join(", "),
    );
    const grid = put(group, "div", {class: "charts"});
    for (const name of names) addChart(grid, name, name, "");
    group.addEventListener("toggle", () =>
      charts.filter((chart) => group.contains(chart.figure)).forEach(draw),
    );
  }
  fillConstants();
  if (!charts.length) put(byId("overview"), "p", {class: "soft"}, "No metric is recorded.");
  for (const unit of ["tokens", "hours"])
    byId(unit).disabled = data.runs.some((run) => !run.clocks[unit]);
  byId("band-label").hidden = !hasBands;
  byId("run-tools").hidden = !compared;
  data.runs.forEach((run, i) => {
    const label = put(byId("run-tools"), "label");
    const box = put(label, "input", {type: "checkbox", checked: "", id: `run-${i}`});
    label.append(run.name);
    box.addEventListener("change", drawCharts);
  });
  for (const id of ["unit", "log-x"])
    byId(id).addEventListener("input", () => {
      zoom = null;
    });
  byId("look").addEventListener("input", drawCharts);
  byId("unzoom").addEventListener("click", () => zoomTo(null));
  byId("metric-filter").addEventListener("input", filterMetrics);
  byId("open-all").addEventListener("click", () => {
    const groups = [...document.querySelectorAll("#groups > details")],
      open = groups.some((group) => !group.open);
    for (const group of groups) group.open = open;
  });
  byId("enlarged").addEventListener("close", () => {
    const chart = charts.find((chart) => chart.place);
    chart.place.replaceWith(chart.figure);
    chart.place = null;
    draw(chart);
  });
  byId("enlarged").addEventListener("click", (event) => {
    if (event.target === byId("enlarged")) byId("enlarged").close();
  });
}

// What never changes needs no curve.
function fillConstants() {
  const names = [...metrics.keys()].filter((name) => name !== PARTS && isConstant(name));
  if (!names.length) return;
  const group = put(byId("groups"), "details", {"data-group": "constants", class: "constants"});
  put(put(group, "summary"), "b", {}, `${names.length} constants`);
  group.querySelector("summary").append(names.join(", "));
  const rows = names.map((name) => {
    const last = new Map(metrics.get(name).map(([run, , values]) => [run, number(values[0])]));
    return [name, ...data.runs.map((_, i) => last.get(i) ?? "-")];
  });
  fillTable(
    group,
    compared ? ["metric", ...data.runs.map((run) => run.name)] : ["metric", "value"],
    rows,
  );
}

function addChart(parent, name, title, size) {
  const figure = put(parent, "figure", {class: `chart card ${size}`, "data-metric": name});
  const caption = put(figure, "figcaption");
  const head = put(caption, "span", {class: "name", title: name}, title);
  if (title !== name) put(head, "small", {}, name);
  const buttons = put(caption, "span", {class: "buttons"});
  const chart = {name, figure, place: null, plot: null, lines: []};
  chart.log = put(buttons, "button", {title: "logarithmic axis", "data-do": "log"}, "log");
  const enlarge = put(
    buttons,
    "button",
    {title: "enlarge", "data-do": "enlarge", "aria-label": "enlarge"},
    "⤢",
  );
  const csv = put(
    buttons,
    "button",
    {title: "this card's figures as a CSV file", "data-do": "csv"},
    "CSV",
  );
  chart.output = put(figure, "output");
  chart.box = put(figure, "div", {class: "plot", role: "img", "aria-label": `curve of ${name}`});
  chart.log.addEventListener("click", () => {
    logs[logs.has(name) ? "delete" : "add"](name);
    drawCharts();
  });
  enlarge.addEventListener("click", () =>
    chart.place ? byId("enlarged").close() : enlargeChart(chart),
  );
  csv.addEventListener("click", () => saveFile(`${name.replaceAll("/", "_")}.csv`, toCsv(chart)));
  charts.push(chart);
}

function enlargeChart(chart) {
  chart.place = chart.figure.cloneNode(false); // keeps the other cards where they are
  delete chart.place.dataset.metric;
  chart.place.style.height = `${chart.figure.offsetHeight}px`;
  chart.figure.replaceWith(chart.place);
  byId("enlarged").append(chart.figure);
  byId("enlarged").showModal();
  draw(chart);
}

function filterMetrics() {
  const part = byId("metric-filter").value.trim().toLowerCase();
  for (const group of document.querySelectorAll("#groups > details")) {
    const figures = [...group.querySelectorAll(".chart")];
    for (const figure of figures)
      figure.hidden = !figure.dataset.metric.toLowerCase().includes(part);
    const lines = [...group.querySelectorAll("tr:has(td)")];
    for (const line of lines) line.hidden = !line.textContent.toLowerCase().includes(part);
    group.hidden = [...figures, ...lines].every((node) => node.hidden);
    if (part && !group.hidden) group.open = true;
  }
  drawCharts();
}

// One line a record: the run, its step, tokens and hours by then, and the value.
function toCsv(chart) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : text);
  const lines = [["run", "step", "tokens", "hours", chart.name]];
  if (chart.name === PARTS) lines[0].push("part");
  for (const [run, steps, values, ...part] of metrics.get(chart.name)) {
    if (hidden.has(run)) continue;
    steps.forEach((step, i) => {
      const clock = ["tokens", "hours"].map((unit) =>
        data.runs[run].clocks[unit] ? inUnit(run, step, unit) : "",
      );
      lines.push([data.runs[run].name, step, ...clock, values[i] ?? "nan", ...part]);
    });
  }
  return lines.map((line) => line.map(quote).join(",")).join("\n") + "\n";
}

function saveFile(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], {type: "text/csv"}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
