// Request: one request in full: its numbers, prompt if included, answer, calls, and a link to it.

/** Return the name of a request in an address: its id, or "row:N" if an earlier request has the same id. */
function requestName(columns, row) {
  const id = columns.requests.id[row];
  return id !== "" && rowOf(columns, id) === row ? id : `row:${row}`;
}

/** Return the row of the request with this name; -1 if there is none. */
function rowOf(columns, name) {
  if (columns.rowsById === undefined) {
    const { id } = columns.requests;
    columns.rowsById = new Map();
    for (let row = columns.size - 1; row >= 0; row -= 1) columns.rowsById.set(wellFormed(id[row]), row);
  }
  const found = columns.rowsById.get(wellFormed(name));
  if (found !== undefined) return found;
  const row = /^row:(\d+)$/.exec(name);
  return row !== null && Number(row[1]) < columns.size ? Number(row[1]) : -1;
}

function showRequest(place, columns, row, close) {
  const { requests, texts, numbers } = columns;
  const tokens = (name, key) => quantity(name, numbers[key][row], (value) => counted(value, "token"));
  const error = texts.error(row);
  const facts = [
    ["Line", quantity("line", requests.line[row])],
    requests.turn[row] === 0 ? null : ["Turn", quantity("turn", requests.turn[row])],
    ["Prompt", tokens("prompt", "prompt")],
    ["Restored", tokens("cached", "cached"), texts.from(row) ? ` from ${texts.from(row)}` : ""],
    ["Computed", tokens("computed", "computed")],
    ["Ideal", requests.ideal[row] < 0 ? NOT_KNOWN : tokens("ideal", "ideal")],
    texts.reason(row) === "" ? null
      : ["Less than the ideal", filterLink(`reason:${quotedTerm(texts.reason(row))}`, visible(texts.reason(row)))],
    ["Answer", tokens("out", "out"), `, ended by ${visible(texts.finish(row))}`],
    numbers.drafted === undefined ? null
      : ["Drafts", tokens("drafted", "drafted"), ", ", quantity("accepted", numbers.accepted[row]), " accepted"],
    ["Time", "prefill ", quantity("prefill_ms", numbers.prefill_ms[row], IN_UNITS.ms),
      ", decode ", quantity("decode_ms", numbers.decode_ms[row], IN_UNITS.ms)],
  ];
  const itself = { ...placeOf(location.hash), request: requestName(columns, row), tree: null, filter: null };
  place.replaceChildren(
    element("div", { class: "detailHead" },
      element("h3", {}, foreign(requests.id[row] || `row ${row}`)),
      element("a", { class: "self", href: addressOf(itself) }, "Link"),
      element("button", { type: "button", class: "close", "aria-label": "Close the request", click: close }, "✕")),
    factList(facts, { "data-request": requests.id[row] }),
    ...(error === "" ? [] : textBlock("Error", error, "error", null)),
    ...promptBlock(requests.prompt_text?.[row] ?? "", requests.answer_characters),
    ...textBlock("Answer", requests.answer[row], "answer", requests.answer_characters),
    ...callBlocks(requests.calls[row]));
  place.onkeydown = (event) => {
    if (event.key === "Escape") close();
  };
}

/** Make the prompt's nodes: a conversation for a chat, a text for a completion. */
function promptBlock(prompt, most) {
  if (!Array.isArray(prompt)) return textBlock("Prompt", prompt, "prompt", most);
  return [
    element("h4", {}, "Conversation"),
    element("ol", { class: "messages" }, prompt.map(([role, text]) => element("li", { "data-role": role },
      foreign(role, "span", { class: "quiet" }), foreign(text, "pre", { "data-name": "message", tabindex: "0" })))),
  ];
}

/** Make a heading and a verbatim text, with a note if the text was cut. */
function textBlock(name, text, kind, most) {
  if (text === "") return [];
  const isCut = most !== null && text.length >= most;
  const words = isCut ? ` cut to ${counted(most, "character")}, so that the page stays small` : "";
  return [
    element("h4", {}, name, element("span", { class: "quiet" }, words)),
    foreign(text, "pre", { class: kind, "data-name": kind, tabindex: "0" }),
  ];
}

function callBlocks(calls) {
  if (calls === null || calls.length === 0) return [];
  return [
    element("h4", {}, counted(calls.length, "tool call")),
    ...calls.map((call) => element("div", { class: "call", "data-call": call.name },
      foreign(call.name, "code", { class: "callName" }), foreign(pretty(call.arguments), "pre", { tabindex: "0" }))),
  ];
}

/** Format JSON with one value a line; return any other text unchanged. */
function pretty(value) {
  if (typeof value !== "string") return JSON.stringify(value, null, 2);
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}
