"use strict";
// The page of one server: a chat, a race, and charts. Texts of the model are only ever set as text, never as HTML.
import { watch } from "./charts.js";

const $ = (id) => document.getElementById(id);
const history = [];
let running = null; // the AbortController of what is being decoded

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function settings() {
  const body = { stream: true, stream_options: { include_usage: true }, return_rounds: true };
  for (const [id, field] of [["temperature", "temperature"], ["tokens", "max_tokens"], ["seed", "seed"], ["block", "block_length"]])
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

function part(parent, kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name; made.textContent = text;
  parent.append(made);
  return made;
}

// A place that shows an answer by rounds, and counts what it sees.
class Shown {
  constructor(text, figures, strip) {
    Object.assign(this, { text, figures, strip, tokens: 0, rounds: 0, accepted: 0, verified: 0, content: "" });
    this.begun = performance.now(); this.first = this.last = 0;
  }
  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    this.content += choice.delta.content || "";
    for (const round of choice.rounds || []) {
      this.last = performance.now();
      this.first ||= this.last;
      this.tokens += round.tokens; this.accepted += round.accepted; this.verified += round.verified; this.rounds += 1;
      this.round(round);
    }
    this.show();
  }
  round({ tokens, accepted, verified, drafted, own }) {
    const title = `Round ${this.rounds}: ${accepted} of ${verified} drafts accepted, ${tokens - accepted} of the target's own`;
    if (drafted) part(this.text, "span", "drafted", drafted).title = title;
    if (own) part(this.text, "span", "own", own).title = title;
    const column = part(this.strip, "span", "");
    column.title = title;
    for (const [name, count] of [["", accepted], ["ends", tokens - accepted], ["missed", verified - accepted]])
      for (let i = 0; i < count; i += 1) part(column, "i", name);
  }
  get rate() { return this.last > this.first ? (1000 * (this.tokens - 1)) / (this.last - this.first) : 0; }
  show() {
    const length = this.rounds > 1 ? (this.tokens - 1) / (this.rounds - 1) : 1; // the first token has no round
    const said = [
      [this.rate.toFixed(0), "tokens/s"], [length.toFixed(2), "tokens per round"],
      ...(this.verified ? [[`${((100 * this.accepted) / this.verified).toFixed(0)} %`, `of ${this.verified} drafts accepted`]] : []),
      ...(this.first ? [[(this.first - this.begun).toFixed(0), "ms to the first token"]] : []), [this.tokens, "tokens"],
    ];
    this.figures.replaceChildren();
    for (const [number, words] of said) {
      const box = part(this.figures, "span", "");
      part(box, "b", "", number); box.append(` ${words}`);
    }
  }
}

function message(role, words = "") {
  $("welcome").hidden = true;
  const box = part($("messages"), "div", `message ${role}`);
  return { box, text: part(box, "div", "", words) };
}

// Keeps the end in sight for a reader who is there.
function following(place, change) {
  const there = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  change();
  if (there) place.scrollTop = place.scrollHeight;
}

async function during(work) {
  running = new AbortController();
  for (const button of document.querySelectorAll("#ask button")) button.disabled = button.id !== "stop";
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") following($("messages"), () => message("error", error.message));
  } finally {
    running = null;
    for (const button of document.querySelectorAll("#ask button")) button.disabled = button.id === "stop";
  }
}

function send() {
  const prompt = $("prompt").value.trim();
  if (!prompt || running) return;
  const asked = message("user", prompt).box;
  history.push({ role: "user", content: prompt });
  $("prompt").value = "";
  $("messages").scrollTop = $("messages").scrollHeight;
  during(async (signal) => {
    const { box, text } = message("assistant"), drafts = $("speculate").checked;
    const shown = new Shown(text, part(box, "p", "figures"), part(box, "div", "strip"));
    if (!drafts) text.className = "plainly";
    try {
      await stream({ ...settings(), messages: history, speculate: drafts }, signal, (chunk) => following($("messages"), () => shown.take(chunk)));
    } finally {
      if (shown.content) {
        history.push({ role: "assistant", content: shown.content });
      } else { // nothing was said, so nothing was asked
        history.pop(); asked.remove(); box.remove();
        $("prompt").value ||= prompt;
      }
    }
  });
}

function race() {
  const last = history.findLast((each) => each.role === "user");
  const prompt = $("prompt").value.trim() || (last && last.content);
  if (!prompt) { $("prompt").focus(); return; }
  if (running) return;
  $("race-section").hidden = false;
  $("verdict").textContent = "";
  $("race-section").scrollIntoView({ block: "nearest", behavior: "smooth" });
  const most = Number($("tokens").value) || 128;
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number($("seed").value);
  const lanes = [["plain", false], ["draft", true]].map(([name, speculate]) => {
    for (const place of ["text", "strip", "figures", "rate"]) $(`${name}-${place}`).replaceChildren();
    $(`${name}-bar`).style.width = "0";
    return { name, speculate, shown: new Shown($(`${name}-text`), $(`${name}-figures`), $(`${name}-strip`)) };
  });
  $("plain-text").classList.add("plainly");
  during(async (signal) => {
    await Promise.all(lanes.map(async ({ name, speculate, shown }) => {
      await stream({ ...settings(), messages: [{ role: "user", content: prompt }], speculate, seed }, signal, (chunk) => {
        following($(`${name}-text`), () => shown.take(chunk));
        $(`${name}-bar`).style.width = `${Math.min(100, (100 * shown.tokens) / most)}%`;
        $(`${name}-rate`).textContent = shown.rate.toFixed(0);
        part($(`${name}-rate`), "small", "", " tokens/s");
      });
      $(`${name}-bar`).style.width = "100%";
    }));
    const [plain, draft] = lanes.map((lane) => lane.shown);
    const ratio = (plain.last - plain.begun) / (draft.last - draft.begun), same = plain.content === draft.content;
    $("verdict").textContent = `${ratio.toFixed(2)} times as fast with drafts · ${same ? "the same text" : "DIFFERENT texts"}`;
    $("verdict").className = same && ratio > 1 ? "" : "other";
  });
}

async function name() {
  const answer = await fetch("v1/models", { headers: headers() });
  $("model").textContent = answer.ok ? (await answer.json()).data[0].id : "";
  if (!answer.ok) message("error", (await answer.json()).error.message);
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("access").addEventListener("submit", (event) => { event.preventDefault(); $("prompt").focus(); });
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
$("race").addEventListener("click", race);
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => { history.length = 0; $("messages").replaceChildren($("welcome")); $("welcome").hidden = false; });
$("key").addEventListener("change", name);
name();
watch($("charts"), (words, good) => { $("state").textContent = words; $("state").className = good ? "up" : "down"; });
