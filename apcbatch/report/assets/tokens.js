// Tokens: one bar of all prompt tokens, restored, lost and computed, and the reasons for the lost ones.

const PARTS = [
  ["memory", "restored from memory"], ["disk", "restored from disk"], ["computed", "computed"],
];

function showTokens(section, run) {
  const tokens = run.tokens;
  const total = tokens.computed + tokens.memory + tokens.disk;
  if (total === 0) {
    section.hidden = true;
    return;
  }
  fill(section, tokenBar(tokens, total), tokenLegend(tokens, total), ...missTable(tokens));
}

/** Draw the bar: restored tokens from the left, then computed ones. Lost tokens were computed again, so they overlay
 *  the beginning of the computed ones and end at the ideal. */
function tokenBar(tokens, total) {
  const share = (value) => `${(value / total) * 100}%`;
  const parts = PARTS.map(([name, words]) => {
    const label = fittingWords(percent(tokens[name] / total), words);
    if (name === "computed" && tokens.lost > 0) label.style.marginLeft = `${(tokens.lost / tokens.computed) * 100}%`;
    return barPart(name, tokens, `${counted(tokens[name], "token")} ${words}`, { width: share(tokens[name]) }, label);
  });
  const bar = element("div", { class: "bar" }, parts);
  if (tokens.lost !== null && tokens.lost > 0) {
    const place = { left: share(tokens.memory + tokens.disk), width: share(tokens.lost) };
    bar.append(barPart("lost", tokens, `${counted(tokens.lost, "token")} lost`, place));
  }
  const words = tokenWords(tokens, total).map(([, said]) => said);
  const label = `Of ${counted(total, "prompt token")}: ${words.join("; ")}`;
  const figure = element("div", { class: "tokenbar", role: "img", "aria-label": label }, bar);
  if (tokens.ideal !== null) {
    const kind = `ideal${tokens.ideal / total > 0.8 ? " late" : ""}`;
    const place = { left: share(tokens.ideal) };
    figure.append(element("div", { class: kind, "data-part": "ideal", "data-value": tokens.ideal, style: place },
      element("span", {}, `ideal ${percent(tokens.ideal / total)}`)));
  }
  return figure;
}

function barPart(name, tokens, title, style, ...label) {
  return element("div", { class: `part ${name}`, "data-part": name, "data-value": tokens[name], title, style }, label);
}

/** Make a label that shows only the words that fit: the others wrap to a hidden line. */
function fittingWords(...words) {
  return element("span", { class: "fitting" }, element("i"), words.map((word) => element("span", {}, word)));
}

/** Return [[part, words]] of the parts that have tokens. */
function tokenWords(tokens, total) {
  const words = (name, what, why = "") => (
    [name, `${what}: ${counted(tokens[name], "token")} (${percent(tokens[name] / total)})${why}`]);
  return [
    words("memory", "restored from memory"),
    words("disk", "restored from disk"),
    words("computed", "computed"),
    ...(tokens.lost === null ? [] : [words("lost", "of these lost", ", an earlier request had computed them")]),
    ...(tokens.ideal === null ? [] : [words("ideal", "ideal", ", what earlier requests had covered")]),
  ];
}

function tokenLegend(tokens, total) {
  return element("ul", { class: "legend" }, tokenWords(tokens, total).map((entry) => legendEntry(...entry)));
}

function missTable(tokens) {
  if (tokens.misses.length === 0) return [element("p", {}, "No request got less than the ideal.")];
  const most = Math.max(1, ...tokens.misses.map((miss) => miss.tokens));
  const rows = tokens.misses.map((miss) => [
    filterLink(`reason:${quotedTerm(miss.reason)}`, visible(miss.reason)),
    grouped(miss.requests),
    metered(miss.tokens / most, counted(miss.tokens, "token")),
    visible(miss.remedy),
  ]);
  const title = "Why requests got less than the ideal";
  const heads = ["Reason", "Requests", "Lost", "What to do"];
  const ofRow = (at) => ({ "data-miss": tokens.misses[at].reason });
  return [element("h3", {}, title), plainTable(title, heads, rows, [1, 2], "misses", ofRow)];
}

panels.tokens = showTokens;
