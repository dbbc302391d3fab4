// ---- rows: what was asked and answered

const PAGE = 10; // prompts that are shown at first, and by "show more"
const LOW = "201,98,31",
  HIGH = "47,109,179"; // the ends of the colour scale, whose middle is the page's own colour
const shade = (share) =>
  `rgba(${share < 0 ? LOW : HIGH},${(0.75 * Math.min(Math.abs(share), 1)).toFixed(3)})`;
const rows = Object.entries(data.samples ?? {}).flatMap(([kind, found]) =>
  found.rows.map((row) => ({
    ...row,
    kind,
    surprise:
      Number.isFinite(row.first_value) && Number.isFinite(row.score)
        ? row.score - row.first_value
        : null,
    text: [
      row.question,
      row.prompt,
      row.response,
      row.ground_truth,
      ...(row.turns ?? []).map((turn) => turn.content),
    ]
      .join("\n")
      .toLowerCase(),
  })),
);
// the largest key comes first; rows without one come last
const ORDERS = {
  "newest first": (row) => row.step,
  "surprise: score less first value": (row) =>
    row.surprise === null ? null : Math.abs(row.surprise),
  "better than expected": (row) => row.surprise,
  "worse than expected": (row) => (row.surprise === null ? null : -row.surprise),
  "lowest score": (row) => (Number.isFinite(row.score) ? -row.score : null),
};
let most = PAGE;

function fillRows() {
  const kinds = Object.keys(data.samples).filter((kind) => data.samples[kind].rows.length);
  for (const kind of kinds) put(byId("row-kind"), "option", {}, kind);
  for (const step of [...new Set(rows.map((row) => row.step))].sort((a, b) => b - a))
    put(byId("row-step"), "option", {}, String(step));
  const valued = rows.some((row) => row.surprise !== null);
  for (const order of Object.keys(ORDERS))
    if (valued || ORDERS[order](rows[0] ?? {}) !== null)
      put(byId("row-order"), "option", {}, order);
  const shaded = rows.some((row) => row.tokens);
  byId("shade").parentElement.hidden = !shaded;
  if (!shaded) byId("shade").value = "none";
  if (!rows.some((row) => row.tokens?.value))
    byId("shade").querySelector(":scope > option:nth-child(2)").remove();
  byId("scale-bar").style.background =
    `linear-gradient(90deg, ${shade(-1)}, ${shade(0)}, ${shade(1)})`;
  const told = Object.entries(data.samples)
    .map(([kind, found]) => `${found.steps} steps have ${kind} rows`)
    .join(", ");
  const limits = data.limits;
  byId("row-note").textContent =
    `${told}; at most ${limits.rows} rows of each kind are here, evenly over the steps, ` +
    `texts cut at ${limits.chars} characters, ${limits.tokens} tokens. ` +
    "Surprise: the score less the first value, which the value model expected before the row. " +
    "Advantage: how much better the row went than expected, before whitening, in units of the " +
    "score. ▯ is a token without text of its own; what the policy did not sample is grey. Rows " +
    "of one prompt stand side by side; held-out rows beside those of other steps.";
  byId("row-tools").addEventListener("input", () => {
    most = PAGE;
    drawRows();
  });
  byId("more-rows").addEventListener("click", () => {
    most += PAGE;
    drawRows();
  });
}

// Whether a comes behind b; null is last.
const compare = (key) => (a, b) => (key(b) ?? -Infinity) - (key(a) ?? -Infinity) || 0;

function drawRows() {
  const kind = byId("row-kind").value,
    step = byId("row-step").value,
    part = byId("row-search").value.toLowerCase();
  const key = ORDERS[byId("row-order").value];
  const found = rows.filter(
    (row) => row.kind === kind && ["", String(row.step)].includes(step) && row.text.includes(part),
  );
  const prompts = new Map();
  for (const row of [...found].sort((a, b) => compare(key)(a, b) || a.row - b.row)) {
    const name = Math.floor(row.row / data.samples[kind].per_prompt);
    prompts.set(name, [...(prompts.get(name) ?? []), row]);
  }
  const scale = drawScale();
  byId("prompts").replaceChildren();
  for (const group of [...prompts.values()].slice(0, most)) drawPrompt(group, scale);
  byId("row-count").textContent = `${found.length} of ${rows.length} rows, ${prompts.size} prompts`;
  byId("more-rows").hidden = prompts.size <= most;
}

// The middle of the colour scale, and the distance to its ends, which 4 % of the tokens lie beyond;
// most tokens may have no reward, so none lies beyond.
function drawScale() {
  const figure = byId("shade").value;
  byId("scale").hidden = byId("token-readout").hidden = figure === "none";
  if (figure === "none") return null;
  const values = rows
    .flatMap((row) => row.tokens?.[figure] ?? [])
    .filter((value) => typeof value === "number")
    .sort((a, b) => a - b);
  const beyond = figure === "reward" ? 0 : 0.02;
  const low = values[Math.floor(beyond * (values.length - 1))],
    high = values[Math.ceil((1 - beyond) * (values.length - 1))];
  const middle = ["value", "surprise"].includes(figure) ? (low + high) / 2 : 0,
    reach = Math.max(high - middle, middle - low) || 1;
  byId("scale-low").textContent = number(middle - reach);
  byId("scale-high").textContent = number(middle + reach);
  byId("token-readout").textContent = "Point at a token to read its figures.";
  return {figure, middle, reach};
}

function drawPrompt(group, scale) {
  // as wide as its rows need, so that prompts with few of them stand side by side
  const style = `flex-basis: ${300 * group.length}px`;
  const card = put(byId("prompts"), "article", {class: "card prompt", style});
  const first = group[0];
  const about = [
    first.kind === "training" ? `step ${first.step}` : "held-out",
    first.data_source,
    first.ground_truth && `truth ${first.ground_truth}`,
  ];
  put(card, "p", {class: "soft"}, about.filter(Boolean).join(" · "));
  const asked = promptOf(first);
  const plain = asked.length < 2; // what a user asked, and nothing before it
  const question = put(
    card,
    plain ? "pre" : "div",
    {class: "question"},
    plain ? (first.question ?? first.prompt ?? "") : null,
  );
  if (!plain) for (const turn of asked) drawTurn(question, turn, [turn.role]);
  const answers = put(card, "div", {class: "answers"});
  for (const row of group) drawAnswer(answers, row, scale, asked);
}

// The messages of a dialogue before the policy's first turn, which has a reward.
const promptOf = (row) =>
  (row.turns ?? []).slice(
    0,
    Math.max(
      0,
      (row.turns ?? []).findIndex((turn) => "reward" in turn),
    ),
  );

function drawTurn(parent, turn, who) {
  const own = "reward" in turn;
  // so begins the answer to a call that fails
  const failed = !own && /^error: /m.test(turn.content);
  const box = put(parent, "div", {
    class: `turn ${own ? "policy" : "other"} ${failed ? "error" : ""}`,
    "data-role": turn.role,
  });
  put(box, "p", {class: "who"}, [...who, ...(failed ? ["error"] : [])].join(" · "));
  return put(box, "pre", {class: "text"}, turn.content);
}

const signed = (value) => (value >= 0 ? "+" : "−") + number(Math.abs(value), 2);

function drawAnswer(parent, row, scale, asked) {
  const answer = put(parent, "section", {
    class: "answer",
    "data-row": row.row,
    "data-step": row.step,
  });
  const facts = put(answer, "p");
  put(facts, "b", {}, `score ${typeof row.score === "number" ? number(row.score, 3) : row.score}`);
  if (row.surprise !== null)
    put(
      facts,
      "span",
      {
        class: "surprise",
        style: `background: ${shade(row.surprise)}`,
        title: `score less first value, ${number(row.first_value)}`,
      },
      `surprise ${signed(row.surprise)}`,
    );
  const rest = [row.kind === "training" ? null : `step ${row.step}`, row.end, `row ${row.row}`];
  put(facts, "span", {class: "soft"}, rest.filter(Boolean).join(", "));
  const stretches = scale && row.tokens ? sampledStretches(row.tokens) : [];
  if (!row.turns) {
    const text = put(
      answer,
      "pre",
      {class: "text"},
      stretches.length ? null : (row.response ?? ""),
    );
    if (stretches.length) drawTokens(text, row.tokens, [0, row.tokens.text.length], scale);
    return;
  }
  const own = promptOf(row);
  const shown =
    JSON.stringify(own) === JSON.stringify(asked) ? row.turns.slice(own.length) : row.turns;
  let said = 0;
  for (const turn of shown) {
    if (!("reward" in turn)) {
      drawTurn(answer, turn, [turn.role]);
      continue;
    }
    const text = drawTurn(answer, turn, [
      "policy",
      ...["value", "reward"]
        .filter((name) => typeof turn[name] === "number")
        .map((name) => `${name} ${number(turn[name], 3)}`),
    ]);
    const stretch = stretches[said++];
    // the row's other tokens are not here
    if (!stretch || stretch[1] === data.limits.tokens) continue;
    text.replaceChildren();
    drawTokens(text, row.tokens, stretch, scale);
  }
}

// [first, end] of the tokens that the policy sampled at a time: those with an advantage.
function sampledStretches({text, advantage}) {
  const found = [];
  text.forEach((_, i) => {
    if (typeof advantage[i] !== "number") return;
    const last = found[found.length - 1];
    if (last?.[1] === i) last[1]++;
    else found.push([i, i + 1]);
  });
  return found;
}

function drawTokens(line, tokens, [first, end], {figure, middle, reach}) {
  line.classList.add("tokens");
  line.addEventListener("pointerover", (event) => {
    const i = event.target.dataset.i;
    if (i === undefined) return;
    const told = ["value", "advantage", "reward", "surprise"]
      .filter((name) => tokens[name])
      .map((name) => `${name} ${tokens[name][i] ?? "none"}`);
    byId("token-readout").textContent = `${JSON.stringify(tokens.text[i])}: ${told.join(", ")}`;
  });
  for (let i = first; i < end; i++) {
    const value = tokens[figure]?.[i],
      text = tokens.text[i];
    const span = put(line, "span", {}, text.replace(/\n/g, "↵\n") || "▯");
    if (typeof value === "number") span.style.background = shade((value - middle) / reach);
    else span.className = "observed";
    span.dataset.i = i;
  }
}
