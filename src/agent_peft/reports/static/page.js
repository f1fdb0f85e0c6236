"use strict";
// The page as a whole: its parts, keys, theme and address, and its start.

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
