"use strict";
// The part of Markdown that models write most: code, lists, headings, bold. Elements are made one by one, and what the
// model wrote is only ever set as text, so HTML, links and pictures stay the characters that they are.
const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(?=\S)/;
const HEADING = /^#{1,6} +(?=\S)/;
const INLINE = /`([^`\n]+)`|\*\*(?=\S)([^\n]*?\S)\*\*/g;

// A text that grows. `put(parent, from, to)` appends its characters from..to to an element.
export class Markdown {
  constructor(place, put) { Object.assign(this, { place, put, blocks: [] }); }
  // Blocks are drawn as they come. More text can change the last two: a list goes on behind a line that was no item yet.
  show(text) {
    const open = this.blocks.splice(Math.max(0, this.blocks.length - 2));
    for (const { element } of open) element.remove();
    for (const block of parse(text, open.length ? open[0].from : 0)) {
      this.blocks.push(block);
      block.element = this.draw(block, text);
      this.place.append(block.element);
    }
  }
  draw(block, text) {
    if (block.kind === "code") return this.code(block, text);
    if (block.kind === "list") return this.list(block.items, text);
    const made = element(block.kind === "heading" ? "h3" : "div");
    this.line(made, text, block.start ?? block.from, block.to);
    return made;
  }
  code({ language, start, to }, text) {
    const made = element("div", "code"), head = element("div", "code-head"), body = element("pre"), code = element("code");
    head.append(element("span", "", language || "code"), copyButton(() => text.slice(start, to)));
    for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", language || "code"]]) body.setAttribute(name, value);
    this.put(code, start, to);
    body.append(code); made.append(head, body);
    return made;
  }
  // A deeper item begins a list in the item before it.
  list(items, text) {
    const open = [];
    let root = null;
    for (const { indent, number, from, to } of items) {
      while (open.length > 1 && indent < open.at(-1).indent) open.pop();
      const above = open.at(-1);
      if (!above || indent > above.indent + 1) {
        const made = element(number === null ? "ul" : "ol");
        if (number !== null) made.start = number;
        if (above) above.made.lastChild.append(made); else root = made;
        open.push({ indent, made });
      }
      const item = element("li");
      open.at(-1).made.append(item);
      this.line(item, text, from, to);
    }
    return root;
  }
  line(parent, text, from, to) {
    let at = from;
    for (const match of text.slice(from, to).matchAll(INLINE)) {
      const begin = from + match.index, end = begin + match[0].length;
      this.put(parent, at, begin);
      const made = element(match[1] === undefined ? "strong" : "code");
      if (match[1] === undefined) this.line(made, text, begin + 2, end - 2); else this.put(made, begin + 1, end - 1);
      parent.append(made);
      at = end;
    }
    this.put(parent, at, to);
  }
}

// The blocks of the text from an offset on. Paragraphs keep their line breaks, also those at their end.
function* parse(text, from) {
  let at = from;
  const peek = (place = at) => {
    const end = text.indexOf("\n", place), stop = end < 0 ? text.length : end;
    return { line: text.slice(place, stop), stop, next: end < 0 ? text.length : end + 1 };
  };
  const blank = (line) => !line.trim();
  const special = (line) => FENCE.test(line) || ITEM.test(line) || HEADING.test(line);
  while (at < text.length) {
    const begin = at, { line, stop, next } = peek();
    if (begin && blank(line) && "\n" === text[begin - 1]) { at = next; continue; } // a gap between blocks
    const fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (fence) {
      at = next;
      let to = text.length;
      while (at < text.length) {
        const here = peek();
        const closing = here.line.trim();
        if (closing.length >= fence[1].length && closing === fence[1][0].repeat(closing.length)) { to = at; at = here.next; break; }
        at = here.next;
      }
      yield { kind: "code", from: begin, language: fence[2].trim().slice(0, 40), start: next, to: Math.max(next, text[to - 1] === "\n" ? to - 1 : to) };
    } else if (ITEM.test(line)) {
      const items = [];
      while (at < text.length) {
        const here = peek(), item = ITEM.exec(here.line);
        if (item) {
          const number = /\d/.test(item[2]) ? Number.parseInt(item[2], 10) : null;
          items.push({ indent: item[1].length, number, from: at + item[0].length, to: here.stop });
        } else if (blank(here.line)) {
          let ahead = here.next;
          while (ahead < text.length && blank(peek(ahead).line)) ahead = peek(ahead).next;
          if (!ITEM.test(peek(ahead).line)) break;
          at = ahead;
          continue;
        } else if (here.line.startsWith("  ") && !FENCE.test(here.line)) {
          items.at(-1).to = here.stop;
        } else {
          break;
        }
        at = here.next;
      }
      yield { kind: "list", from: begin, items };
    } else if (heading) {
      at = next;
      yield { kind: "heading", from: begin, start: begin + heading[0].length, to: stop };
    } else {
      at = next;
      while (at < text.length && !blank(peek().line) && !special(peek().line)) at = peek().next;
      while (at < text.length && blank(peek().line)) at = peek().next;
      yield { kind: "text", from: begin, to: at };
    }
  }
}

function element(kind, name = "", text = "") {
  const made = document.createElement(kind);
  if (name) made.className = name;
  made.textContent = text;
  return made;
}

// A button that copies a text, which is asked for when it is pressed.
export function copyButton(text) {
  const made = element("button", "copy", "Copy");
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
    const field = element("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
