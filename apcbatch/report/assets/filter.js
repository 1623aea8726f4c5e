// Filter: a small query language over requests, and the rows that match. Every term must match:
// `reason:diverged turn:>3 -error: "two words"`.

const NUMBER_KEYS = [
  "line", "turn", "prompt", "cached", "ideal", "computed", "out", "drafted", "accepted", "prefill_ms", "decode_ms",
];
const TEXT_KEYS = ["id", "reason", "error", "from", "finish", "answer", "calls"];

/** Parse a filter into [{key, text, not}]. A term without a known key is searched for in all texts. */
function termsOf(words) {
  const terms = [];
  for (const [, not, key, phrase, word] of words.matchAll(/(-?)(?:([a-z_]+):)?(?:"([^"]*)"?|(\S*))(?:\s+|$)/g)) {
    let text = phrase ?? word ?? "";
    let name = key ?? null;
    if (name !== null && !NUMBER_KEYS.includes(name) && !TEXT_KEYS.includes(name)) {
      text = `${name}:${text}`;
      name = null;
    }
    if (name !== null || text !== "") terms.push({ key: name, text: text.toLowerCase(), not: not === "-" });
  }
  return terms;
}

/** Quote the value of a term if needed, so that it stays one word. */
function quotedTerm(value) {
  return /[\s"]/.test(value) || value === "" ? `"${value.replaceAll('"', "")}"` : value;
}

/** Return the rows that match all terms, in OUT's order. */
function matchingRows(columns, words) {
  const tests = termsOf(words).map((term) => testOf(columns, term));
  const rows = new Uint32Array(columns.size);
  let found = 0;
  for (let row = 0; row < columns.size; row += 1) {
    if (tests.every((test) => test(row))) rows[found++] = row;
  }
  return rows.subarray(0, found);
}

/** Return the test of a term, a function of a row. A key alone tests for a text that is not empty, or a number above 0.
 *  */
function testOf(columns, { key, text, not }) {
  let test;
  if (key === null) test = (row) => columns.searched(row).includes(text);
  else if (NUMBER_KEYS.includes(key)) {
    const within = rangeOf(text);
    const values = columns.numbers[key];
    test = (row) => within(values?.[row] ?? 0);
  } else {
    const textAt = columns.texts[key];
    test = text === "" ? (row) => textAt(row) !== "" : (row) => textAt(row).toLowerCase().includes(text);
  }
  return not ? (row) => !test(row) : test;
}

/** Return the test of a range, a function of a value: 3, >3, >=3, <3, <=3 or 3..5. Other texts match nothing. */
function rangeOf(text) {
  const found = /^(>=|<=|>|<|=)?(-?[\d.,_]+?)(?:\.\.(-?[\d.,_]+))?$/.exec(text);
  if (found === null) return text === "" ? (value) => value > 0 : () => false;
  const [first, last] = [found[2], found[3]].map((part) => Number((part ?? "").replace(/[,_]/g, "")));
  if (found[3] !== undefined) return (value) => value >= first && value <= last;
  return {
    ">": (value) => value > first, ">=": (value) => value >= first, "<": (value) => value < first,
    "<=": (value) => value <= first,
  }[found[1]] ?? ((value) => value === first);
}

/** Make a link that applies a filter to the requests. */
function filterLink(words, text) {
  return element("a", {
    href: addressOf({ ...placeOf(location.hash), filter: words, request: null }), class: "filterLink",
    click: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      go({ filter: words, request: null });
      document.getElementById("requests").scrollIntoView();
    },
  }, text);
}
