// Elements: functions that make the page's nodes. Text is inserted as text alone, never as markup, so no answer can
// become a tag or a script.

/** Panels by name: a function of (its section, the run, the report), called again for each run shown. report.js keeps
 *  its result. A panel's name is its section's id and its file's name. */
const panels = {};

/** Make an element with attributes and children. A function as attribute listens to the event of that name; null and
 *  false are left out; `style` is an object of properties. A child is a node or a text. */
function element(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
function drawn(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, tag), attributes, children);
}

// The SVG namespace, assembled because a report must have no text that looks like an address.
const SVG = ["http", "//www.w3.org/2000/svg"].join(":");

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** Make an element with a user's text, isolated from the writing direction around it. */
function foreign(text, tag = "bdi", attributes = {}) {
  return element(tag, { dir: tag === "bdi" ? null : "auto", ...attributes }, visible(text));
}

/** Return the text with an escape for each control character and each mark that would reorder its surroundings. */
function visible(text) {
  return String(text).replace(UNSEEN, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 0x100 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** Make a table whose cells are nodes or texts. numeric: indices of the columns to align to the right. kind: a class of
 *  the table. ofRow: returns the attributes of a row, given its index. */
function plainTable(caption, heads, rows, numeric = [], kind = "", ofRow = () => ({})) {
  const side = (at) => (numeric.includes(at) ? "number" : null);
  const head = heads.map((name, at) => element("th", { scope: "col", class: side(at) }, name));
  const body = rows.map((cells, row) => element("tr", ofRow(row), cells.map((cell, at) => (
    at === 0 ? element("th", { scope: "row" }, cell) : element("td", { class: side(at) }, cell)))));
  return element("div", { class: `wide ${kind}`.trim(), tabindex: "0", role: "group", "aria-label": caption },
    element("table", { class: "plain" },
      element("caption", { class: "unseen" }, caption),
      element("thead", {}, element("tr", {}, head)),
      element("tbody", {}, body)));
}

/** Make a bar as wide as a share of its cell, with words beside it. */
function metered(share, words, kind = "") {
  const meter = { class: `meter ${kind}`.trim(), "aria-hidden": "true", style: { width: `${share * 100}%` } };
  return element("span", { class: "metered" }, element("span", meter), element("span", {}, words));
}

/** Make a list of names with their values, each a node, a text or a list of them; null facts are left out. */
function factList(facts, attributes = {}) {
  const known = facts.filter((fact) => fact !== null);
  return element("dl", { class: "facts", ...attributes }, known.map(([name, ...value]) => (
    element("div", {}, element("dt", {}, name), element("dd", {}, value)))));
}

/** Make one entry of a legend: a coloured square and its words. */
function legendEntry(kind, ...words) {
  return element("li", {}, element("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), ...words);
}

/** Replace the nodes of a section below its heading by these, and show the section. */
function fill(section, ...nodes) {
  section.replaceChildren(section.querySelector("h2"), ...nodes.flat(Infinity).filter((node) => node !== null));
  section.hidden = false;
}
