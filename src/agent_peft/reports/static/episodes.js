"use strict";
// The episodes of a run: their list, and each as a chat, beside its siblings, and as a tree.

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
  return sortedGroups(list, f.sort);
}

// The episodes in their groups, which are the attempts at one task in one step. A group stands where its mean does.
function sortedGroups(list, sort) {
  const groups = new Map();
  for (const one of list) {
    const key = `${one.file.key}/${one.group}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(one);
  }
  const mean = (group, name) => group.reduce((sum, one) => sum + one[name], 0) / group.length;
  const oldest = (group) => [group[0].file.step, group[0].n];
  const newest = (group) => [-group[0].file.step, group[0].n];
  const values = { newest, oldest, worst: (group) => [mean(group, "reward"), ...newest(group)], best: (group) => [-mean(group, "reward"), ...newest(group)],
    longest: (group) => [-Math.max(...group.map((one) => one.tokens)), ...newest(group)] };
  const compare = (a, b) => a.key.reduce((found, value, at) => found || value - b.key[at], 0);
  const sorted = [...groups.values()].map((group) => ({ group, key: values[sort](group) })).sort(compare);
  const within = { worst: (a, b) => a.reward - b.reward, best: (a, b) => b.reward - a.reward, longest: (a, b) => b.tokens - a.tokens };
  return sorted.flatMap(({ group }) => (within[sort] ? group.sort(within[sort]) : group));
}

function place(one) {
  return one.file.evaluation === null ? `step ${shownStep(one.file.step)}` : `evaluation ${visible(one.file.evaluation)}`;
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
    state.shown = 200; if (name === "sort") state.chosen = null; if (name === "run") { state.hits = null; state.query = ""; Object.assign(state.filters, { stage: "", step: "",
      skill: "", stop: "", place: "training" }); render(); } else fillList(); };
  const select = (label, name, options, full = false) => el("label", { class: full ? "full" : null }, label,
    el("select", { onchange: set(name), "aria-label": label }, options.map(([value, text]) =>
      el("option", { value, selected: String(state.filters[name]) === String(value) }, visible(text)))));
  const any = (list) => [["", "any"], ...list.map((value) => [value, value])];
  const progress = el("span", { class: "soft", role: "status" });
  const search = el("input", { type: "search", id: "search", value: state.query, placeholder: "words in the chats, then Enter" });
  const list = el("div", { class: "list", role: "region", "aria-label": "episodes" });
  const shown = el("p", { class: "soft", role: "status" });
  const side = el("div", {}, el("details", { open: innerWidth > 900 }, el("summary", {}, "choose and sort"), el("div", { class: "filters" },
    values.runs.length > 1 ? select("run", "run", values.runs.map((one, index) => [index, one.name]), true) : null,
    select("episodes of", "place", [["training", "training"], ...evaluations.map((name) => [name, `evaluation ${name}`])]),
    select("order", "sort", [["worst", "lowest reward first"], ["best", "highest reward first"], ["newest", "newest first"],
      ["oldest", "oldest first"], ["longest", "longest first"]]),
    select("step", "step", [["", "any"], ...steps.map((step) => [step, shownStep(step)])]), select("stage", "stage", any(texts.stage.filter(Boolean))),
    select("outcome", "outcome", any(texts.outcome)), select("stop reason", "stop", any(texts.stop_reason)),
    skills.length ? select("skill", "skill", any(skills)) : null,
    el("label", {}, "task", el("input", { type: "search", "aria-label": "task", value: state.filters.task, oninput: set("task"), placeholder: "part of its id" })),
    el("label", { class: "full" }, "search", search))), progress, shown, list);
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") find(search.value, progress, fillList); });
  search.addEventListener("search", () => { if (!search.value) find("", progress, fillList); });
  const detail = el("div", { id: "detail" });

  function fillList() {
    const found = fitting();
    state.list = found;
    const at = found.indexOf(state.chosen);
    if (at >= state.shown && at < 2000) state.shown = at + 50;
    shown.textContent = `${found.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} episodes`;
    list.replaceChildren(...found.slice(0, state.shown).flatMap((one, n) => {
      const button = el("button", { onclick: () => { choose(one);
        if (innerWidth <= 900) detail.scrollIntoView(); }, "aria-current": state.chosen && one === state.chosen ? "true" : null },
        el("span", { class: "soft" }, `attempt ${one.attempt}, ${one.tokens} tokens`), el("span", {}, `reward ${number(one.reward)}`, " ", outcomeMark(one.outcome)));
      one.button = button;
      if (n && sameGroup(one, found[n - 1])) return [button];
      return [el("h3", {}, el("span", {}, visible(one.task)), el("span", { class: "soft" }, place(one))), button];
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
  if (episode.reference) facts.push(el("section", { class: "message" }, el("h4", {}, "what would have been right"),
    el("div", { class: "text", dir: "ltr" }, drawPlain(episode.reference, false))));
  const missing = values.missing_words[one.run];
  if (!tokens) facts.push(el("p", { class: "notice" }, visible(missing ? `The tokens are not shown: ${missing}.`
    : content.fault || "They cannot be read.")));
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
  const message = (role, turn, body) => el("section", { class: `message ${["system", "user", "assistant", "tool"].includes(role) ? role : ""}` },
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
    own[0].messages.slice(0, common).map(([role, said]) => el("section", { class: `message ${["system", "user", "tool"].includes(role) ? role : "assistant"}` },
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
    `${names}: ${node.end - node.start} token${node.end - node.start === 1 ? "" : "s"}, ${node.members.length > 1 ? "mean reward" : "reward"} ${number(mean)} `;
  const box = el("details", { class: "node", open: !isRoot || null }, el("summary", {}, title,
    node.members.length === 1 ? outcomeMark(siblings[node.members[0]].outcome) : null),
    text ? el("div", { class: "text", dir: "ltr" }, drawPlain(text, false)) : null);
  const children = node.children.map((child) => treeText(child, lists, siblings, false));
  if (isRoot) return el("div", {}, box, children);
  box.append(...children);
  return box;
}
