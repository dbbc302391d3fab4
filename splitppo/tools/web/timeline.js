// ---- timeline

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++)
    found.push(Number((i * size).toPrecision(12)));
  return found;
}

const LANE = {height: 60, gap: 30, top: 24, left: 62, right: 14};

function fillTimeline() {
  if (!data.timelines.length) {
    byId("step-tools").hidden = true;
    byId("timeline-title").textContent = "No step has recorded spans.";
    return;
  }
  const select = byId("step-select"),
    slider = byId("step-slider");
  data.timelines.forEach((timeline) =>
    put(select, "option", {value: timeline.step}, String(timeline.step)),
  );
  slider.max = data.timelines.length - 1;
  select.value = data.chosen;
  slider.value = select.selectedIndex;
  select.addEventListener("change", drawStep);
  slider.addEventListener("input", () => {
    select.selectedIndex = slider.value;
    drawStep();
  });
  byId("step-note").textContent =
    `${data.timelines.length} steps are here, ${data.limits.timelines} at most.`;
}

// The chosen step.
function drawStep() {
  if (data.timelines.length) {
    byId("step-slider").value = byId("step-select").selectedIndex;
    drawTimeline(data.timelines[byId("step-select").selectedIndex]);
  }
}

function ink(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "dark" : "";
}

function drawTimeline(timeline) {
  const svg = byId("timeline-svg");
  svg.replaceChildren();
  byId("timeline-title").textContent = timeline.title;
  fillSums(timeline);
  const width = svg.clientWidth;
  if (width < 200) return; // not laid out, as while a browser prepares a picture of the page
  const [low, high] = timeline.view;
  const bottom = LANE.top + 2 * LANE.height + LANE.gap + 8;
  svg.setAttribute("height", bottom + 22);
  const x = (second) =>
    LANE.left +
    ((Math.min(Math.max(second, low), high) - low) / (high - low)) *
      (width - LANE.left - LANE.right);
  const defs = put(svg, "defs");
  const hatch = put(defs, "pattern", {
    id: "hatch",
    width: 7,
    height: 7,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  });
  put(hatch, "rect", {width: 7, height: 7, style: "fill: var(--wait)"});
  put(hatch, "line", {y2: 7, style: "stroke: var(--hatch); stroke-width: 2"});
  put(svg, "rect", {
    class: "window",
    x: x(0),
    y: LANE.top - 6,
    width: x(timeline.length) - x(0),
    height: bottom - LANE.top + 6,
  });
  for (const [second, step] of [
    [0, timeline.step],
    [timeline.length, timeline.step + 1],
  ]) {
    put(svg, "line", {class: "cursor", x1: x(second), x2: x(second), y1: 6, y2: bottom});
    if (x(second) < width - 60) put(svg, "text", {x: x(second) + 4, y: 14}, `step ${step}`);
  }
  for (const tick of ticks(low, high, 10)) {
    put(svg, "line", {class: "gridline", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 5});
    put(svg, "text", {x: x(tick), y: bottom + 17, "text-anchor": "middle"}, `${tick} s`);
  }
  timeline.lanes.forEach(([lane, spans], i) => {
    const y = LANE.top + i * (LANE.height + LANE.gap);
    put(svg, "text", {class: "lane", x: LANE.left - 8, y: y + LANE.height / 2 + 4}, lane);
    for (const span of spans) {
      const named = spans.every((other) => !samePhase(span, other) || length(other) <= length(span));
      drawSpan(svg, timeline, lane, span, x, y, named);
    }
  });
  const middle = LANE.top + LANE.height + LANE.gap / 2;
  put(svg, "text", {class: "lane", x: LANE.left - 8, y: middle + 4}, "both");
  for (const [start, end] of timeline.shared) {
    put(svg, "rect", {
      class: "both",
      x: x(start),
      y: middle - 5,
      width: Math.max(x(end) - x(start), 0.5),
      height: 10,
    });
  }
}

const length = ([, , start, end]) => end - start;
const samePhase = ([step, name], [otherStep, otherName]) => step === otherStep && name === otherName;

// `named`: whether the box has its phase's name in it, as the longest of its lane does.
function drawSpan(svg, timeline, lane, [step, name, start, end], x, y, named) {
  const left = x(start),
    room = x(end) - left,
    wait = name.startsWith("wait_"),
    own = step === timeline.step;
  const attributes = {
    class: `span ${wait ? "wait" : ""} ${own ? "" : "other-step"}`,
    x: left,
    y,
    width: Math.max(room, 0.7),
    height: LANE.height,
  };
  if (!wait) attributes.fill = data.colours[name];
  const box = put(svg, "rect", {
    ...attributes,
    "data-lane": lane,
    "data-span": name,
    "data-step": step,
  });
  const when = `from ${start.toFixed(3)} s to ${end.toFixed(3)} s`;
  const told = `${lane}: ${name} of step ${step}, ${seconds(end - start)}, ${when}`;
  box.setAttribute("aria-label", told);
  box.addEventListener("pointerenter", () => {
    byId("span-readout").textContent = told;
  });
  box.addEventListener("pointerleave", tellHint);
  if (!named) return;
  const shade = wait || !own ? "plain" : ink(data.colours[name]);
  const figure = own ? seconds(end - start) : `of step ${step}`;
  for (const lines of [
    [name, figure],
    [...name.split("_"), figure],
  ]) {
    // the second way is narrower
    const top = y + LANE.height / 2 + 12 - 8 * lines.length;
    const labels = lines.map((line, i) =>
      put(svg, "text", {class: `label ${shade}`, x: left + room / 2, y: top + 16 * i}, line),
    );
    if (labels.every((label) => label.getComputedTextLength() <= room - 6)) break;
    labels.forEach((label) => label.remove());
  }
}

function tellHint() {
  byId("span-readout").textContent =
    "Point at a box to read it. Hatched: waiting for the other column; pale: spans of the steps " +
    "beside this one; the bar between the lanes: both columns at work.";
}

// Seconds of each span of the step itself, by lane.
function fillSums(timeline) {
  const table = byId("span-sums"),
    sums = new Map();
  timeline.lanes.forEach(([, spans], i) => {
    for (const [step, name, start, end] of spans) {
      if (step !== timeline.step) continue;
      if (!sums.has(name))
        sums.set(
          name,
          timeline.lanes.map(() => 0),
        );
      sums.get(name)[i] += end - start;
    }
  });
  table.replaceChildren();
  const head = put(table, "tr");
  put(head, "th", {}, `spans of step ${timeline.step}`);
  for (const [lane] of timeline.lanes) put(head, "th", {}, lane);
  for (const [name, values] of sums) {
    const line = put(table, "tr");
    const cell = put(line, "td");
    const colour = name.startsWith("wait_") ? "var(--hatch)" : data.colours[name];
    put(cell, "span", {class: "swatch", style: `background: ${colour}`});
    cell.append(name);
    for (const value of values) put(line, "td", {}, value ? seconds(value) : "");
  }
  tellHint();
}
