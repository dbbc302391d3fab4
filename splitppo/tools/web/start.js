// ---- the reader's view, kept when the page is loaded again

const KEY = `splitppo:${location.pathname}`;
const fields = () => [...document.querySelectorAll("input[id], select[id]")];
const read = (field) => (field.type === "checkbox" ? field.checked : field.value);
let defaults = {};

function keepView() {
  const changed = fields()
    .filter((field) => read(field) !== defaults[field.id])
    .map((field) => [field.id, read(field)]);
  const open = [...document.querySelectorAll("#groups > details[open]")].map(
    (group) => group.dataset.group,
  );
  const enlarged = charts.findIndex((chart) => chart.place);
  const view = {
    fields: Object.fromEntries(changed),
    open,
    enlarged,
    zoom,
    logs: [...logs],
    scroll: window.scrollY,
  };
  try {
    sessionStorage.setItem(KEY, JSON.stringify(view));
  } catch {
    /* a browser that keeps nothing of files */
  }
}

function readView() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

function start() {
  fillFacts();
  fillCurves();
  byId("one-run").hidden = compared;
  for (const link of document.querySelectorAll("nav .single")) link.hidden = compared;
  if (!compared) {
    fillTimeline();
    fillRows();
  }
  defaults = Object.fromEntries(fields().map((field) => [field.id, read(field)]));
  const view = readView();
  for (const [id, value] of Object.entries(view.fields ?? {})) {
    const field = byId(id);
    if (!field) continue;
    field[field.type === "checkbox" ? "checked" : "value"] = value;
    // a step that has gone
    if (field.tagName === "SELECT" && field.selectedIndex < 0) field.value = defaults[id];
  }
  zoom = view.zoom ?? null;
  for (const name of view.logs ?? []) logs.add(name);
  for (const group of document.querySelectorAll("#groups > details"))
    group.open = (view.open ?? []).includes(group.dataset.group);
  filterMetrics();
  if (!compared) {
    drawStep();
    drawRows();
  }
  if (charts[view.enlarged]) enlargeChart(charts[view.enlarged]);
  if (view.scroll) {
    history.scrollRestoration = "manual";
    window.scrollTo(0, view.scroll);
  }
  window.addEventListener("pagehide", keepView);
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

let pending = 0;
function redraw() {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => {
    drawCharts();
    if (!compared) drawStep();
  });
}

start();
