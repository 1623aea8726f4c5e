// Columns: the requests of a run as columns to display, search and sort.

const SOURCES = ["", "memory", "disk"];

/** Columns of the table. means: tooltip. number: whether values are numbers. width: in pixels. stays: shown on narrow
 *  screens too. */
const HEADS = [
  { key: "id", words: "Request", means: "custom_id of the request", width: 170, stays: true },
  { key: "answer", words: "Answer", means: "the answer's first words, calls, or its error", width: 300, stays: true },
  { key: "turn", words: "Turn", means: "turn of the conversation", number: true, width: 66 },
  { key: "prompt", words: "Prompt", means: "tokens of the prompt", number: true, width: 84 },
  { key: "cached", words: "Restored", means: "prompt tokens restored", number: true, width: 92, stays: true },
  { key: "ideal", words: "Ideal", means: "prompt tokens that an earlier request had covered", number: true, width: 80 },
  { key: "computed", words: "Computed", means: "prompt tokens that were computed", number: true, width: 100 },
  { key: "reason", words: "Reason", means: "why it got less than the ideal", width: 144 },
  { key: "from", words: "From", means: "where the state came from", width: 78 },
  { key: "out", words: "Out", means: "tokens of the answer", number: true, width: 64 },
  { key: "prefill_ms", words: "Prefill", means: "time for the prompt, ms", number: true, width: 92 },
  { key: "decode_ms", words: "Decode", means: "time for the answer, ms", number: true, width: 92 },
  { key: "finish", words: "Finish", means: "what ended the answer", width: 100 },
  { key: "line", words: "Line", means: "line of the input", number: true, width: 70 },
];

/** Make the columns of the document's requests. numbers: values by key. texts: by key, functions of a row. searched:
 *  function of a row that returns all its text in lower case. */
function columnsOf(requests) {
  const tenths = (values) => values.map((value) => value / 10);
  const drafts = requests.drafted ? ["drafted", "accepted"] : [];
  const counts = ["line", "turn", "prompt", "cached", "ideal", "computed", "out", ...drafts];
  const calls = (row) => (requests.calls[row] ?? []).map((call) => `${call.name} ${compact(call.arguments)}`).join(" ");
  const columns = {
    size: requests.id.length,
    requests,
    numbers: {
      ...Object.fromEntries(counts.map((key) => [key, requests[key]])),
      prefill_ms: tenths(requests.prefill_ms),
      decode_ms: tenths(requests.decode_ms),
    },
    texts: {
      id: (row) => requests.id[row],
      reason: (row) => requests.reasons[requests.reason[row]],
      error: (row) => requests.errors[requests.error[row]],
      from: (row) => SOURCES[requests.from[row]],
      finish: (row) => requests.finishes[requests.finish[row]],
      answer: (row) => requests.answer[row],
      calls,
    },
  };
  const kept = [];
  columns.searched = (row) => (kept[row] ??= [
    requests.id[row], columns.texts.reason(row), columns.texts.error(row), requests.answer[row], calls(row),
    promptWords(requests.prompt_text?.[row]),
  ].join("\n").toLowerCase());
  setTimeout(() => prepareSearch(columns, 0), 200);
  return columns;
}

/** Return the text of a prompt, which is a text, or messages of a role and a text each. */
function promptWords(prompt) {
  return Array.isArray(prompt) ? prompt.map((message) => message.join("\n")).join("\n") : prompt ?? "";
}

/** Compute the searchable text of all rows in steps of 2,000, so that the first filter does not wait for it. */
function prepareSearch(columns, first) {
  const last = Math.min(columns.size, first + 2000);
  for (let row = first; row < last; row += 1) columns.searched(row);
  if (last < columns.size) setTimeout(() => prepareSearch(columns, last), 20);
}

/** Return the text of a row's answer column: its error, else the answer, else its tool calls. */
function gist(columns, row) {
  const { requests, texts } = columns;
  return texts.error(row) || requests.answer[row].slice(0, 300) || texts.calls(row).slice(0, 300);
}

function compact(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Return the rows sorted by one column. Equal ones stay in OUT's order, ascending or descending. Value and row are
 *  packed into one number, because numbers sort without a comparison function: 50,000 rows in a few ms. */
function sortedRows(columns, rows, key, isDown) {
  if (key === null) return rows;
  const values = columns.numbers[key] ?? ranksOf(columns, key);
  const sign = isDown ? -1 : 1;
  const { size } = columns;
  const keys = Float64Array.from(rows, (row) => sign * Math.round(values[row] * 10) * size + row).sort();
  return Uint32Array.from(keys, (one) => ((one % size) + size) % size);
}

/** Return each row's rank by text, cached: texts are compared once, and later sorts compare numbers. */
function ranksOf(columns, key) {
  columns.ranks ??= {};
  if (columns.ranks[key] !== undefined) return columns.ranks[key];
  const textAt = key === "answer" ? (row) => gist(columns, row) : columns.texts[key];
  const texts = Array.from({ length: columns.size }, (_, row) => textAt(row));
  const places = new Map([...new Set(texts)].sort().map((text, place) => [text, place]));
  columns.ranks[key] = Float64Array.from(texts, (text) => places.get(text));
  return columns.ranks[key];
}
