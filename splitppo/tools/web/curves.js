// ---- lines

// Where x stands in sorted numbers: the last that is not above it.
function before(xs, x) {
  let low = 0,
    high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return high >= 0 && xs[high] <= x ? high : low;
}

function nearest(xs, x) {
  const i = before(xs, x);
  return i + 1 < xs.length && xs[i + 1] - x < x - xs[i] ? i + 1 : i;
}

// The value at x, on a straight line between two points; null outside of them, and in gaps.
function between(xs, ys, x) {
  const i = before(xs, x);
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  if (xs[i] === x || i + 1 === xs.length) return ys[i];
  if (ys[i] === null || ys[i + 1] === null) return null;
  return ys[i] + ((ys[i + 1] - ys[i]) * (x - xs[i])) / (xs[i + 1] - xs[i]);
}

// How much a run had sampled, or how long it had taken, by the end of a step.
function inUnit(run, step, unit) {
  if (unit === "steps") return step;
  const [steps, sums] = data.runs[run].clocks[unit];
  if (step <= steps[0]) return step < steps[0] ? 0 : sums[0];
  return between(steps, sums, step) ?? sums[sums.length - 1];
}

// Exponential mean, with the start's bias taken out (Kingma & Ba 2015, section 3).
function smooth(values, share) {
  let sum = 0,
    weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + 1 - share;
    return sum / weight;
  });
}

const merged = (lists) => [...new Set(lists.flat())].sort((a, b) => a - b);

const nth = (part) => parts.findIndex((one) => one.part === part);

// Of several runs each has a colour, and the parts of a reward have dashes.
function lineColour(run, part) {
  if (compared) return data.runs[run].colour;
  return part ? data.palette[nth(part) % data.palette.length] : colour("--accent");
}

// A metric's lines as they are drawn: {run, label, colour, x, y, raw, low, high}; `raw` is what was
// smoothed.
function linesOf(name) {
  const unit = byId("unit").value,
    share = Number(byId("smoothing").value);
  const lines = metrics
    .get(name)
    .filter(([run]) => !hidden.has(run))
    .map(([run, steps, values, part]) => {
      const kept = steps
        .map((step, i) => [inUnit(run, step, unit), step, values[i]])
        .filter(([x]) => x > 0 || !byId("log-x").checked);
      const raw = kept.map(([, , value]) => value);
      const line = {
        run,
        part,
        label: [...(compared ? [data.runs[run].name] : []), ...(part ? [part] : [])].join(" "),
        x: kept.map(([x]) => x),
        steps: kept.map(([, step]) => step),
        raw,
      };
      return {
        ...line,
        colour: lineColour(run, part),
        y: share ? smooth(raw, share) : raw,
      };
    });
  if (!hasBands || !byId("band").checked) return lines;
  const groups = new Map();
  for (const line of lines) {
    const key = `${data.runs[line.run].group} ${line.part}`;
    groups.set(key, [...(groups.get(key) ?? []), line]);
  }
  return [...groups.values()].map((members) => (members.length > 1 ? meanOf(members) : members[0]));
}

// Mean, lowest and highest of several seeds, where all of them have a value.
function meanOf(members) {
  const x = merged(members.map((line) => line.x));
  const at = x.map((x) => members.map((line) => between(line.x, line.y, x)));
  const fold = (of) => at.map((values) => (values.includes(null) ? null : of(values)));
  const y = fold((values) => values.reduce((a, b) => a + b) / values.length);
  const low = fold((values) => Math.min(...values)),
    high = fold((values) => Math.max(...values));
  return {
    ...members[0],
    colour: data.runs[data.runs[members[0].run].group].colour,
    label: `mean of ${members.length} seeds${members[0].part ? ` ${members[0].part}` : ""}`,
    x,
    steps: null,
    y,
    raw: y,
    low,
    high,
  };
}

// ---- drawing

function drawCharts() {
  hidden.clear();
  const bands = hasBands && byId("band").checked;
  data.runs.forEach((run, i) => {
    if (!byId(`run-${i}`).checked) hidden.add(i);
    byId(`run-${i}`).parentElement.style.color = data.runs[bands ? run.group : i].colour;
  });
  byId("smoothing-value").textContent = Number(byId("smoothing").value)
    ? Number(byId("smoothing").value).toFixed(2)
    : "off";
  const unit = byId("unit").value,
    ends = [];
  for (const lines of metrics.values())
    for (const [run, steps] of lines) {
      if (hidden.has(run)) continue;
      const first = byId("log-x").checked
        ? steps.find((step) => inUnit(run, step, unit) > 0)
        : steps[0];
      ends.push(
        ...[first, steps[steps.length - 1]]
          .filter((step) => step !== undefined)
          .map((step) => inUnit(run, step, unit)),
      );
    }
  extent = [Math.min(...ends), Math.max(...ends)];
  if (!ends.length) extent = [0, 1];
  else if (extent[0] === extent[1]) extent[1] += Math.abs(extent[0]) || 1;
  byId("unzoom").hidden = !zoom;
  const banded = bands ? " Band: from the lowest to the highest seed." : "";
  const smoothed = Number(byId("smoothing").value) ? " Pale: before smoothing." : "";
  byId("curve-note").textContent = zoom
    ? `${place(zoom[0])} to ${place(zoom[1])}`
    : `Drag to zoom, double-click for all.${banded}${smoothed}`;
  charts.forEach(draw);
}

function zoomTo(range) {
  zoom = range;
  drawCharts();
}

function draw(chart) {
  chart.plot?.destroy();
  chart.plot = null;
  // in a closed group; drawn when it opens
  if (!chart.box.clientWidth || !chart.box.clientHeight) return;
  chart.lines = linesOf(chart.name).filter((line) => line.x.length);
  const log = isLog(chart.name) && chart.lines.some((line) => line.raw.some((value) => value > 0));
  chart.log.disabled = !metrics
    .get(chart.name)
    .some(([, , values]) => values.some((value) => value > 0));
  chart.log.setAttribute("aria-pressed", String(log));
  const x = merged(chart.lines.map((line) => line.x)),
    index = new Map(x.map((x, i) => [x, i]));
  const columns = [x],
    series = [{}],
    bands = [];
  // undefined where only other lines have a point; null where the value is not finite, or not above
  // 0 on a log axis
  const add = (line, values, look) => {
    const column = Array(x.length).fill(undefined);
    values.forEach((value, i) => {
      column[index.get(line.x[i])] = log && !(value > 0) ? null : value;
    });
    columns.push(column);
    series.push({stroke: line.colour, width: 1.6, points: {show: false}, ...look});
  };
  const faint = (line) => `${line.colour}${line.colour.length === 7 ? "40" : ""}`;
  for (const line of chart.lines) {
    if (line.low) {
      add(line, line.high, {stroke: "transparent"});
      add(line, line.low, {stroke: "transparent"});
      bands.push({series: [series.length - 2, series.length - 1], fill: faint(line)});
    }
    if (line.raw !== line.y) add(line, line.raw, {stroke: faint(line)});
    const few = line.x.length <= 15;
    add(line, line.y, {
      dash: compared && line.part && nth(line.part) ? [9 / nth(line.part), 4] : undefined,
      points: {show: few, size: 5, fill: line.colour, filter: few ? undefined : alone},
    });
    series[series.length - 1].line = line;
  }
  const axis = {
    stroke: colour("--soft"),
    font: "11px system-ui, sans-serif",
    ticks: {show: false},
    grid: {stroke: colour("--grid"), width: 1},
  };
  chart.plot = new uPlot(
    {
      width: chart.box.clientWidth,
      height: chart.box.clientHeight,
      series,
      bands,
      legend: {show: false},
      padding: [6, 20, 0, 0],
      scales: {
        x: {time: false, distr: byId("log-x").checked ? 3 : 1, range: () => zoom ?? extent},
        y: {distr: log ? 3 : 1, range: () => valueRange(chart, columns, log)},
      },
      axes: [
        {
          ...axis,
          size: 24,
          gap: 3,
          space: 60,
          values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))),
        },
        {
          ...axis,
          size: 52,
          gap: 4,
          space: chart.place ? 50 : 28,
          values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))),
        },
      ],
      cursor: {
        y: false,
        drag: {x: true, y: false, setScale: false},
        sync: {
          key: "x",
          scales: ["x", null],
          filters: {pub: (type) => ["mousemove", "mouseleave"].includes(type)},
        },
        dataIdx: (plot, series, hovered) => nearestDefined(columns[series], hovered),
        points: {show: (plot, i) => Boolean(series[i].line), size: 7},
        bind: {
          dblclick: () => () => {
            zoomTo(null);
          },
        },
      },
      hooks: {
        setSelect: [
          (plot) => {
            const {left, width} = plot.select;
            // later, as uPlot still has to let go of the mouse in the chart that is drawn anew
            if (width > 3)
              setTimeout(zoomTo, 0, [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
          },
        ],
        setCursor: [
          (plot) =>
            tell(chart, plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null),
        ],
      },
    },
    columns,
    chart.box,
  );
  tell(chart, null);
}

// The points of a series that no line leads to.
function alone(plot, i) {
  const values = plot.data[i],
    found = [];
  const next = (at, step) => {
    do at += step;
    while (values[at] === undefined && at >= 0 && at < values.length);
    return values[at] ?? null;
  };
  values.forEach((value, at) => {
    if (value !== null && value !== undefined && next(at, -1) === null && next(at, 1) === null)
      found.push(at);
  });
  return found;
}

function nearestDefined(column, at) {
  for (let far = 0; far < column.length; far++) {
    for (const i of [at - far, at + far])
      if (column[i] !== undefined && column[i] !== null) return i;
  }
  return at;
}

function valueRange(chart, columns, log) {
  const [from, to] = zoom ?? extent,
    seen = [];
  for (const column of columns.slice(1)) {
    column.forEach((value, i) => {
      if (typeof value === "number" && columns[0][i] >= from && columns[0][i] <= to)
        seen.push(value);
    });
  }
  if (!seen.length) return log ? [0.1, 1] : [0, 1];
  seen.sort((a, b) => a - b);
  const cut = byId("outliers").checked ? Math.floor(seen.length * 0.02) : 0;
  let low = seen[cut],
    high = seen[seen.length - 1 - cut];
  if (log) return uPlot.rangeLog(low, high, 10, false);
  // explained variance has no floor where all returns are alike, which would flatten the rest
  if (chart.name.includes("explained")) low = Math.min(Math.max(low, -1), high);
  const margin = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

// Writes the values at x into the card; null: the last ones.
function tell(chart, x) {
  chart.output.replaceChildren();
  for (const line of chart.lines) {
    const i = x === null ? line.x.length - 1 : nearest(line.x, x);
    const value = line.steps ? line.raw[i] : line.y[i];
    put(
      chart.output,
      "b",
      compared || line.part ? {style: `color: ${line.colour}`, title: line.label} : {},
      number(value, 3),
    );
    if (line.part) put(chart.output, "span", {}, line.part);
    chart.output.append(" ");
    if (line.low && line.y[i] !== null)
      chart.output.append(`${number(line.low[i], 3)} to ${number(line.high[i], 3)}; `);
    if (compared || line.part) continue;
    const smoothed = line.raw === line.y ? "" : `, smooth ${number(line.y[i], 3)}`;
    const finite = line.raw.filter((value) => value !== null);
    const ends =
      x === null && finite.length
        ? `, from ${number(Math.min(...finite), 3)} to ${number(Math.max(...finite), 3)}`
        : "";
    chart.output.append(
      byId("unit").value === "steps"
        ? `step ${line.steps[i]}${smoothed}${ends}`
        : `${place(line.x[i])}${smoothed}${ends}`,
    );
  }
  if (compared || chart.name === PARTS) chart.output.append(x === null ? "last" : place(x));
}
