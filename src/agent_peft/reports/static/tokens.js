"use strict";
// The tokens of an episode, with their numbers, colours and syntax.

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
  const ends = tokens.filter((token, at) => token.mask && !(tokens[at + 1] && tokens[at + 1].mask)).map((token) => token.end);
  const speaking = episode.messages.map(([role], at) => (role === "assistant" ? at : -1)).filter((at) => at >= 0);
  const sampled = new Map(speaking.slice(-starts.length).map((at, n) => [at, starts[n + Math.max(0, starts.length - speaking.length)]]));
  const segments = [];
  let at = 0;
  episode.messages.forEach(([role, said, whole], n) => {
    const from = Math.max(at, sampled.get(n) ?? at);
    const content = whole && sampled.has(n) ? text.slice(from, ends[starts.indexOf(sampled.get(n))]) : said;
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
