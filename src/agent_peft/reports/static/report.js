"use strict";
// The page of a report. Everything that a model, an environment or a configuration said goes into the page as
// text nodes: nothing here sets HTML.

// ---- elements ----------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "g", "text", "title", "line"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "value") node.value = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// Characters without a shape of their own, and those that reorder a line, are shown as escapes.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
function visible(text) {
  return String(text).replace(HIDDEN, (c) => {
    const code = c.charCodeAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(Math.max(digits, Math.trunc(Math.abs(value)).toString().length))));
}
const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const rate = (r) => (r ? `${percent(r.value)} (${(100 * r.low).toFixed(0)}–${(100 * r.high).toFixed(0)})` : "–");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function table(heads, rows, caption) {
  return el("div", { class: "wide" }, el("table", { class: "plain" },
    caption ? el("caption", { class: "soft" }, caption) : null,
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, visible(head))))),
    el("tbody", {}, rows)));
}
const row = (head, cells, attributes = {}) =>
  el("tr", attributes, el("th", { scope: "row" }, visible(head)), cells);
const cell = (text) => el("td", { class: "number" }, visible(text));

// ---- what is shown -------------------------------------------------------------------------------------------

let values = JSON.parse(document.getElementById("values").textContent);
const live = values === null;
const state = { tab: "curves", theme: null, smooth: 1, seeds: true, view: "chat", colour: "logprob", chosen: null,
  shown: 200, filters: { run: 0, place: "training", step: "", stage: "", outcome: "", skill: "", stop: "", task: "",
  sort: "newest" }, hits: null, query: "" };
const COLOURS = ["#1f77b4", "#e07b00", "#2a9d55", "#c2559d", "#8a63d2", "#0aa1b5", "#b0413e", "#8c8c1a"];
const colourOf = (index) => COLOURS[index % COLOURS.length];

// ---- episodes: in the page, beside it, or from the server -----------------------------------------------------

const arriving = new Map();
const kept = new Map();  // the latest files, parsed; a Map keeps the order in which they came
window.agentPeft = {
  take(key, content) {
    const waiting = arriving.get(key);
    arriving.delete(key);
    if (waiting) waiting(content);
  },
};

function load(key) {
  if (kept.has(key)) return Promise.resolve(kept.get(key));
  const inside = document.getElementById(key);
  const content = inside ? Promise.resolve(JSON.parse(inside.textContent)) : new Promise((done) => {
    arriving.set(key, done);
    const folder = live ? "episodes" : values.episodes_in;
    const script = el("script", { src: `${encodeURIComponent(folder)}/${key}.js` });
    script.onload = () => script.remove();
    script.onerror = () => {
      script.remove();
      window.agentPeft.take(key, { words: [], episodes: [], fault: `the file ${folder}/${key}.js is not there: ` +
        "it belongs beside this page" });
    };
    document.head.append(script);
  });
  return content.then((loaded) => {
    kept.set(key, loaded);
    if (kept.size > 12) kept.delete(kept.keys().next().value);
    return loaded;
  });
}

// One object for each episode of a run: its place and its facts.
const lists = new Map();
function episodesOf(run) {
  if (!lists.has(run)) {
    const { files, texts, columns } = values.runs[run].episodes;
    const list = [];
    let at = 0;
    for (const file of files) {
      for (let n = 0; n < file.episodes; n++, at++) {
        list.push({ run, file, n, stage: texts.stage[columns.stage[at]], group: columns.group[at],
          attempt: columns.attempt[at], task: texts.task[columns.task[at]], skills: texts.skills[columns.skills[at]],
          outcome: texts.outcome[columns.outcome[at]], stop: texts.stop_reason[columns.stop_reason[at]],
          reward: columns.reward[at], advantage: columns.advantage[at], tokens: columns.tokens[at] });
      }
    }
    lists.set(run, list);
  }
  return lists.get(run);
}

// ---- curves ----------------------------------------------------------------------------------------------------

const CURVES = [
  ["reward", "Reward", "mean return of an episode"],
  ["success", "Success", "share of correct episodes; a single run has the 95 % interval over the step's tasks"],
  ["loss", "Loss", "on policy its value says little: advantages have mean zero"],
  ["kl", "KL to the reference", "nats"],
  ["approx_kl", "KL of the update", "between the policy that sampled and the one updated, nats"],
  ["entropy", "Entropy", "of the sampling distribution, nats"],
  ["surprisal", "Surprisal", "mean −log π, nats; on policy it estimates the entropy"],
  ["gradient_norm", "Gradient norm", "before clipping"],
  ["clip_fraction", "Clip fraction", "share of tokens whose gradient the clip took away"],
  ["mismatch", "Mismatch", "mean |Δ log p| between sampler and trainer, nats"],
  ["groups_with_signal", "Groups with signal", "share of groups that teach something"],
  ["tokens_per_second", "Tokens per second", "sampled tokens, over the whole step"],
];
let charts = [];

function smoothed(list, window) {
  if (window < 2) return list;
  return list.map((value, at) => {
    if (value === null || value === undefined) return null;
    const recent = list.slice(Math.max(0, at - window + 1), at + 1).filter((x) => x !== null && x !== undefined);
    return recent.reduce((sum, x) => sum + x, 0) / recent.length;
  });
}

// The lines of one metric: { label, colour, steps, values, low, high }.
function linesOf(metric) {
  const told = values.runs.map((run, index) => ({ run, index })).filter(({ run }) =>
    (run.curves.metrics[metric] || []).some((value) => value !== null));
  const known = new Set(told.map(({ index }) => index));
  const groups = state.seeds ? values.seeds.map((seeds) => seeds.filter((index) => known.has(index)))
    : [...known].map((index) => [index]);
  return groups.filter((group) => group.length).map((group) => {
    const curves = group.map((index) => {
      const { step, metrics } = values.runs[index].curves;
      return new Map(smoothed(metrics[metric], state.smooth).map((value, at) => [step[at], value]));
    });
    const colour = colourOf(group[0]);
    const label = visible(values.runs[group[0]].name);
    if (group.length === 1) {
      const steps = [...curves[0].keys()];
      const line = { label, colour, steps, values: [...curves[0].values()] };
      const interval = values.runs[group[0]].intervals;
      if (metric === "success" && interval.step.length && state.smooth === 1) {
        const low = new Map(interval.step.map((step, at) => [step, interval.low[at]]));
        const high = new Map(interval.step.map((step, at) => [step, interval.high[at]]));
        line.low = steps.map((step) => low.get(step) ?? null);
        line.high = steps.map((step) => high.get(step) ?? null);
      }
      return line;
    }
    const steps = [...new Set(curves.flatMap((curve) => [...curve.keys()]))].sort((a, b) => a - b);
    const line = { label: `${label} and ${group.length - 1} more seed${group.length > 2 ? "s" : ""}`, colour, steps,
      values: [], low: [], high: [] };
    for (const step of steps) {  // the mean over seeds, with Student's interval
      const seeds = curves.map((curve) => curve.get(step)).filter((x) => x !== null && x !== undefined);
      const mean = seeds.reduce((sum, x) => sum + x, 0) / seeds.length;
      const spread = Math.sqrt(seeds.reduce((sum, x) => sum + (x - mean) ** 2, 0) / (seeds.length - 1));
      const half = values.t95[Math.min(seeds.length - 1, values.t95.length) - 1] * spread / Math.sqrt(seeds.length);
      line.values.push(seeds.length ? mean : null);
      line.low.push(seeds.length > 1 ? mean - half : null);
      line.high.push(seeds.length > 1 ? mean + half : null);
    }
    return line;
  });
}

const faded = (colour, part) => colour + Math.round(255 * part).toString(16).padStart(2, "0");

// The bounds of the y axis; a constant gets some room, and no values at all get 0 to 1.
function aroundValues(_, low, high) {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  return low === high ? (low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2]) : uPlot.rangeNum(low, high, 0.1, true);
}

// Draw lines in a card. ``stages`` are [first step, name] pairs.
function chart(title, note, lines, { stages = [], stacked = false, range = null } = {}) {
  const place = el("div", {});
  const card = el("section", { class: "chart", "aria-label": title }, el("h3", {}, title), el("p", { class: "soft" }, note),
    place);
  const series = [{ label: "step" }];
  const bands = [];
  const tables = [];
  const raw = [null];
  for (const line of lines) {
    const first = series.length;
    const few = line.values.filter((value) => value !== null).length < 40;
    series.push({ label: line.label, stroke: line.colour, width: 1.6, spanGaps: true, points: { show: few, size: 4 },
      fill: stacked ? faded(line.colour, 0.55) : undefined,
      value: (_, value, at, index) => number(line.told && index !== null ? line.told[index] : value) });
    const columns = [line.steps, line.values];
    if (line.low) {
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, class: "hidden-row", label: "" };
      series.push({ ...hidden }, { ...hidden });
      bands.push({ series: [first + 2, first + 1], fill: faded(line.colour, 0.18) });
      columns.push(line.low, line.high);
    }
    tables.push(columns);
  }
  const joined = tables.length ? uPlot.join(tables) : [[]];
  const axis = () => ({ stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") },
    font: "11px system-ui" });
  const drawStages = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = css("--soft");
    ctx.font = `${11 * devicePixelRatio}px system-ui`;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.setLineDash([4, 4]);
    stages.forEach(([step, name], at) => {
      const x = Math.max(plot.valToPos(step, "x", true), bbox.left);
      if (x > bbox.left + bbox.width || step > joined[0][joined[0].length - 1]) return;
      if (at) { ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke(); }
      if (stages.length > 1) ctx.fillText(visible(name), x + 4, bbox.top + 8 * devicePixelRatio);
    });
    ctx.restore();
  };
  const draw = () => {
    const plot = new uPlot({
      width: Math.max(220, place.clientWidth), height: 210, series, bands: bands.length ? bands : undefined,
      scales: { x: { time: false }, y: { range: range || aroundValues } },
      axes: [{ ...axis(), size: 34 }, { ...axis(), size: 58, values: (_, ticks) => ticks.map((tick) => number(tick)) }],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      legend: { live: true }, hooks: { draw: [drawStages] },
    }, joined, place);
    charts.push({ plot, place });
  };
  return { card, draw };
}

function drawCurves(main) {
  charts.forEach(({ plot }) => plot.destroy());
  charts = [];
  const several = values.seeds.some((seeds) => seeds.length > 1);
  const redraw = () => render();
  main.append(el("div", { class: "bar" },
    el("label", {}, "mean of the last ", el("select", { "aria-label": "steps that are averaged", onchange: (event) => {
      state.smooth = Number(event.target.value); redraw(); } },
      [1, 5, 10, 25].map((n) => el("option", { value: n, selected: n === state.smooth }, String(n)))),
      state.smooth === 1 ? " step" : " steps"),
    several ? el("label", {}, el("input", { type: "checkbox", checked: state.seeds, onchange: (event) => {
      state.seeds = event.target.checked; redraw(); } }), " seeds of one configuration as a mean with its 95 % interval") : null,
    el("span", { class: "soft" }, "Drag over a chart to zoom, click twice to see all.")));
  const stages = values.runs[0].curves.stages;
  const same = values.runs.every((run) => JSON.stringify(run.curves.stages) === JSON.stringify(stages));
  const options = { stages: same ? stages : [] };
  const grid = el("div", { class: "charts" });
  const made = [];
  for (const [metric, title, note] of CURVES) {
    const lines = linesOf(metric);
    if (lines.length) made.push(chart(title, note, lines, metric === "success" ? { ...options, range: () => [0, 1.02] } : options));
  }
  values.runs.forEach((run, index) => {
    const of = values.runs.length > 1 ? `: ${visible(run.name)}` : "";
    const own = { stages: run.curves.stages };
    const reasons = Object.entries(run.stops.shares);
    if (reasons.length) {
      let sums = run.stops.step.map(() => 0);
      const lines = reasons.map(([reason, shares], at) => {
        sums = sums.map((sum, n) => sum + shares[n]);
        return { label: visible(reason), colour: colourOf(at), steps: run.stops.step, values: sums, told: shares };
      });
      made.push(chart("Stop reasons" + of, "share of the step's episodes, stacked", lines.reverse(),
        { ...own, stacked: true, range: () => [0, 1.02] }));
    }
    const skills = Object.entries(run.skills.rates);
    if (skills.length > 1) {
      const note = `by a task's first skill, over ${run.skills.width} step${run.skills.width > 1 ? "s" : ""} at a time` +
        (run.skills.others > 0 ? `; ${run.skills.others} rarer skills are not drawn` : "");
      made.push(chart("Success by skill" + of, note, skills.map(([skill, rates], at) => ({ label: visible(skill),
        colour: colourOf(at), steps: run.skills.step, values: rates })), { ...own, range: () => [0, 1.02] }));
    }
  });
  if (!made.length) main.append(el("p", {}, "No step is done yet."));
  grid.append(...made.map(({ card }) => card));
  main.append(grid);
  made.forEach(({ draw }) => draw());
  const usual = new Set(CURVES.map(([metric]) => metric));
  const others = [...new Set(values.runs.flatMap((run) => Object.keys(run.curves.metrics)))].filter((name) =>
    !usual.has(name) && values.runs.some((run) => new Set(run.curves.metrics[name] || []).size > 1));
  if (others.length) {
    const more = el("div", { class: "charts" });
    main.append(el("details", { ontoggle: (event) => {
      if (!event.target.open || more.childNodes.length) return;
      const rest = others.map((name) => chart(visible(name), "", linesOf(name), options));
      more.append(...rest.map(({ card }) => card));
      rest.forEach(({ draw }) => draw());
    } }, el("summary", {}, el("h2", {}, `${others.length} more metrics`)), more));
  }
}

// ---- evaluations ------------------------------------------------------------------------------------------------

function drawEvaluations(main) {
  const signed = (value, digits) => (value < 0 && Number(value.toFixed(digits)) ? "−" : "+") + Math.abs(value).toFixed(digits);
  const change = (test) => (test ? `${signed(100 * test.difference, 1)} (${signed(100 * test.low, 0)}…${signed(100 * test.high, 0)})` : "");
  let any = false;
  for (const run of values.runs) {
    const made = run.evaluations;
    if (!made.length) continue;
    any = true;
    const rows = [
      row("step", made.map((one) => cell(one.step === null ? "" : one.step))),
      row("tasks", made.map((one) => cell(one.success.tasks))),
      row("success (95 %)", made.map((one) => cell(rate(one.success)))),
    ];
    if (made.some((one) => one.score)) rows.push(row("score (95 %)", made.map((one) => cell(rate(one.score)))));
    if (made.some((one) => one.reward)) rows.push(row("reward (95 %)", made.map((one) => cell(one.reward ?
      number(one.reward.value) + (one.reward.low === null ? "" : ` (${number(one.reward.low)}…${number(one.reward.high)})`) : "–"))));
    if (made.length > 1) {
      rows.push(row("change, points (95 %)", made.map((one) => cell(change(one.change)))));
      rows.push(row("p, if no change", made.map((one) => cell(one.change ? number(one.change.p, 2) : ""))));
    }
    for (const k of [...new Set(made.flatMap((one) => Object.keys(one.pass_at)))].filter((k) => k !== "1"))
      rows.push(row(`pass@${k}`, made.map((one) => cell(percent(one.pass_at[k])))));
    for (const reason of [...new Set(made.flatMap((one) => Object.keys(one.stop_reasons)))].sort())
      rows.push(row(`ended: ${reason}`, made.map((one) => cell(percent((one.stop_reasons[reason] || 0) / one.attempts)))));
    rows.push(row("invalid actions", made.map((one) => cell(percent(one.invalid_actions)))));
    rows.push(row("turns", made.map((one) => cell(one.mean_turns.toFixed(2)))));
    rows.push(row("action tokens", made.map((one) => cell(one.mean_action_tokens.toFixed(1)))));
    if (made.some((one) => one.left_out)) rows.push(row("left out: environment failed", made.map((one) => cell(one.left_out))));
    main.append(el("h2", {}, visible(run.name)), table(["", ...made.map((one) => one.name)], rows));
    const skills = [...new Set(made.flatMap((one) => Object.keys(one.by_skill)))].sort();
    if (skills.length > 1) {
      main.append(el("h3", {}, "Success by skill (95 %)"), table(["skill", "tasks", ...made.map((one) => one.name)],
        skills.map((skill) => row(skill, [cell([...new Set(made.filter((one) => one.by_skill[skill]).map((one) =>
          one.by_skill[skill].tasks))].join("/")), made.map((one) => cell(rate(one.by_skill[skill])))]))));
    }
  }
  if (!any) main.append(el("p", {}, "There are no evaluations yet."));
  else main.append(el("p", { class: "soft" }, "A change is that since the column before, on the same tasks, in percentage points; " +
    "p is that of an exact paired test. A change with p below 0.05 is unlikely to be luck."));
  if (values.pairs.length) {
    main.append(el("h2", {}, "Between runs, on the same tasks"), table(["evaluation", "from", "to", "change, points (95 %)", "p"],
      values.pairs.map((pair) => row(pair.evaluation, [el("td", {}, visible(values.runs[pair.one].name)),
        el("td", {}, visible(values.runs[pair.other].name)), cell(change(pair)), cell(number(pair.p, 2))]))));
  }
}

// ---- configuration ----------------------------------------------------------------------------------------------

function drawConfiguration(main) {
  const keys = [...new Set(values.runs.flatMap((run) => Object.keys(run.config)))];
  const differs = (key) => new Set(values.runs.map((run) => run.config[key])).size > 1;
  const lines = (chosen) => chosen.map((key) => row(key, values.runs.map((run) =>
    el("td", { class: "value" }, key in run.config ? visible(run.config[key]) : "–")), { class: differs(key) ? "differs" : null }));
  const heads = ["key", ...values.runs.map((run) => run.name)];
  if (values.runs.length > 1) {
    const different = keys.filter(differs);
    main.append(el("h2", {}, "What differs between the runs"), different.length ? table(heads, lines(different))
      : el("p", {}, "Nothing: their configurations are equal."));
  }
  const place = el("div", {});
  const fill = (text) => place.replaceChildren(table(heads, lines(keys.filter((key) => key.includes(text) ||
    values.runs.some((run) => (run.config[key] || "").includes(text))))));
  fill("");
  main.append(el("h2", {}, "Every effective value"), el("input", { type: "search", placeholder: "filter keys and values",
    "aria-label": "filter keys and values", oninput: (event) => fill(event.target.value) }), place);
}

// ---- syntax -----------------------------------------------------------------------------------------------------

const SQL_WORDS = "select from where and or not in is null like between order by group having limit offset join left right inner " +
  "outer on as insert into values update set delete create table drop alter add distinct union all case when then else end exists " +
  "with count sum avg min max asc desc primary key index default cast using replace";
const SHELL_WORDS = "if then else elif fi for while until do done case esac in function return exit export local echo cd ls cat grep " +
  "find awk sed sort uniq wc head tail cut xargs mkdir rm cp mv touch chmod chown ps kill test read set printf tr du df stat diff tar";
const STRINGS = `"(?:[^"\\\\\\n]|\\\\.)*"|'[^'\\n]*'`;
const SYNTAX = {
  sql: new RegExp(`(?<comment>--[^\\n]*)|(?<string>${STRINGS}|\`[^\`\\n]*\`)|(?<number>\\b\\d+(?:\\.\\d+)?\\b)|(?<keyword>\\b(?:${
    SQL_WORDS.replaceAll(" ", "|")})\\b)`, "gi"),
  shell: new RegExp(`(?<comment>(?<=^|\\s)#[^\\n]*)|(?<string>${STRINGS})|(?<number>\\$\\{?\\w+\\}?|(?<=\\s)--?[a-zA-Z][\\w-]*)|(?<keyword>(?<![\\w/.-])(?:${
    SHELL_WORDS.replaceAll(" ", "|")})(?![\\w/.-])|[|;&]{1,2}|&gt;|[<>]{1,2})`, "gm"),
};
const LANGUAGES = { sql: "sql", sqlite: "sql", mysql: "sql", bash: "shell", sh: "shell", shell: "shell", zsh: "shell" };
const HIGHLIGHTED = 50000;  // characters of a message; the rest stays plain

// The coloured parts of a text: [start, end, class], in order.
function syntax(text) {
  const parts = [];
  for (const fence of text.slice(0, HIGHLIGHTED).matchAll(/```(\w*)[^\n]*\n([^]*?)(?:```|$)/g)) {
    const guess = /^\s*(select|insert|update|delete|with|create|alter|drop|show|describe|pragma)\b/i.test(fence[2]) ? "sql" : null;
    const language = LANGUAGES[fence[1].toLowerCase()] || (fence[1] ? null : guess);
    if (!language) continue;
    const start = fence.index + fence[0].indexOf("\n") + 1;
    for (const match of fence[2].matchAll(SYNTAX[language])) {
      const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
      parts.push([start + match.index, start + match.index + match[0].length, kind]);
    }
  }
  return parts;
}

// ---- tokens of an episode ---------------------------------------------------------------------------------------

const decoder = new TextDecoder();

// The tokens of an episode in order, each with its text, its place in the whole text, and its numbers.
function tokensOf(content, episode) {
  if (!episode.tokens) return null;
  if (episode.spelled) return episode.spelled;
  const list = [];
  const written = [];
  episode.runs.forEach((length, at) => { for (let n = 0; n < length; n++) written.push(at % 2 === 1); });
  const advantages = (episode.advantages || []).flatMap(([value, count]) => Array(count).fill(value));
  let action = 0, at = 0;
  episode.tokens.forEach((place, index) => {
    const [id, word] = content.words[place];
    const token = { id, index, mask: written[index], text: word, start: 0, end: 0 };
    if (token.mask) {
      token.sampler = episode.sampler ? episode.sampler[action] : undefined;
      token.trainer = episode.trainer ? episode.trainer[action] : undefined;
      token.advantage = episode.advantages ? advantages[action] : undefined;
      action += 1;
      if (Number.isFinite(token.sampler) && Number.isFinite(token.trainer)) token.mismatch = token.trainer - token.sampler;
    }
    list.push(token);
  });
  // Tokens that are parts of characters: their text is that of the whole, at the first of them.
  for (let i = 0; i < list.length; i++) {
    if (typeof list[i].text === "string") continue;
    let last = i;
    while (last + 1 < list.length && typeof list[last + 1].text !== "string" && list[last + 1].mask === list[i].mask) last += 1;
    const bytes = list.slice(i, last + 1).flatMap((token) => token.text);
    for (let n = i; n <= last; n++) { list[n].bytes = list[n].text; list[n].text = ""; }
    list[i].text = decoder.decode(new Uint8Array(bytes));
    i = last;
  }
  for (const token of list) { token.start = at; at += token.text.length; token.end = at; }
  episode.spelled = list;
  return list;
}

// The messages as parts of the tokens: { role, start, end } in characters, and what the chat template wrote around them.
function segmentsOf(tokens, episode) {
  const text = tokens.map((token) => token.text).join("");
  const starts = tokens.filter((token, at) => token.mask && !(at && tokens[at - 1].mask)).map((token) => token.start);
  const speaking = episode.messages.map(([role], at) => (role === "assistant" ? at : -1)).filter((at) => at >= 0);
  const sampled = new Map(speaking.slice(-starts.length).map((at, n) => [at, starts[n + Math.max(0, starts.length - speaking.length)]]));
  const segments = [];
  let at = 0;
  episode.messages.forEach(([role, content], n) => {
    const from = Math.max(at, sampled.get(n) ?? at);
    let start = text.indexOf(content, from), length = content.length;
    if (start < 0) { start = text.indexOf(content.trim(), from); length = content.trim().length; }
    if (start < 0) return;
    if (start > at) segments.push({ role: null, start: at, end: start });
    segments.push({ role, start, end: start + length, message: n, turn: sampled.has(n) ? [...sampled.keys()].indexOf(n) : null });
    at = start + length;
  });
  if (at < text.length) segments.push({ role: null, start: at, end: text.length });
  return { text, segments };
}

const warm = (part) => `rgba(224, 108, 30, ${(0.75 * Math.min(1, Math.max(0, part))).toFixed(3)})`;
const cold = (part) => `rgba(46, 125, 210, ${(0.75 * Math.min(1, Math.max(0, part))).toFixed(3)})`;
const SCALES = {  // the background of a token, and the legend
  none: { title: "no colours", colour: () => "", legend: () => [] },
  logprob: { title: "log-probability", colour: (t) => (Number.isFinite(t.sampler) ? warm(-t.sampler / 4) : ""),
    legend: () => [["0 (certain)", warm(0)], ["−1", warm(0.25)], ["−2", warm(0.5)], ["≤ −4 nats", warm(1)]] },
  advantage: { title: "advantage", colour: (t, most) => (t.advantage ? (t.advantage > 0 ? cold : warm)(Math.abs(t.advantage) / most) : ""),
    legend: (most) => [[`−${number(most)}`, warm(1)], ["0", ""], [`+${number(most)}`, cold(1)]] },
  mask: { title: "mask", colour: (t) => (t.mask ? cold(0.45) : ""), legend: () => [["written by the agent", cold(0.45)], ["read", ""]] },
  mismatch: { title: "mismatch", colour: (t) => (Number.isFinite(t.mismatch) ? warm(Math.abs(t.mismatch) / 0.5) : ""),
    legend: () => [["0", warm(0)], ["0.1", warm(0.2)], ["≥ 0.5 nats between sampler and trainer", warm(1)]] },
};
const largest = (tokens) => tokens.reduce((most, token) => Math.max(most, Math.abs(token.advantage || 0)), 0) || 1;

function tipOf(token) {
  const lines = [`“${visible(token.text).replaceAll("\n", "\\n").slice(0, 80)}”`, `token ${token.id} at place ${token.index}`];
  if (token.bytes) lines.push(`part of a character: bytes ${token.bytes.map((b) => b.toString(16)).join(" ")}`);
  if (!token.mask) return [...lines, "read: it is never trained"].join("\n");
  lines.push("written by the agent");
  if (Number.isFinite(token.sampler)) lines.push(`log p as sampled ${token.sampler.toFixed(4)} (${percent(Math.exp(token.sampler))})`);
  if (Number.isFinite(token.trainer)) lines.push(`log p of the trainer ${token.trainer.toFixed(4)}`);
  if (Number.isFinite(token.mismatch)) lines.push(`mismatch ${token.mismatch.toFixed(4)} nats`);
  if (token.advantage !== undefined) lines.push(`advantage ${token.advantage === null ? "none" : token.advantage.toFixed(4)}`);
  return lines.join("\n");
}

const LIMIT = 12000;  // characters of a message that are drawn at once

// The characters [start, end) of an episode as coloured tokens, with at most LIMIT at a time.
function drawTokens(tokens, start, end, highlighted) {
  const box = el("span", {});
  const most = largest(tokens);
  const parts = highlighted ? syntax(highlighted).map(([a, b, kind]) => [a + start, b + start, kind]) : [];
  let next = tokens.findIndex((token) => token.end > start || (token.start >= start && token.bytes)), part = 0;
  if (next < 0) next = tokens.length;
  const more = () => {
    const begin = next < tokens.length ? Math.max(start, tokens[next].start) : end;
    const pieces = document.createDocumentFragment();
    for (; next < tokens.length && tokens[next].start < end && tokens[next].start < begin + LIMIT; next++) {
      const token = tokens[next];
      const from = Math.max(start, token.start), to = Math.min(end, token.end, from + LIMIT);
      if (from >= to) continue;
      const span = el("span", { class: "token", tabindex: -1 });
      span.token = token;
      span.style.backgroundColor = SCALES[state.colour].colour(token, most);
      let at = from;
      while (part < parts.length && parts[part][1] <= from) part += 1;
      for (let p = part; p < parts.length && parts[p][0] < to; p++) {
        const a = Math.max(parts[p][0], from), b = Math.min(parts[p][1], to);
        if (a > at) span.append(visible(token.text.slice(at - token.start, a - token.start)));
        if (b > a) span.append(el("span", { class: parts[p][2] }, visible(token.text.slice(a - token.start, b - token.start))));
        at = Math.max(at, b);
      }
      if (at < to) span.append(visible(token.text.slice(at - token.start, to - token.start)));
      if (Math.min(end, token.end) > to) span.append(` … ${Math.min(end, token.end) - to} more characters in this token`);
      pieces.append(span);
    }
    const left = next < tokens.length ? end - Math.max(start, tokens[next].start) : 0;
    if (left > 0) pieces.append(moreButton(left, more));
    box.append(pieces);
  };
  more();
  return box;
}

function moreButton(left, more) {
  return el("button", { onclick: (event) => { event.target.remove(); more(); } }, `show ${left.toLocaleString("en")} more characters`);
}

function drawPlain(text, highlighted) {
  const box = el("span", {});
  const parts = highlighted ? syntax(text) : [];
  let begin = 0;
  const more = () => {
    const end = Math.min(text.length, begin + LIMIT);
    let at = begin;
    for (const [a, b, kind] of parts) {
      if (b <= at || a >= end) continue;
      if (a > at) box.append(visible(text.slice(at, a)));
      box.append(el("span", { class: kind }, visible(text.slice(Math.max(a, at), Math.min(b, end)))));
      at = Math.min(b, end);
    }
    box.append(visible(text.slice(at, end)));
    begin = end;
    if (begin < text.length) box.append(moreButton(text.length - begin, more));
  };
  more();
  return box;
}

// ---- the viewer ---------------------------------------------------------------------------------------------------

const sameGroup = (a, b) => a.run === b.run && a.file.key === b.file.key && a.group === b.group;
const MARKS = { correct: "✓", incorrect: "✗", unknown: "?" };
const outcomeMark = (outcome) => el("span", { class: MARKS[outcome] ? outcome : "unknown" }, `${MARKS[outcome] || "?"} ${visible(outcome)}`);

function fitting() {
  const f = state.filters;
  const list = episodesOf(f.run).filter((one) =>
    (f.place === "training" ? one.file.evaluation === null : one.file.evaluation === f.place) &&
    (f.step === "" || f.place !== "training" || one.file.step === Number(f.step)) &&
    (!f.stage || f.place !== "training" || one.stage === f.stage) && (!f.outcome || one.outcome === f.outcome) &&
    (!f.stop || one.stop === f.stop) && (!f.skill || one.skills.includes(f.skill)) && (!f.task || one.task.includes(f.task)) &&
    (!state.hits || state.hits.has(`${one.file.key}/${one.n}`)));
  const orders = {
    newest: (a, b) => b.file.step - a.file.step || a.n - b.n, oldest: (a, b) => a.file.step - b.file.step || a.n - b.n,
    worst: (a, b) => a.reward - b.reward, best: (a, b) => b.reward - a.reward, longest: (a, b) => b.tokens - a.tokens,
  };
  return list.sort(orders[f.sort]);
}

function place(one) {
  return one.file.evaluation === null ? `step ${one.file.step}` : `evaluation ${visible(one.file.evaluation)}`;
}

function drawTrajectories(main) {
  const run = state.filters.run;
  const all = episodesOf(run);
  if (!values.runs.some((_, index) => episodesOf(index).length)) {
    main.append(el("p", {}, "No trajectories are on disk: no step is done yet, or they were not kept."));
    return;
  }
  const { texts, files } = values.runs[run].episodes;
  const evaluations = files.filter((file) => file.evaluation !== null).map((file) => file.evaluation);
  const steps = [...new Set(files.filter((file) => file.evaluation === null).map((file) => file.step))].sort((a, b) => a - b);
  const skills = [...new Set(texts.skills.flat())].sort();
  const set = (name) => (event) => { state.filters[name] = name === "run" ? Number(event.target.value) : event.target.value;
    state.shown = 200; if (name === "run") { state.hits = null; state.query = ""; Object.assign(state.filters, { stage: "", step: "",
      skill: "", stop: "", place: "training" }); render(); } else fillList(); };
  const select = (label, name, options, full = false) => el("label", { class: full ? "full" : null }, label,
    el("select", { onchange: set(name), "aria-label": label }, options.map(([value, text]) =>
      el("option", { value, selected: String(state.filters[name]) === String(value) }, visible(text)))));
  const any = (list) => [["", "any"], ...list.map((value) => [value, value])];
  const progress = el("span", { class: "soft", role: "status" });
  const search = el("input", { type: "search", id: "search", value: state.query, placeholder: "words in the chats, then Enter" });
  const list = el("div", { class: "list", role: "region", "aria-label": "episodes" });
  const shown = el("p", { class: "soft", role: "status" });
  const side = el("div", {}, el("div", { class: "filters" },
    values.runs.length > 1 ? select("run", "run", values.runs.map((one, index) => [index, one.name]), true) : null,
    select("of", "place", [["training", "training"], ...evaluations.map((name) => [name, `evaluation ${name}`])]),
    select("order", "sort", [["newest", "newest first"], ["oldest", "oldest first"], ["worst", "lowest reward first"],
      ["best", "highest reward first"], ["longest", "longest first"]]),
    select("step", "step", [["", "any"], ...steps.map((step) => [step, step])]), select("stage", "stage", any(texts.stage.filter(Boolean))),
    select("outcome", "outcome", any(texts.outcome)), select("ended", "stop", any(texts.stop_reason)),
    skills.length ? select("skill", "skill", any(skills)) : null,
    el("label", {}, "task", el("input", { type: "search", "aria-label": "task", value: state.filters.task, oninput: set("task"), placeholder: "part of its id" })),
    el("label", { class: "full" }, "search", search)), progress, shown, list);
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") find(search.value, progress, fillList); });
  search.addEventListener("search", () => { if (!search.value) find("", progress, fillList); });
  const detail = el("div", { id: "detail" });

  function fillList() {
    const found = fitting();
    state.list = found;
    const at = found.indexOf(state.chosen);
    if (at >= state.shown && at < 2000) state.shown = at + 50;
    shown.textContent = `${found.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} episodes`;
    list.replaceChildren(...found.slice(0, state.shown).map((one) => {
      const button = el("button", { onclick: () => { choose(one);
        if (innerWidth <= 900) detail.scrollIntoView(); }, "aria-current": state.chosen && one === state.chosen ? "true" : null },
        el("span", { class: "task" }, visible(one.task)), el("span", {}, `reward ${number(one.reward)}`),
        el("span", { class: "soft" }, `${place(one)}, group ${one.group}, attempt ${one.attempt}`), outcomeMark(one.outcome));
      one.button = button;
      return button;
    }));
    if (found.length > state.shown) list.append(el("button", { onclick: () => { state.shown += 200; fillList(); } },
      `show 200 more of ${found.length - state.shown}`));
    if (found.length && !(state.chosen && found.includes(state.chosen))) choose(found[0]);
    else if (!found.length) detail.replaceChildren(el("p", {}, "No episode fits these choices."));
    else choose(state.chosen);
    if (state.chosen && state.chosen.button) list.scrollTop = state.chosen.button.offsetTop - list.offsetTop - 60;
  }
  state.fillList = fillList;
  main.append(el("div", { class: "viewer" }, side, detail));
  fillList();
}

// Search the chats of the listed files, one file after another; an empty text ends the search.
let searching = 0;
async function find(text, progress, fillList) {
  const mine = ++searching;
  state.query = text;
  state.hits = null;
  progress.textContent = "";
  if (!text) { fillList(); return; }
  const wanted = text.toLowerCase();
  const files = [...new Set(fitting().map((one) => one.file))];
  const hits = new Set();
  for (const [at, file] of files.entries()) {
    const content = await load(file.key);
    if (mine !== searching) return;
    content.episodes.forEach((episode, n) => {
      if (episode.messages.some(([, said]) => said.toLowerCase().includes(wanted))) hits.add(`${file.key}/${n}`);
    });
    progress.textContent = `searched ${at + 1} of ${files.length} files: ${hits.size} found`;
  }
  state.hits = hits;
  fillList();
}

function choose(one) {
  if (state.chosen && state.chosen.button) state.chosen.button.removeAttribute("aria-current");
  state.chosen = one;
  if (one.button) { one.button.setAttribute("aria-current", "true"); }
  history.replaceState(null, "", `#trajectories/${one.file.key}/${one.n}`);
  drawEpisode();
}

async function drawEpisode() {
  const one = state.chosen;
  const content = await load(one.file.key);
  const detail = document.getElementById("detail");
  if (one !== state.chosen || !detail) return;
  const episode = content.episodes[one.n];
  if (!episode) { detail.replaceChildren(el("p", { class: "notice" }, visible(content.fault || "the file has changed; load the page again"))); return; }
  const tokens = tokensOf(content, episode);
  const siblings = episodesOf(one.run).filter((other) => sameGroup(one, other));
  const facts = [el("h2", {}, visible(one.task)),
    el("p", {}, outcomeMark(one.outcome), `, ended: ${visible(one.stop)}, reward ${number(one.reward)}` +
      (one.advantage === null ? "" : `, advantage ${number(one.advantage)}`) +
      (episode.score === undefined || episode.score === null ? "" : `, score ${number(episode.score)}`)),
    el("p", { class: "soft" }, `${place(one)}${one.stage ? ` of stage ${visible(one.stage)}` : ""}, group ${one.group}, attempt ${one.attempt}` +
      ` of ${siblings.length}; ${one.tokens} tokens, ${episode.num_action_tokens ?? "?"} of them the agent's; skills: ` +
      `${visible(one.skills.join(", ") || "none")}`)];
  const terms = Object.entries(episode.reward_terms || {});
  if (terms.length) facts.push(el("p", { class: "soft" }, `reward = ${terms.map(([name, value]) => `${visible(name)} ${number(value)}`).join(" + ")}`));
  const missing = values.missing_words[one.run];
  if (!tokens) facts.push(el("p", { class: "notice" }, visible(missing ? `The tokens are not shown: ${missing}.`
    : content.fault || "An older version wrote this episode without its tokens.")));
  const views = [["chat", "Chat"], ["siblings", `Siblings (${siblings.length})`], ["tree", "Tree"]];
  const bar = el("div", { class: "bar", role: "group", "aria-label": "view" }, views.map(([name, title]) =>
    el("button", { "aria-pressed": String(state.view === name), onclick: () => { state.view = name; drawEpisode(); } }, title)));
  if (tokens && state.view !== "tree") {
    const most = largest(tokens);
    bar.append(el("label", {}, "colour by ", el("select", { onchange: (event) => { state.colour = event.target.value; drawEpisode(); } },
      Object.entries(SCALES).map(([name, scale]) => el("option", { value: name, selected: name === state.colour }, scale.title)))));
    const legend = el("span", { class: "legend" });
    for (const [text, colour] of SCALES[state.colour].legend(most)) {
      const box = el("span", { class: "box" }, text);
      box.style.backgroundColor = colour;
      legend.append(box);
    }
    bar.append(legend);
  }
  const view = { chat: drawChat, siblings: drawSiblings, tree: drawTree }[state.view];
  detail.replaceChildren(...facts, bar, view(content, one, siblings));
  const first = detail.querySelector(".token");
  if (first) first.tabIndex = 0;
}

function titleOf(episode, role, turn) {
  const parts = [role];
  if (turn !== null && turn !== undefined) {
    parts.push(`turn ${turn + 1}`);
    if (episode.rewards && episode.rewards[turn] !== undefined) parts.push(`reward ${number(episode.rewards[turn])}`);
    if (episode.turn_advantages) parts.push(`advantage ${number(episode.turn_advantages[turn])}`);
    for (const [name, text] of [["invalid_turns", "not understood"], ["cut_turns", "cut by a limit on tokens"],
      ["mistake_turns", "a mistake, not learnt"]]) if ((episode[name] || []).includes(turn)) parts.push(text);
  }
  return visible(parts.join(", "));
}

// An episode's messages from number ``first`` on.
function drawMessages(content, episode, first = 0) {
  const box = el("div", {});
  const tokens = tokensOf(content, episode);
  const message = (role, turn, body) => el("section", { class: `message ${["system", "user", "assistant"].includes(role) ? role : ""}` },
    el("h4", {}, titleOf(episode, role, turn)), el("div", { class: "text", dir: "ltr" }, body));
  if (!tokens) {
    episode.messages.forEach(([role, said], n) => { if (n >= first) box.append(message(role, null, drawPlain(said, role === "assistant"))); });
    return box;
  }
  const { text, segments } = segmentsOf(tokens, episode);
  let open = first === 0;
  for (const segment of segments) {
    if (segment.role !== null) open = open || segment.message >= first;
    if (!open) continue;
    if (segment.role === null) box.append(el("div", { class: "text frame", dir: "ltr" }, drawTokens(tokens, segment.start, segment.end, null)));
    else box.append(message(segment.role, segment.turn, drawTokens(tokens, segment.start, segment.end,
      segment.role === "assistant" ? text.slice(segment.start, segment.end) : null)));
  }
  return box;
}

const drawChat = (content, one) => drawMessages(content, content.episodes[one.n]);

function drawSiblings(content, one, siblings) {
  const own = siblings.map((other) => content.episodes[other.n]).filter(Boolean);
  let common = 0;
  while (own.every((episode) => episode.messages[common] && episode.messages[common][0] === own[0].messages[common][0] &&
    episode.messages[common][1] === own[0].messages[common][1])) common += 1;
  const acting = own[0].messages.findIndex(([role]) => role === "assistant");
  if (own.length === 1) common = 0;
  else if (own.every((episode) => episode.messages.length === common)) common = Math.max(0, acting);
  const box = el("div", {});
  if (own.length === 1) box.append(el("p", { class: "soft" }, "This group has one episode."));
  if (common) box.append(el("details", {}, el("summary", {}, `the ${common} messages that all have in common`),
    own[0].messages.slice(0, common).map(([role, said]) => el("section", { class: `message ${role === "system" || role === "user" ? role : "assistant"}` },
      el("h4", {}, visible(role)), el("div", { class: "text", dir: "ltr" }, drawPlain(said, false))))));
  box.append(el("div", { class: "siblings", tabindex: 0, role: "region", "aria-label": "episodes of the group, side by side" }, siblings.map((other) => el("article", {
    class: `sibling is-${other.outcome === "correct" || other.outcome === "incorrect" ? other.outcome : "unknown"}`, "aria-current": other === one ? "true" : null },
    el("h3", {}, el("button", { onclick: () => choose(other) }, `attempt ${other.attempt}`), " ", outcomeMark(other.outcome)),
    el("p", { class: "soft" }, `reward ${number(other.reward)}${other.advantage === null ? "" : `, advantage ${number(other.advantage)}`}, ${visible(other.stop)}`),
    content.episodes[other.n] ? drawMessages(content, content.episodes[other.n], common) : null))));
  return box;
}

// ---- the group as a tree --------------------------------------------------------------------------------------------

// The compressed trie of token lists: { start, end, members, children }, where the tokens are those of the first member.
function trie(lists, members, start) {
  let end = start;
  const first = lists[members[0]];
  const mask = (member, at) => lists[member][at].mask;
  while (end < first.length && members.every((m) => end < lists[m].length && lists[m][end].id === first[end].id &&
    mask(m, end) === first[end].mask)) end += 1;
  const node = { start, end, members, children: [] };
  const next = new Map();
  for (const member of members) {
    const token = lists[member][end];
    const key = token ? `${token.id}/${token.mask}` : "end";
    if (!next.has(key)) next.set(key, []);
    next.get(key).push(member);
  }
  if (members.length > 1 && next.size > 1) node.children = [...next.values()].map((of) => trie(lists, of, end));
  return node;
}

function drawTree(content, one, siblings) {
  const lists = siblings.map((other) => (content.episodes[other.n] ? tokensOf(content, content.episodes[other.n]) : null));
  if (lists.some((list) => !list)) return el("p", {}, "Without tokens there is no tree.");
  if (siblings.length === 1) return el("p", {}, "This group has one episode, so nothing parts.");
  const root = trie(lists, siblings.map((_, n) => n), 0);
  const box = el("div", {}, el("p", { class: "soft" }, "Each line is read from left to right, one unit of width for each token. Where lines part, " +
    "the agent chose differently; what is shared is computed once. Green: correct. Red: incorrect. Thin and grey: what the agent read."));
  box.append(treePicture(root, lists, siblings, one), treeText(root, lists, siblings, true));
  return box;
}

function treePicture(root, lists, siblings, one) {
  const width = Math.max(300, Math.min(1000, (document.getElementById("detail").clientWidth || 700) - 10));
  const label = Math.min(190, width * 0.42), height = 26, left = 66;
  const longest = Math.max(...lists.map((list) => list.length), root.end + 1);
  const x = (at) => (at <= root.end ? left : left + ((at - root.end) / (longest - root.end)) * (width - left - label - 8));
  const svg = el("svg", { width, height: siblings.length * height + 12, role: "img", "aria-label": "where the episodes of the group part" });
  const colour = (member) => css({ correct: "--good", incorrect: "--bad" }[siblings[member].outcome] || "--unsure");
  let leaf = 0;
  const line = (attributes) => svg.append(el("path", { fill: "none", ...attributes }));
  const walk = (node) => {
    const children = node.children.map((child) => ({ child, y: walk(child) }));
    const y = children.length ? (children[0].y + children[children.length - 1].y) / 2 : leaf++ * height + 16;
    const outcomes = new Set(node.members.map((m) => siblings[m].outcome));
    const paint = outcomes.size === 1 ? colour(node.members[0]) : css("--soft");
    const list = lists[node.members[0]];
    for (let at = node.start; at < node.end;) {
      let to = at;
      while (to < node.end && list[to].mask === list[at].mask) to += 1;
      if (node === root) { line({ d: `M4 ${y}H${left}`, stroke: css("--soft"), "stroke-width": 2 }); break; }
      line({ d: `M${x(at)} ${y}H${x(to)}`, stroke: list[at].mask ? paint : css("--soft"), "stroke-width": list[at].mask ? 4 : 1.5 });
      at = to;
    }
    for (const { child, y: below } of children) line({ d: `M${x(node.end)} ${y}V${below}`, stroke: css("--soft"), "stroke-width": 1.2 });
    if (!children.length) {
      node.members.forEach((member, n) => {
        if (n) leaf += 1;
        const other = siblings[member];
        const group = el("g", { class: "leaf", tabindex: 0, role: "button", onclick: () => { state.view = "chat"; choose(other); },
          onkeydown: (event) => { if (event.key === "Enter") { state.view = "chat"; choose(other); } } },
          el("text", { class: other.outcome, x: width - label, y: y + n * height + 4 },
            `${other === one ? "▸ " : ""}${MARKS[other.outcome] || "?"} #${other.attempt}  reward ${number(other.reward)}`));
        svg.append(group);
        if (n) line({ d: `M${x(node.end)} ${y}V${y + n * height}H${width - label - 6}`, stroke: css("--line"), "stroke-width": 1 });
      });
    }
    return y;
  };
  const y = walk(root);
  svg.append(el("text", { x: 4, y: y - 6 }, `${root.end} tok.`));
  return el("div", { class: "tree-picture wide" }, svg);
}

function treeText(node, lists, siblings, isRoot) {
  const text = lists[node.members[0]].slice(node.start, node.end).map((token) => token.text).join("");
  const mean = node.members.reduce((sum, m) => sum + siblings[m].reward, 0) / node.members.length;
  const names = node.members.map((m) => `#${siblings[m].attempt}`).join(" ");
  const title = isRoot ? `all ${node.members.length} share ${node.end} tokens` :
    `${names}: ${node.end - node.start} tokens, ${node.members.length > 1 ? "mean reward" : "reward"} ${number(mean)} `;
  const box = el("details", { class: "node", open: !isRoot || null }, el("summary", {}, title,
    node.members.length === 1 ? outcomeMark(siblings[node.members[0]].outcome) : null),
    text ? el("div", { class: "text", dir: "ltr" }, drawPlain(text, false)) : null);
  const children = node.children.map((child) => treeText(child, lists, siblings, false));
  if (isRoot) return el("div", {}, box, children);
  box.append(...children);
  return box;
}

// ---- hover and keys ---------------------------------------------------------------------------------------------------

const tip = el("div", { id: "tip", role: "tooltip", hidden: true });
function showTip(span) {
  if (!span || !span.token) { tip.hidden = true; return; }
  tip.textContent = tipOf(span.token);
  tip.hidden = false;
  const box = span.getClientRects()[0] || span.getBoundingClientRect();
  const below = box.bottom + tip.offsetHeight + 10 < innerHeight;
  tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - tip.offsetHeight - 6)}px`;
}
document.addEventListener("mouseover", (event) => showTip(event.target.closest(".token")));
document.addEventListener("focusin", (event) => showTip(event.target.closest(".token")));
document.addEventListener("scroll", () => showTip(null), true);

const KEYS = [["1 2 3 4", "curves, evaluations, configuration, trajectories"], ["j k", "next, previous episode"], ["v", "chat, siblings, tree in turn"],
  ["c", "the next colouring"], ["← →", "the next token, once one has the focus"], ["/", "search"], ["t", "light or dark"], ["?", "these keys"]];
const help = el("dialog", { "aria-label": "keys" }, el("h2", {}, "Keys"), el("table", { class: "plain" }, el("tbody", {}, KEYS.map(([keys, what]) =>
  el("tr", {}, el("td", {}, el("kbd", {}, keys)), el("td", {}, what))))), el("form", { method: "dialog" }, el("button", {}, "close")));
const turn = (list, value) => list[(list.indexOf(value) + 1) % list.length];

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") showTip(null);
  if (event.target.closest("input, select, dialog")) return;
  const on = state.tab === "trajectories" && state.chosen;
  const token = event.target.closest(".token");
  if (token && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
    const all = [...document.querySelectorAll("#detail .token")];
    const next = all[all.indexOf(token) + (event.key === "ArrowRight" ? 1 : -1)];
    if (next) { token.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    event.preventDefault();
  } else if ("1234".includes(event.key)) go(TABS[Number(event.key) - 1][0]);
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") toggleTheme();
  else if (event.key === "/" && on) { document.getElementById("search").focus(); event.preventDefault(); }
  else if ((event.key === "j" || event.key === "k") && on) {
    const next = state.list[state.list.indexOf(state.chosen) + (event.key === "j" ? 1 : -1)];
    if (next) { choose(next); if (next.button) next.button.scrollIntoView({ block: "nearest" }); }
  } else if (event.key === "v" && on) { state.view = turn(["chat", "siblings", "tree"], state.view); drawEpisode(); }
  else if (event.key === "c" && on) { state.colour = turn(Object.keys(SCALES), state.colour); drawEpisode(); }
});

// ---- the page -----------------------------------------------------------------------------------------------------------

const TABS = [["curves", "Curves", drawCurves], ["evaluations", "Evaluations", drawEvaluations],
  ["configuration", "Configuration", drawConfiguration], ["trajectories", "Trajectories", drawTrajectories]];
const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme() { document.documentElement.dataset.theme = state.theme || (dark.matches ? "dark" : "light"); }
function toggleTheme() {
  state.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme();
  render();
}
dark.addEventListener("change", () => { setTheme(); render(); });

function go(tab) {
  state.tab = tab;
  if (tab !== "trajectories") history.replaceState(null, "", `#${tab}`);
  render();
}

function drawRuns() {
  return el("ul", { class: "run-list" }, values.runs.map((run, index) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.backgroundColor = colourOf(index);
    return el("li", {}, swatch, el("strong", {}, visible(run.name)), el("span", { class: `state ${/^[a-z]+$/.test(run.state) ? run.state : ""}` }, visible(run.state)),
      `${run.done} of ${run.steps ?? "?"} steps`, run.cause ? el("span", { class: "incorrect" }, ` ${visible(run.cause)}`) : null,
      el("span", { class: "soft" }, ` ${visible(run.folder)}`), run.notices.map((notice) => el("p", { class: "notice" }, visible(notice))));
  }));
}

const status = el("span", { class: "soft", role: "status" });
function render() {
  showTip(null);
  const scroll = window.scrollY;
  const tabs = el("div", { class: "bar", role: "tablist" }, TABS.map(([name, title]) => el("button", { role: "tab", id: `tab-${name}`,
    "aria-selected": String(state.tab === name), onclick: () => go(name) }, title)));
  const header = el("header", {}, el("div", { class: "bar" }, el("h1", {}, "Agent-PEFT"), tabs, status,
    el("button", { class: "end", onclick: toggleTheme, "aria-label": "light or dark" }, "◐"),
    el("button", { onclick: () => help.showModal(), "aria-label": "keys" }, "?")));
  const main = el("main", { role: "tabpanel", "aria-labelledby": `tab-${state.tab}` });
  document.body.replaceChildren(...[...document.body.querySelectorAll(":scope > script")], header, main, tip, help);
  main.append(state.tab === "trajectories" ? el("details", {}, el("summary", { class: "soft" }, values.runs.length === 1 ? "the run" : `the ${values.runs.length} runs`), drawRuns()) : drawRuns());
  TABS.find(([name]) => name === state.tab)[2](main);
  window.scrollTo(0, scroll);
}

let timer = 0;
addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(() => charts.forEach(({ plot, place }) => {
    if (place.isConnected) plot.setSize({ width: Math.max(220, place.clientWidth), height: 210 });
  }), 120);
});

function openAddress() {
  const [tab, key, n] = location.hash.slice(1).split("/");
  if (TABS.some(([name]) => name === tab)) state.tab = tab;
  if (!key) return;
  const run = values.runs.findIndex((one) => one.episodes.files.some((file) => file.key === key));
  const one = run < 0 ? null : episodesOf(run).find((other) => other.file.key === key && other.n === Number(n));
  if (one) { state.chosen = one; state.filters.run = run; state.filters.place = one.file.evaluation ?? "training"; }
}

const EVERY = 5000;  // milliseconds between two looks at a run in progress
let last = null;
async function refresh() {
  try {
    const answer = await fetch("values.json", { cache: "no-cache" });
    if (!answer.ok) throw new Error(await answer.text());
    const text = await answer.text();
    if (text !== last) {
      const before = state.chosen;
      const starting = last === null;
      last = text;
      values = JSON.parse(text);
      lists.clear();
      kept.clear();
      if (before) state.chosen = (values.runs[before.run] ? episodesOf(before.run) : []).find((one) =>
        one.file.key === before.file.key && one.n === before.n) || null;
      if (starting) openAddress();
      if (!document.activeElement.closest("input, select, dialog")) render();
    }
    status.textContent = `live, ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    status.textContent = `not live any more: ${visible(error.message)}`;
  }
  setTimeout(refresh, EVERY);
}

setTheme();
if (live) refresh();
else {
  status.textContent = `written ${visible(values.made)}`;
  openAddress();
  render();
}
