"use strict";
// The page of one server: a chat and a race. Texts of the model are only ever set as text, never as HTML.
import { Markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const KEPT = "dflash-trt conversation"; // in this tab's storage, until it is closed or cleared
let history = []; // messages; `left` are not sent any more, and answers have `rounds` and `times`
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
  if (!answer.ok) throw Object.assign(new Error((await answer.json()).error.message), { status: answer.status });
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

function copyButton(text) {
  const made = part(document.createDocumentFragment(), "button", "copy", "Copy");
  made.type = "button";
  made.addEventListener("click", async () => {
    made.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // browsers have no clipboard for pages over plain HTTP from other machines
    const field = part(document.body, "textarea", "");
    field.value = text;
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

// A place that shows an answer by rounds, and counts what it sees.
class Shown {
  constructor(text, figures, strip) {
    Object.assign(this, { figures, strip, tokens: 0, rounds: 0, accepted: 0, verified: 0, content: "" });
    Object.assign(this, { seen: [], written: "", pieces: [], markdown: new Markdown(text, (...where) => this.put(...where), copyButton) });
    this.begun = performance.now(); this.first = this.last = 0;
  }
  // As it was shown before: the rounds, and the times when it was asked for, and of its first and last round.
  again(rounds, times) {
    for (const round of rounds) this.count(round);
    [this.begun, this.first, this.last] = times;
    this.show();
  }
  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return;
    this.content += choice.delta.content || "";
    for (const round of choice.rounds || []) {
      this.last = performance.now();
      this.first ||= this.last;
      this.count(round);
    }
    this.show();
  }
  count(round) {
    const { tokens, accepted, verified, drafted, copied, own } = round;
    this.tokens += tokens; this.accepted += accepted; this.verified += verified; this.rounds += 1;
    this.seen.push(round);
    const title = `Round ${this.rounds}: ${accepted} of ${verified} drafts accepted, ${tokens - accepted} of the target's own`;
    for (const [name, words] of [["drafted", drafted], ["copied", copied], ["own", own]]) {
      if (!words) continue;
      this.pieces.push({ from: this.written.length, name, title });
      this.written += words;
    }
    const column = part(this.strip, "span", "");
    column.title = title;
    const source = copied && !drafted ? "copied" : "";
    for (const [name, count] of [[source, accepted], ["ends", tokens - accepted], ["missed", verified - accepted]])
      for (let i = 0; i < count; i += 1) part(column, "i", name);
  }
  // Appends a part of the text, in spans of the rounds that wrote it.
  put(parent, from, to) {
    let low = 0, high = this.pieces.length;
    while (high - low > 1) { // the last piece that begins at `from` or before
      const middle = (low + high) >> 1;
      if (this.pieces[middle].from <= from) low = middle; else high = middle;
    }
    for (let at = from; at < to; low += 1) {
      const end = Math.min(to, this.pieces[low + 1]?.from ?? to), { name, title } = this.pieces[low];
      part(parent, "span", name, this.written.slice(at, end)).title = title;
      at = end;
    }
  }
  get rate() { return this.last > this.first ? (1000 * (this.tokens - 1)) / (this.last - this.first) : 0; }
  get rateShown() { return this.rate.toFixed(this.rate < 100 ? 1 : 0); }
  show() {
    this.markdown.show(this.written);
    const length = this.rounds > 1 ? (this.tokens - 1) / (this.rounds - 1) : 1; // the first token has no round
    const said = [
      [this.rateShown, "tokens/s"], [length.toFixed(2), "tokens per round"],
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

// An answer, empty at first, with its figures and bars and a button that copies it.
function answerBox(drafts) {
  const { box, text } = message("assistant");
  if (!drafts) text.className = "plainly";
  const shown = new Shown(text, part(box, "p", "figures"), part(box, "div", "strip"));
  box.append(copyButton(() => shown.content));
  return { box, shown };
}

function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(history));
  } catch { // no storage, or too long for it: the conversation lasts as long as the page
  }
}

function restore() {
  try {
    history = JSON.parse(sessionStorage.getItem(KEPT)) || [];
    show();
  } catch { // not what this page wrote
    clear();
  }
}

// Draws the conversation from `history`, with a line behind what is not sent any more.
function show() {
  $("messages").replaceChildren($("welcome"));
  $("welcome").hidden = history.length > 0;
  history.forEach(({ role, content, drafts, rounds, times, left }, at) => {
    if (role === "user") {
      message(role, content);
    } else {
      const { shown } = answerBox(drafts);
      shown.content = content;
      shown.again(rounds, times);
    }
    if (left && !history[at + 1]?.left) part($("messages"), "p", "left", "The model no longer sees what is above.");
  });
  $("messages").scrollTop = $("messages").scrollHeight;
}

function clear() {
  history = [];
  keep();
  show();
}

const sent = (messages) => messages.filter((each) => !each.left).map(({ role, content }) => ({ role, content }));

// How many of the oldest messages must go so that a prompt fits with its answer; 0 if none, null if even all do not help.
async function tooMany(prompt) {
  const turns = sent(history);
  for (let gone = 0; gone <= turns.length; gone += 1) {
    if (turns[gone]?.role === "assistant") continue; // a question goes with its answer
    const messages = [...turns.slice(gone), { role: "user", content: prompt }];
    const answer = await fetch("tokenize", { method: "POST", headers: headers(), body: JSON.stringify({ messages }) });
    if (!answer.ok) continue;
    const { count, max_model_len: most } = await answer.json();
    if (count + (Number($("tokens").value) || 1) <= most) return gone;
  }
  return null;
}

// Behind a refusal: a button that leaves out the oldest turns, if that helps, and asks again.
async function offer(prompt) {
  const gone = sent(history).length ? await tooMany(prompt) : null;
  if (!gone) return;
  const box = $("messages").querySelector(".message.error:last-child");
  if (!box) return;
  const button = part(box, "button", "", `Leave out the oldest ${gone / 2 === 1 ? "question" : `${Math.ceil(gone / 2)} questions`} and ask again`);
  button.type = "button";
  button.addEventListener("click", () => {
    if (running) return;
    const seen = history.filter((each) => !each.left);
    for (const each of seen.slice(0, gone)) each.left = true;
    keep(); show();
    $("prompt").value = prompt;
    send();
  });
  $("messages").scrollTop = $("messages").scrollHeight;
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
    if (error.name === "AbortError") return;
    following($("messages"), () => message("error", error.message));
    if (error.status === 400 && error.prompt) await offer(error.prompt).catch(() => {}); // the server has gone
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
    const drafts = $("speculate").checked, { box, shown } = answerBox(drafts);
    try {
      await stream({ ...settings(), messages: sent(history), speculate: drafts }, signal, (chunk) => following($("messages"), () => shown.take(chunk)));
    } catch (error) {
      throw Object.assign(error, { prompt });
    } finally {
      if (shown.content) {
        const times = [shown.begun, shown.first, shown.last];
        history.push({ role: "assistant", content: shown.content, drafts, rounds: shown.seen, times });
      } else { // nothing was said, so nothing was asked
        history.pop(); asked.remove(); box.remove();
        $("prompt").value ||= prompt;
      }
      keep();
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
    // One after the other, so that each lane has the server for itself.
    for (const { name, speculate, shown } of lanes) {
      shown.begun = performance.now();
      await stream({ ...settings(), messages: [{ role: "user", content: prompt }], speculate, seed }, signal, (chunk) => {
        following($(`${name}-text`), () => shown.take(chunk));
        $(`${name}-bar`).style.width = `${Math.min(100, (100 * shown.tokens) / most)}%`;
        $(`${name}-rate`).textContent = shown.rateShown;
        part($(`${name}-rate`), "small", "", " tokens/s");
      });
      $(`${name}-bar`).style.width = "100%";
    }
    const [plain, draft] = lanes.map((lane) => lane.shown);
    const ratio = draft.rateShown / plain.rateShown, same = plain.content === draft.content; // of the figures as they stand there
    const speed = Number.isFinite(ratio) && ratio > 0 ? `${ratio.toFixed(2)} times as fast with drafts` : "too short to time";
    $("verdict").textContent = `${speed} · ${same ? "the same text" : "DIFFERENT texts"}`;
    $("verdict").className = same && ratio > 1 ? "" : "other";
  });
}

async function name() {
  const answer = await fetch("v1/models", { headers: headers() });
  $("model").textContent = answer.ok ? (await answer.json()).data[0].id : "";
  if (!answer.ok) message("error", (await answer.json()).error.message);
}

// Says every few seconds how the server is.
async function watch() {
  let words = "The server does not answer", good = false;
  try {
    good = (await (await fetch("health")).json()).engine === "serving";
    words = good ? "The engine serves" : "The engine is being started";
  } catch { /* as above */ }
  $("state").textContent = words;
  $("state").className = good ? "up" : "down";
  setTimeout(watch, document.hidden ? 10000 : 2000);
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("access").addEventListener("submit", (event) => { event.preventDefault(); $("prompt").focus(); });
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
$("race").addEventListener("click", race);
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", clear);
$("key").addEventListener("change", name);
restore();
name();
watch();
