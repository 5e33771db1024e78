"use strict";
// Charts of the last minute: gauges of /metrics, and differences of its counters.
const SAMPLES = 60;
const increase = (now, before, name) => Math.max(0, (now[name] || 0) - (before[name] || 0));
const percent = (v) => `${(100 * v).toFixed(v && v < 0.1 ? 1 : 0)} %`;
const whole = (v) => v.toFixed(0);
// Title, value of two samples (null: nothing to show), how it is written, and the largest value of its scale, if fixed.
const CHARTS = [
  ["Tokens per second", (now, before, seconds) => increase(now, before, "generation_tokens_total") / seconds, whole],
  ["Tokens per round", (now, before) => {
    const rounds = increase(now, before, "spec_decode_num_drafts_total");
    return rounds ? 1 + increase(now, before, "spec_decode_num_accepted_tokens_total") / rounds : null;
  }, (v) => v.toFixed(2)],
  ["Drafts accepted", (now, before) => {
    const drafts = increase(now, before, "spec_decode_num_draft_tokens_total");
    return drafts ? increase(now, before, "spec_decode_num_accepted_tokens_total") / drafts : null;
  }, percent, 1],
  ["Batch", (now) => now.num_requests_running || 0, whole],
  ["Requests waiting", (now) => now.num_requests_waiting || 0, whole],
  ["KV cache in use", (now) => now.kv_cache_usage_perc || 0, percent],
  ["Prefix cache in use", (now) => (now.prefix_cache_limit_bytes ? now.prefix_cache_bytes / now.prefix_cache_limit_bytes : 0), percent],
  ["Prompt from the prefix cache", (now, before) => {
    const all = increase(now, before, "prompt_tokens_total");
    return all ? increase(now, before, "prompt_tokens_cached_total") / all : null;
  }, percent, 1],
];

function element(kind, parent, text = "") {
  const made = kind === "svg" || parent.namespaceURI.endsWith("svg")
    ? document.createElementNS("http://www.w3.org/2000/svg", kind) : document.createElement(kind);
  made.textContent = text;
  parent.append(made);
  return made;
}

class Chart {
  constructor(place, [title, value, write, largest]) {
    Object.assign(this, { value, write, largest, samples: [], last: 0 });
    const box = element("div", place), head = element("p", box);
    box.className = "chart";
    element("span", head, title);
    this.figure = element("b", head, "–");
    const svg = element("svg", box);
    for (const [name, text] of [["viewBox", `0 0 ${SAMPLES - 1} 40`], ["preserveAspectRatio", "none"], ["role", "img"], ["aria-label", `${title}, the last minute`]])
      svg.setAttribute(name, text);
    this.area = element("polygon", svg);
    this.line = element("polyline", svg);
    this.most = element("small", box, "\u00a0");
  }
  // Counters of requests grow when requests end, so between two ends the last value is held.
  take(now, before, seconds) {
    const value = this.value(now, before, seconds) ?? this.last;
    this.last = value;
    this.samples = [...this.samples, value].slice(-SAMPLES);
    const largest = this.largest || Math.max(...this.samples, 1e-9);
    const points = this.samples.map((v, i) => `${i + SAMPLES - this.samples.length},${39 - (36 * v) / largest}`);
    this.figure.textContent = value ? this.write(value) : "0";
    this.most.textContent = `most ${this.write(Math.max(...this.samples))}`;
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${SAMPLES - this.samples.length},40 ${points.join(" ")} ${SAMPLES - 1},40`);
  }
}

function parse(text) {
  const samples = {};
  for (const line of text.split("\n")) {
    const match = /^dflash_(\w+) (\S+)$/.exec(line);
    if (match) samples[match[1]] = Number(match[2]);
  }
  return samples;
}

// Reads /metrics every second. `tell` gets the state of the server in words, and whether it is good.
export function watch(place, tell) {
  const charts = CHARTS.map((each) => new Chart(place, each));
  let before = null, at = 0;
  async function look() {
    try {
      const now = parse(await (await fetch("metrics")).text()), time = performance.now();
      tell(now.engine_up ? "The engine serves" : "The engine is being started", Boolean(now.engine_up));
      if (before && now.engine_up) for (const chart of charts) chart.take(now, before, (time - at) / 1000);
      before = now; at = time;
    } catch {
      tell("The server does not answer", false);
    }
    setTimeout(look, document.hidden ? 5000 : 1000);
  }
  look();
}
