"use strict";
// The curves of runs, drawn by uPlot.

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

// The texts of an axis: as many digits as it takes to tell the ticks apart.
function ticksOf(_, ticks) {
  for (let digits = 3; digits < 8; digits++) {
    const texts = ticks.map((tick) => number(tick, digits));
    if (new Set(texts).size === texts.length) return texts;
  }
  return ticks.map(String);
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
  const card = el("section", { class: "chart", "aria-label": title }, el("h3", {}, title),
    note ? el("p", { class: "soft" }, note) : null,
    place);
  const series = [{ label: "step", value: (_, step) => (step === null ? "–" : String(step)) }];
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
      bands.push({ series: [first + 2, first + 1], fill: faded(line.colour, lines.length > 2 ? 0.1 : 0.18) });
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
    ctx.textBaseline = "bottom";
    ctx.setLineDash([4, 4]);
    stages.forEach(([step, name], at) => {
      const x = Math.max(plot.valToPos(step, "x", true), bbox.left);
      if (x > bbox.left + bbox.width || step > joined[0][joined[0].length - 1]) return;
      if (at) { ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke(); }
      if (stages.length < 2) return;
      ctx.textAlign = x + ctx.measureText(visible(name)).width > ctx.canvas.width ? "right" : "left";
      ctx.fillText(visible(name), x, bbox.top - 3 * devicePixelRatio);
    });
    ctx.restore();
  };
  const draw = () => {
    const plot = new uPlot({
      width: Math.max(220, place.clientWidth), height: 210, padding: [stages.length > 1 ? 20 : 8, 10, 0, 0], series, bands: bands.length ? bands : undefined,
      scales: { x: { time: false }, y: { range: range || aroundValues } },
      axes: [{ ...axis(), size: 34 }, { ...axis(), size: 58, values: ticksOf }],
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
