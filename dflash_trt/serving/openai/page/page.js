"use strict";
// The page of one server: a chat, a race, and charts. Texts of the model are only ever set as text, never as HTML.
const $ = (id) => document.getElementById(id);
const history = [];
let running = null; // the AbortController of what is being decoded

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function settings() {
  const body = { stream: true, stream_options: { include_usage: true }, return_rounds: true };
  for (const [id, field] of [["temperature", "temperature"], ["tokens", "max_tokens"], ["seed", "seed"]])
    if ($(id).value !== "") body[field] = Number($(id).value);
  return body;
}

// Reads the events of a stream and calls `take` with each chunk. Throws the server's error.
async function stream(body, signal, take) {
  const answer = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.slice(event.indexOf("data: ") + 6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      take(chunk);
    }
  }
}

// A place that shows an answer by rounds, and counts what it sees.
class Shown {
  constructor(text, figures) {
    this.text = text; this.figures = figures;
    this.tokens = this.rounds = this.drafted = 0; this.content = ""; this.usage = null;
    this.begun = performance.now(); this.first = this.last = 0;
  }
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.content += choice.delta.content || "";
    for (const round of choice.rounds || []) {
      this.last = performance.now();
      this.first ||= this.last;
      this.tokens += round.tokens; this.drafted += round.accepted; this.rounds += 1;
      this.add("drafted", round.drafted); this.add("own", round.own); this.add("bar", "|");
    }
    this.show();
  }
  add(kind, text) {
    if (!text) return;
    const span = document.createElement("span");
    span.className = kind; span.textContent = text;
    this.text.append(span);
  }
  get rate() { return this.last > this.first ? (1000 * (this.tokens - 1)) / (this.last - this.first) : 0; }
  show() {
    const length = this.rounds > 1 ? (this.tokens - 1) / (this.rounds - 1) : 1; // the first token has no round
    this.figures.textContent = `${this.tokens} tokens · ${this.rate.toFixed(0)} tokens/s · ` +
      `${length.toFixed(2)} tokens per round · first after ${(this.first - this.begun).toFixed(0)} ms`;
  }
}

function message(role) {
  const box = document.createElement("div"), name = document.createElement("b"), text = document.createElement("div");
  const figures = document.createElement("p");
  box.className = `message ${role}`; name.textContent = role; figures.className = "figures";
  box.append(name, text, figures);
  $("messages").append(box);
  return { box, text, figures };
}

async function during(work) {
  running = new AbortController();
  for (const button of document.querySelectorAll("form button")) button.disabled = button.id !== "stop";
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      const { text } = message("error");
      text.className = "error"; text.textContent = error.message;
    }
  } finally {
    running = null;
    for (const button of document.querySelectorAll("form button")) button.disabled = button.id === "stop";
    $("messages").scrollTop = $("messages").scrollHeight;
  }
}

function send() {
  const prompt = $("prompt").value.trim();
  if (!prompt || running) return;
  history.push({ role: "user", content: prompt });
  message("user").text.textContent = prompt;
  $("prompt").value = "";
  during(async (signal) => {
    const { text, figures } = message("assistant"), shown = new Shown(text, figures);
    const body = { ...settings(), messages: history, speculate: $("speculate").checked };
    try {
      await stream(body, signal, (chunk) => { shown.take(chunk); $("messages").scrollTop = $("messages").scrollHeight; });
    } finally {
      history.push({ role: "assistant", content: shown.content });
    }
  });
}

function race() {
  const last = history.findLast((each) => each.role === "user");
  const prompt = $("prompt").value.trim() || (last && last.content);
  if (!prompt || running) return;
  $("race-section").hidden = false;
  $("verdict").textContent = "";
  const most = Number($("tokens").value) || 128;
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number($("seed").value);
  const lanes = [["plain", false], ["draft", true]].map(([name, speculate]) => {
    $(`${name}-text`).replaceChildren();
    return { name, speculate, shown: new Shown($(`${name}-text`), $(`${name}-figures`)) };
  });
  during(async (signal) => {
    await Promise.all(lanes.map(({ name, speculate, shown }) =>
      stream({ ...settings(), messages: [{ role: "user", content: prompt }], speculate, seed }, signal, (chunk) => {
        shown.take(chunk);
        $(`${name}-bar`).style.width = `${Math.min(100, (100 * shown.tokens) / most)}%`;
      })));
    const [plain, draft] = lanes.map((lane) => lane.shown);
    for (const { name } of lanes) $(`${name}-bar`).style.width = "100%";
    const same = plain.content === draft.content ? "The same text" : "DIFFERENT texts";
    $("verdict").textContent = `${same}, ${((plain.last - plain.begun) / (draft.last - draft.begun)).toFixed(2)} times as fast with drafts.`;
  });
}

// Charts of the last minute: the samples of /metrics, and differences of counters.
const SAMPLES = 60;
const CHARTS = [
  ["Tokens per second", (now, before, seconds) => rate(now, before, "generation_tokens_total") / seconds, (v) => v.toFixed(0)],
  ["Tokens per round with a draft", (now, before) => {
    const rounds = rate(now, before, "spec_decode_num_drafts_total");
    return rounds ? 1 + rate(now, before, "spec_decode_num_accepted_tokens_total") / rounds : 0;
  }, (v) => (v ? v.toFixed(2) : "–")],
  ["Requests decoded", (now) => now.num_requests_running || 0, (v) => v.toFixed(0)],
  ["Requests waiting", (now) => now.num_requests_waiting || 0, (v) => v.toFixed(0)],
  ["Prefix cache", (now) => (now.prefix_cache_limit_bytes ? (100 * now.prefix_cache_bytes) / now.prefix_cache_limit_bytes : 0), (v) => `${v.toFixed(1)} %`],
  ["Prompt tokens from the cache", (now, before) => {
    const all = rate(now, before, "prompt_tokens_total");
    return all ? (100 * rate(now, before, "prompt_tokens_cached_total")) / all : 0;
  }, (v) => `${v.toFixed(0)} %`],
].map(([title, value, show]) => ({ value, show, samples: [], ...chart(title) }));

function rate(now, before, name) { return Math.max(0, (now[name] || 0) - (before[name] || 0)); }

function chart(title) {
  const box = document.createElement("div"), head = document.createElement("p"), name = document.createElement("span");
  const figure = document.createElement("b"), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  box.className = "chart"; name.textContent = title;
  svg.setAttribute("viewBox", `0 0 ${SAMPLES - 1} 40`); svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img"); svg.setAttribute("aria-label", `${title}, the last minute`);
  svg.append(line); head.append(name, figure); box.append(head, svg); $("charts").append(box);
  return { figure, line };
}

function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^dflash_(\w+) (\S+)$/.exec(line);
    if (match) found[match[1]] = Number(match[2]);
  }
  return found;
}

let before = null, at = 0;
async function watch() {
  try {
    const now = parse(await (await fetch("metrics")).text()), time = performance.now();
    $("state").textContent = now.engine_up ? "The engine serves." : "The engine is being started.";
    if (before) {
      for (const each of CHARTS) {
        const value = each.value(now, before, (time - at) / 1000);
        each.samples = [...each.samples, value].slice(-SAMPLES);
        each.figure.textContent = each.show(value);
        const most = Math.max(...each.samples, 1e-9);
        each.line.setAttribute("points", each.samples.map((v, i) => `${i + SAMPLES - each.samples.length},${39 - (38 * v) / most}`).join(" "));
      }
    }
    before = now; at = time;
  } catch {
    $("state").textContent = "The server does not answer.";
  }
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

async function name() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (answer.ok) $("model").textContent = (await answer.json()).data[0].id;
  else $("state").textContent = (await answer.json()).error.message;
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
$("race").addEventListener("click", race);
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => { history.length = 0; $("messages").replaceChildren(); });
$("key").addEventListener("change", name);
name(); watch();
