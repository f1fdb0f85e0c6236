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

// Stages in which the policy acts, and those that learn from what is given, have curves of their own.
const PHASES = [["acting", "Learning from its own episodes"], ["given", "Learning from data"]];
const inPhase = (run, phase) => {
  const reward = run.curves.metrics.reward || [];
  return (at) => (typeof reward[at] === "number") === (phase === "acting");
};
function stagesOf(run, phase) {
  const { step, stages } = run.curves;
  const inside = inPhase(run, phase);
  return stages.filter(([first]) => inside(step.indexOf(first)));
}

// The lines of one metric in a phase: { label, colour, steps, values, low, high }.
function linesOf(metric, phase) {
  const masked = values.runs.map((run) => {
    const inside = inPhase(run, phase);
    return (run.curves.metrics[metric] || []).map((value, at) => (inside(at) ? value : null));
  });
  const told = values.runs.map((run, index) => ({ run, index })).filter(({ index }) =>
    masked[index].some((value) => value !== null));
  const known = new Set(told.map(({ index }) => index));
  const groups = state.seeds ? values.seeds.map((seeds) => seeds.filter((index) => known.has(index)))
    : [...known].map((index) => [index]);
  return groups.filter((group) => group.length).map((group) => {
    const curves = group.map((index) => {
      const inside = inPhase(values.runs[index], phase);
      return new Map(smoothed(masked[index], state.smooth).map((value, at) =>
        [values.runs[index].curves.step[at], value]).filter((_, at) => inside(at)));
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
      const least = metric === "success" ? 0 : -Infinity, most = metric === "success" ? 1 : Infinity;
      line.low.push(seeds.length > 1 ? Math.max(least, mean - half) : null);
      line.high.push(seeds.length > 1 ? Math.min(most, mean + half) : null);
    }
    return line;
  });
}

// The evaluations of each run as points with whiskers, over the steps that were done before.
function heldOut() {
  return values.runs.map((run, index) => {
    const made = run.evaluations.filter((one) => one.step !== null && one.success);
    const of = (name) => made.map((one) => one.success[name]);
    return { label: visible(run.name), colour: colourOf(index), steps: made.map((one) => one.step - 1),
      values: of("value"), low: of("low"), high: of("high"), whiskers: true };
  }).filter((line) => line.steps.length);
}

// What a reader asks first of each run: how good it is, what training changed, and how it does in training.
function headline() {
  return values.runs.slice(0, 4).map((run) => {
    const made = run.evaluations.filter((one) => one.success);
    const first = made[0], last = made[made.length - 1];
    const reached = (run.curves.metrics.success || []).filter((value, at) => inPhase(run, "acting")(at) && value !== null).slice(-10);
    const cards = [];
    if (last) cards.push([percent(last.success.value), `success on ${last.success.tasks} held-out tasks, ${visible(last.name)}`,
      `95 % interval ${(100 * last.success.low).toFixed(0)} to ${(100 * last.success.high).toFixed(0)} %`]);
    if (made.length > 1) cards.push([`${last.success.value < first.success.value ? "−" : "+"}${Math.abs(100 * (last.success.value - first.success.value)).toFixed(1)}`,
      `points since ${visible(first.name)}`, `which had ${percent(first.success.value)}`]);
    if (reached.length) cards.push([percent(reached.reduce((sum, x) => sum + x, 0) / reached.length), "success in training",
      `mean of the last ${reached.length} step${reached.length > 1 ? "s" : ""}`]);
    return cards.length ? el("div", { class: "headline" }, values.runs.length > 1 ? el("strong", {}, visible(run.name)) : null,
      cards.map(([value, what, note]) => el("p", {}, el("b", {}, value), el("span", {}, what), el("span", { class: "soft" }, note)))) : null;
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

// The bounds of the y axis: those of the lines, so that a wide interval is cut. A constant gets some room, and no
// values at all get 0 to 1.
function aroundLines(lines) {
  const all = lines.flatMap((line) => line.values).filter((value) => Number.isFinite(value));
  if (!all.length) return [0, 1];
  const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  return low === high ? (low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2]) : uPlot.rangeNum(low, high, 0.1, true);
}

// Draw lines in a card. ``stages`` are [first step, name] pairs.
function chart(title, note, lines, { stages = [], stacked = false, range = null, wide = false } = {}) {
  const place = el("div", {});
  const card = el("section", { class: `chart${lines.length > 1 ? "" : " single"}${wide ? " first" : ""}`, "aria-label": title }, el("h3", {}, title),
    note ? el("p", { class: "soft" }, note) : null,
    place);
  const series = [{ label: "step", value: (_, step) => (step === null ? "–" : String(step)) }];
  const bands = [];
  const tables = [];
  const raw = [null];
  for (const line of lines) {
    const first = series.length;
    const few = line.whiskers || line.values.filter((value) => value !== null).length < 40;
    series.push({ label: line.label, stroke: line.colour, width: 1.6, spanGaps: true, points: { show: few, size: line.whiskers ? 8 : 4, fill: line.whiskers ? line.colour : undefined },
      fill: stacked ? faded(line.colour, 0.55) : undefined,
      value: (_, value, at, index) => number(line.told && index !== null ? line.told[index] : value) });
    const columns = [line.steps.map(shownStep), line.values];
    if (line.low) {
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, class: "hidden-row", label: "" };
      series.push({ ...hidden }, { ...hidden });
      if (!line.whiskers) bands.push({ series: [first + 2, first + 1], fill: faded(line.colour, lines.length > 2 ? 0.1 : 0.18) });
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
      const x = Math.max(plot.valToPos(shownStep(step), "x", true), bbox.left);
      if (x > bbox.left + bbox.width || shownStep(step) > joined[0][joined[0].length - 1]) return;
      if (at) { ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke(); }
      if (stages.length < 2) return;
      ctx.textAlign = x + ctx.measureText(visible(name)).width > ctx.canvas.width ? "right" : "left";
      ctx.fillText(visible(name), x, bbox.top - 3 * devicePixelRatio);
    });
    ctx.restore();
  };
  const drawWhiskers = (plot) => {
    const { ctx } = plot;
    ctx.save();
    ctx.lineWidth = 1.6 * devicePixelRatio;
    for (const line of lines.filter((one) => one.whiskers)) {
      ctx.strokeStyle = line.colour;
      line.steps.forEach((step, at) => {
        const x = plot.valToPos(shownStep(step), "x", true);
        ctx.beginPath();
        ctx.moveTo(x, plot.valToPos(line.low[at], "y", true));
        ctx.lineTo(x, plot.valToPos(line.high[at], "y", true));
        ctx.stroke();
      });
    }
    ctx.restore();
  };
  const draw = () => {
    const plot = new uPlot({
      width: Math.max(220, place.clientWidth), height: 210, padding: [stages.length > 1 ? 20 : 8, 10, 0, 0], series, bands: bands.length ? bands : undefined,
      scales: { x: { time: false }, y: { range: range || (() => aroundLines(lines)) } },
      axes: [{ ...axis(), size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 1e5, 1e6] },
        { ...axis(), size: 64, values: ticksOf }],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      legend: { live: true }, hooks: { draw: [drawStages, drawWhiskers] },
    }, joined, place);
    charts.push({ plot, place });
  };
  return { card, draw };
}

// The marks of stages are drawn where all runs have them alike.
function optionsOf(phase) {
  const stages = stagesOf(values.runs[0], phase);
  const same = values.runs.every((run) => JSON.stringify(stagesOf(run, phase)) === JSON.stringify(stages));
  return { stages: same ? stages : [] };
}

function phaseCharts(phase) {
  const options = optionsOf(phase);
  const made = [];
  for (const [metric, title, note] of CURVES) {
    const lines = linesOf(metric, phase);
    if (lines.length) made.push(chart(title, note, lines, metric === "success" ? { ...options, range: () => [0, 1.02] } : options));
  }
  values.runs.forEach((run, index) => {
    const of = values.runs.length > 1 ? `: ${visible(run.name)}` : "";
    const own = { stages: stagesOf(run, phase), range: () => [0, 1.02] };
    const inside = inPhase(run, phase);
    const here = run.stops.step.map((step) => inside(run.curves.step.indexOf(step)));
    const kept = (list) => list.filter((_, at) => here[at]);
    const reasons = here.some(Boolean) ? Object.entries(run.stops.shares) : [];
    if (reasons.length) {
      let sums = kept(run.stops.step).map(() => 0);
      const lines = reasons.map(([reason, shares], at) => {
        sums = sums.map((sum, n) => sum + kept(shares)[n]);
        return { label: visible(reason), colour: colourOf(at), steps: kept(run.stops.step), values: sums, told: kept(shares) };
      });
      made.push(chart("Stop reasons" + of, "share of the step's episodes, stacked", lines.reverse(), { ...own, stacked: true }));
    }
    const skills = phase === "acting" ? Object.entries(run.skills.rates) : [];
    if (skills.length > 1) {
      const note = `by a task's first skill, over ${run.skills.width} step${run.skills.width > 1 ? "s" : ""} at a time` +
        (run.skills.others > 0 ? `; ${run.skills.others} rarer skills are not drawn` : "");
      made.push(chart("Success by skill" + of, note, skills.map(([skill, rates], at) => ({ label: visible(skill),
        colour: colourOf(at), steps: run.skills.step, values: rates })), own));
    }
  });
  return made;
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
  main.append(...headline().filter(Boolean));
  const first = heldOut();
  const made = [];
  if (first.length) {
    const held = chart("Held-out success", "each evaluation with its 95 % interval over tasks, at the steps done before it", first, { range: () => [0, 1.02], wide: true });
    main.append(held.card);
    made.push(held);
  }
  for (const [phase, title] of PHASES) {
    const own = phaseCharts(phase);
    if (!own.length) continue;
    main.append(el("h2", {}, title), el("div", { class: "charts" }, own.map(({ card }) => card)));
    made.push(...own);
  }
  if (!made.length) main.append(el("p", {}, "No step is done yet."));
  made.forEach(({ draw }) => draw());
  const usual = new Set(CURVES.map(([metric]) => metric));
  const others = [...new Set(values.runs.flatMap((run) => Object.keys(run.curves.metrics)))].filter((name) =>
    !usual.has(name) && values.runs.some((run) => new Set(run.curves.metrics[name] || []).size > 1));
  if (others.length) {
    const more = el("div", { class: "charts" });
    main.append(el("details", { ontoggle: (event) => {
      if (!event.target.open || more.childNodes.length) return;
      const rest = PHASES.flatMap(([phase]) => others.map((name) => [name, linesOf(name, phase)]).filter(([, lines]) => lines.length)
        .map(([name, lines]) => chart(visible(name), "", lines, optionsOf(phase))));
      more.append(...rest.map(({ card }) => card));
      rest.forEach(({ draw }) => draw());
    } }, el("summary", {}, el("h2", {}, `${others.length} more metrics`)), more));
  }
}
