"use strict";
// The evaluations and the configurations of runs, as tables.

// ---- evaluations ------------------------------------------------------------------------------------------------

// A line for each rate: its name, its interval as a bar between 0 and 100 %, and its value as a dot.
function dots(title, rates, colour) {
  const label = 120, right = 400, height = 24;
  const x = (value) => label + value * (right - label);
  const svg = el("svg", { class: "dots", width: 530, viewBox: `0 0 530 ${rates.length * height + 22}`, role: "img", "aria-label": title });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) svg.append(
    el("line", { x1: x(share), x2: x(share), y1: 2, y2: rates.length * height, stroke: css("--line") }),
    el("text", { x: x(share), y: rates.length * height + 16, "text-anchor": "middle" }, `${100 * share} %`));
  rates.forEach(([name, of], at) => {
    const y = at * height + 13;
    svg.append(el("text", { x: label - 12, y: y + 4, "text-anchor": "end" }, visible(name).slice(0, 17)),
      el("line", { x1: x(of.low), x2: x(of.high), y1: y, y2: y, stroke: colour, "stroke-width": 3, "stroke-opacity": 0.45 }),
      el("circle", { cx: x(of.value), cy: y, r: 5, fill: colour }), el("text", { x: right + 16, y: y + 4 }, rate(of)));
  });
  return svg;
}

function drawEvaluations(main) {
  const signed = (value, digits) => (value < 0 && Number(value.toFixed(digits)) ? "−" : "+") + Math.abs(value).toFixed(digits);
  const change = (test) => (test ? test.nats || `${signed(100 * test.difference, 1)} (${signed(100 * test.low, 0)}…${signed(100 * test.high, 0)})` : "");
  let any = false;
  for (const run of values.runs) {
    const made = run.evaluations;
    if (!made.length) continue;
    any = true;
    const rows = [
      row("step", made.map((one) => cell(one.step === null ? "" : one.step))),
      row(made[0].unit, made.map((one) => cell(one.number))),
    ];
    const replies = made.every((one) => !one.success);  // recorded ones, which no outcome grades
    for (const name of [...new Set(made.flatMap((one) => Object.keys(one.means)))])
      rows.push(row(`${name.replace("_", " ")} (95 %)`, made.map((one) => cell(one.means[name] || "–"))));
    if (!replies) rows.push(row("success (95 %)", made.map((one) => cell(one.success ? rate(one.success) : "–"))));
    if (made.some((one) => one.score)) rows.push(row("score (95 %)", made.map((one) => cell(rate(one.score)))));
    if (made.some((one) => one.reward)) rows.push(row("reward (95 %)", made.map((one) => cell(one.reward ?
      number(one.reward.value) + (one.reward.low === null ? "" : ` (${number(one.reward.low)}…${number(one.reward.high)})`) : "–"))));
    if (made.length > 1) {
      rows.push(row(`change, ${replies ? "nats" : "points"} (95 %)`, made.map((one) => cell(change(one.change)))));
      rows.push(row("p, if no change", made.map((one) => cell(one.change ? number(one.change.p, 2) : ""))));
    }
    for (const k of [...new Set(made.flatMap((one) => Object.keys(one.pass_at)))].filter((k) => k !== "1"))
      rows.push(row(`pass@${k}`, made.map((one) => cell(percent(one.pass_at[k])))));
    for (const reason of [...new Set(made.flatMap((one) => Object.keys(one.stop_reasons)))].sort())
      rows.push(row(`ended: ${reason}`, made.map((one) => cell(percent((one.stop_reasons[reason] || 0) / one.attempts)))));
    if (!replies) {
      rows.push(row("invalid actions", made.map((one) => cell(percent(one.invalid_actions)))));
      rows.push(row("turns", made.map((one) => cell(one.mean_turns.toFixed(2)))));
    }
    rows.push(row("action tokens", made.map((one) => cell(one.mean_action_tokens.toFixed(1)))));
    if (made.some((one) => one.left_out)) rows.push(row("left out: environment failed", made.map((one) => cell(one.left_out))));
    main.append(el("h2", {}, visible(run.name)), ...(replies ? [] : [dots("success, with its 95 % interval",
      made.filter((one) => one.success).map((one) => [one.name, one.success]), colourOf(values.runs.indexOf(run)))]), table(["", ...made.map((one) => one.name)], rows, true));
    const skills = [...new Set(made.flatMap((one) => Object.keys(one.by_skill)))].sort();
    if (skills.length > 1) {
      main.append(el("h3", {}, "Success by skill (95 %)"), table(["skill", "tasks", ...made.map((one) => one.name)],
        skills.map((skill) => row(skill, [cell([...new Set(made.filter((one) => one.by_skill[skill]).map((one) =>
          one.by_skill[skill].tasks))].join("/")), made.map((one) => cell(rate(one.by_skill[skill])))])), true));
    }
  }
  if (!any) main.append(el("p", {}, "There are no evaluations yet."));
  if (values.runs.some((run) => run.evaluations.some((one) => one.change))) main.append(el("p", { class: "soft" }, "A change is that since the column before, on the same tasks, in percentage points, or nats of the loss; " +
    "p is that of an exact paired test. A change with p below 0.05 is unlikely to be luck."));
  if (values.pairs.length) {
    main.append(el("h2", {}, "Between runs, on the same tasks"), table(["evaluation", "from", "to", "change, points or nats (95 %)", "p"],
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
