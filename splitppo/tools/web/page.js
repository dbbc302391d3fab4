// Everything that comes from the run is put in as text (textContent, attributes), never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
// several runs over each other, in place of one with its timelines and rows
const compared = data.runs.length > 1;

function put(parent, tag, attributes = {}, text = null) {
  const inSvg = tag === "svg" || parent instanceof SVGElement;
  const node = inSvg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (value !== undefined) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return parent.appendChild(node);
}

const short = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});

function number(value, digits = 4) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e15 || size < 1e-4)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return size >= 1e5 ? short.format(value) : String(Number(value.toPrecision(digits)));
}

const seconds = (value) => `${value.toFixed(value >= 10 ? 1 : value >= 0.1 ? 2 : 3)} s`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- what the run was

function fillFacts() {
  document.title = `${data.name}: splitppo`;
  byId("title").textContent = data.name;
  const last = data.time ? `, last record ${new Date(data.time * 1000).toLocaleString()}` : "";
  byId("subtitle").textContent = data.about + last;
  for (const [title, heads, rows] of data.tables) {
    const above = title === "Results";
    const parent = put(byId(above ? "results" : "facts"), "section", {
      class: compared ? "card wide" : "card",
    });
    put(parent, "h3", {}, title);
    fillTable(parent, heads, rows);
  }
  if (compared) return;
  const placement = put(byId("facts"), "section", {class: "card"});
  put(placement, "h3", {}, "Placement");
  put(placement, "pre", {id: "placement"}, data.placement.join("\n"));
}

function fillTable(parent, heads, rows) {
  if (rows === null || rows.length === 0) {
    put(parent, "p", {class: "soft"}, rows === null ? "not in the run's folder" : "none");
    return;
  }
  const table = put(parent, "table");
  if (heads[0]) {
    const line = put(table, "tr");
    for (const head of heads) put(line, "th", {}, head);
  }
  for (const row of rows) {
    const line = put(table, "tr");
    const run = compared && data.runs.find((run) => run.name === row[0]);
    row.forEach((cell, i) =>
      put(
        line,
        "td",
        {class: "mono", ...(run && !i && {style: `color: ${run.colour}`})},
        String(cell),
      ),
    );
  }
}
