"use strict";
// The part of Markdown that models write most: paragraphs, lists and code. Elements are made one by one, and what the
// model wrote is only ever set as text, so HTML, links and pictures stay the characters that they are.
const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(?=\S)/;

// A text that grows. `put(parent, from, to)` appends its characters from..to to an element, and `copyButton(text)` makes a
// button that copies what `text` gives.
export class Markdown {
  constructor(place, put, copyButton) { Object.assign(this, { place, put, copyButton, blocks: [] }); }
  // Blocks are drawn as they come. More text can change the last one only.
  show(text) {
    const open = this.blocks.pop();
    if (open) open.element.remove();
    for (const block of parse(text, open ? open.from : 0)) {
      this.blocks.push(block);
      block.element = this[block.kind](block, text);
      this.place.append(block.element);
    }
  }
  text({ from, to }, text) {
    const made = element("div", text.slice(from, to).trim() ? "" : "gap");
    this.put(made, from, to);
    return made;
  }
  item({ start, to, indent, mark }) {
    const made = element("div", "item"), body = element("div");
    made.style.setProperty("--indent", Math.min(8, indent >> 1));
    this.put(body, start, to);
    made.append(element("span", "bullet", /\d/.test(mark) ? mark : "•"), body);
    return made;
  }
  code({ language, start, to }, text) {
    const made = element("div", "code"), head = element("div", "code-head"), body = element("pre"), code = element("code");
    head.append(element("span", "", language || "code"), this.copyButton(() => text.slice(start, to)));
    for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", language || "code"]]) body.setAttribute(name, value);
    this.put(code, start, to);
    body.append(code); made.append(head, body);
    return made;
  }
}

// The blocks of the text from an offset on. Paragraphs keep their line breaks.
function* parse(text, from) {
  const line = (at) => { const end = text.indexOf("\n", at); return text.slice(at, end < 0 ? text.length : end); };
  const next = (at) => Math.min(text.length, at + line(at).length + 1);
  for (let at = from; at < text.length;) {
    const begin = at, fence = FENCE.exec(line(at)), item = ITEM.exec(line(at));
    at = next(at);
    if (fence) {
      const closes = (words) => words.length >= fence[1].length && words === fence[1][0].repeat(words.length);
      const start = at;
      while (at < text.length && !closes(line(at).trim())) at = next(at);
      const to = at > start && text[at - 1] === "\n" ? at - 1 : at;
      at = next(at);
      yield { kind: "code", from: begin, language: fence[2].trim().slice(0, 40), start, to };
    } else {
      while (at < text.length && !FENCE.test(line(at)) && !ITEM.test(line(at)) && (!item || line(at).startsWith("  "))) at = next(at);
      if (item) yield { kind: "item", from: begin, start: begin + item[0].length, to: at, indent: item[1].length, mark: item[2] };
      else yield { kind: "text", from: begin, to: at };
    }
  }
}

function element(kind, name = "", text = "") {
  const made = document.createElement(kind);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}
