"use strict";
// What the other scripts of the page use: elements, values, and the loading of episodes. Everything that a model,
// an environment or a configuration said goes into the page as text nodes: nothing here sets HTML.

// ---- elements ----------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "g", "text", "title", "line", "circle"].includes(name);
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
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(Math.max(digits, Math.trunc(Math.abs(value)).toString().length))));
}
const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1) + " %");
const rate = (r) => (r ? `${percent(r.value)} (${(100 * r.low).toFixed(0)}–${(100 * r.high).toFixed(0)})` : "–");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function table(heads, rows, numbers = false) {
  return el("div", { class: "wide" }, el("table", { class: numbers ? "plain numbers" : "plain" },
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
  sort: "worst" }, hits: null, query: "" };
const COLOURS = { light: ["#1f77b4", "#e07b00", "#2a9d55", "#c2559d", "#8a63d2", "#0aa1b5", "#b0413e", "#8c8c1a"],
  dark: ["#6cb0f5", "#ffa94d", "#5cc98a", "#f08fcb", "#b79cf5", "#4fd0e0", "#ff8a80", "#d6d65c"] };
const colourOf = (index) => COLOURS[document.documentElement.dataset.theme === "dark" ? "dark" : "light"][index % 8];
const shownStep = (step) => step + 1;  // people count steps from 1, files from 0

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
