// Requests: a table with a row per request, sorted by its headings and filtered. Only rows in view are elements.

const ROW_PIXELS = 30;
const ROWS_BEYOND = 8;
const ROWS_IN_PRINT = 200;

/** Draw the section of the requests. Return {filter(words), choose(name), print(isPrinting)}. */
function showTable(section, run) {
  const columns = columnsOf(run.requests);
  const state = {
    columns, rows: [], words: null, sort: null, isDown: false, chosen: -1, isPrinting: false, drawn: new Map(),
  };
  state.count = element("p", { id: "requests-count", role: "status" });
  state.body = element("tbody");
  state.view = element("div", {
    class: "rows", tabindex: "0", role: "region", "aria-label": "Requests, rows", scroll: () => drawRows(state),
  });
  state.detail = element("aside", { id: "request-detail", "aria-label": "Request", tabindex: "-1", hidden: true });
  state.input = filterInput(state);
  state.heads = HEADS.map((head) => headCell(state, head));
  state.table = element("table", { "aria-rowcount": columns.size + 1 },
    element("colgroup", {}, HEADS.map((head) => (
      element("col", { class: head.stays ? "stays" : "leaves", style: { width: `${widthOf(columns, head)}px` } })))),
    element("thead", {}, element("tr", { "aria-rowindex": "1" }, state.heads)), state.body);
  state.table.style.setProperty("--least", `${HEADS.reduce((sum, head) => sum + widthOf(columns, head), 0)}px`);
  state.view.append(state.table);
  state.cut = element("p", { class: "printed" });
  fill(section, element("div", { class: "controls" }, state.input, state.count), filterHelp(),
    element("div", { class: "withdetail" }, state.view, state.detail), state.cut);
  furnish(state.view, {
    click: (event) => openRow(event.target.closest("[data-row]"), event, state),
    keydown: (event) => moveInRows(state, event),
  }, []);
  new ResizeObserver(() => drawRows(state)).observe(state.view);
  return {
    filter: (words) => chooseRows(state, words),
    choose: (name) => chooseRow(state, name === null ? -1 : rowOf(columns, name)),
    print: (isPrinting) => {
      state.isPrinting = isPrinting;
      drawRows(state);
    },
  };
}

function filterInput(state) {
  const input = element("input", {
    id: "requests-filter", type: "search", placeholder: "id, reason, error or words of the answer", autocomplete: "off",
    spellcheck: "false", "aria-describedby": "requests-count filter-help",
    input: () => {
      chooseRows(state, input.value);
      goSoon({ filter: input.value });
    },
  });
  return element("label", { class: "filter" }, element("span", {}, "Filter"), input);
}

function filterHelp() {
  const example = (...words) => words.map((one) => [element("code", {}, one), " "]);
  return element("details", { class: "quiet", id: "filter-help" }, element("summary", {}, "How to filter"),
    element("p", {}, "Words are searched for in ids, reasons, errors, answers, calls and prompts; all must be there. ",
      example("id:support-0", "reason:diverged", "answer:refund", "calls:read_file", "finish:length", "from:disk"),
      "look in one column. ", example("error:"), "has an error. ", example("turn:3", "prompt:>10000", "out:5..20"),
      `compare numbers: ${NUMBER_KEYS.join(", ")}. `, example("-reason:"), "turns a term round. ",
      example('"two words"'), "are searched for as they stand."));
}

function headCell(state, head) {
  const arrow = element("span", { class: "arrow", "aria-hidden": "true" });
  return element("th", { scope: "col", class: cellClass(head), "aria-sort": "none" },
    element("button", {
      type: "button", "data-sort": head.key, title: `Sort by ${head.means}`,
      click: () => {
        // First click: amounts descending, other columns ascending. Second: the reverse. Third: OUT's order.
        const first = head.number === true && head.key !== "line" && head.key !== "turn";
        if (state.sort !== head.key) [state.sort, state.isDown] = [head.key, first];
        else if (state.isDown === first) state.isDown = !first;
        else state.sort = null;
        orderRows(state);
      },
    }, head.words, arrow));
}

function cellClass({ number, stays }) {
  return [number ? "number" : "", stays ? "" : "leaves"].join(" ").trim() || null;
}

function chooseRows(state, words) {
  if (words === state.words) return;
  state.words = words;
  const input = state.input.querySelector("input");
  if (input.value !== words) input.value = words;
  state.matching = matchingRows(state.columns, words);
  orderRows(state);
}

function orderRows(state) {
  state.rows = sortedRows(state.columns, state.matching, state.sort, state.isDown);
  HEADS.forEach((head, at) => {
    const isSorted = head.key === state.sort;
    state.heads[at].setAttribute("aria-sort", isSorted ? (state.isDown ? "descending" : "ascending") : "none");
    state.heads[at].querySelector(".arrow").textContent = isSorted ? (state.isDown ? "▼" : "▲") : "";
  });
  const { size } = state.columns;
  state.count.replaceChildren(quantity("shown", state.rows.length), ` of ${counted(size, "request")}`,
    state.rows.length === 0 ? ": none is as the filter says." : "");
  state.view.scrollTop = 0;
  drawRows(state);
}

/** Draw the rows in view, between two spacers as high as the other rows. */
function drawRows(state) {
  const { rows, view } = state;
  const isPrinting = state.isPrinting || getComputedStyle(state.cut).display !== "none";
  const first = isPrinting ? 0 : Math.max(0, Math.floor(view.scrollTop / ROW_PIXELS) - ROWS_BEYOND);
  const sight = isPrinting ? ROWS_IN_PRINT : Math.ceil(view.clientHeight / ROW_PIXELS) + 2 * ROWS_BEYOND;
  const last = Math.min(rows.length, first + sight);
  const earlier = state.drawn;
  state.drawn = new Map();
  for (let at = first; at < last; at += 1) {
    const said = `${at} ${rows[at] === state.chosen} ${location.hash}`;
    const old = earlier.get(rows[at]);
    state.drawn.set(rows[at], old?.said === said ? old : { said, node: tableRow(state, rows[at], at) });
  }
  const made = [spacer(first * ROW_PIXELS), ...Array.from(state.drawn.values(), ({ node }) => node)];
  if (!isPrinting) made.push(spacer((rows.length - last) * ROW_PIXELS));
  const held = heldRow(state);
  replaceRows(state.body, made);
  if (held !== null) holdRow(state, held);
  state.cut.textContent = rows.length > ROWS_IN_PRINT
    ? `The first ${grouped(ROWS_IN_PRINT)} of ${counted(rows.length, "row")}; the file has them all.` : "";
}

/** Replace the rows by these. Rows in both stay in place, because a click during a scroll would miss a row that is
 *  moved. */
function replaceRows(body, rows) {
  const wanted = new Set(rows);
  for (const old of [...body.children]) if (!wanted.has(old)) old.remove();
  rows.forEach((row, at) => {
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
}

/** Return the row whose link has the focus; null if none has. */
function heldRow(state) {
  const { activeElement: held } = document;
  return state.body.contains(held) ? Number(held.closest("[data-row]").dataset.row) : null;
}

function holdRow(state, row) {
  state.body.querySelector(`[data-row="${row}"] a`)?.focus({ preventScroll: true });
}

/** Return the width of a column. Ids differ at their end, so theirs is wide enough for most of them. */
function widthOf(columns, { key, width }) {
  if (key !== "id") return width;
  const longest = columns.requests.id.reduce((most, id) => Math.max(most, id.length), 0);
  return Math.min(Math.max(width, 16 + longest * 7.4), 330);
}

function spacer(height) {
  return element("tr", { class: "spacer", "aria-hidden": "true", hidden: height === 0 },
    element("td", { style: { height: `${height}px` } }));
}

function tableRow(state, row, at) {
  const { columns, chosen } = state;
  const { numbers, texts, requests } = columns;
  const cells = HEADS.map((head) => {
    const { key, number } = head;
    if (key === "id") {
      const href = addressOf({ ...placeOf(location.hash), request: requestName(columns, row), tree: null });
      return element("th", { scope: "row" }, element("a", { href }, foreign(requests.id[row])));
    }
    if (number) {
      const value = numbers[key][row];
      return element("td", { class: cellClass(head), "data-name": key, "data-value": value }, cellNumber(key, value));
    }
    if (key !== "answer") return element("td", { class: cellClass(head), "data-name": key }, visible(texts[key](row)));
    const kind = requests.error[row] ? "failed" : null;
    return element("td", { "data-name": key, class: kind }, foreign(gist(columns, row)));
  });
  return element("tr", {
    "data-row": row, "aria-rowindex": at + 2, ...(row === chosen ? { class: "chosen", "aria-current": "true" } : {}),
  }, cells);
}

function cellNumber(key, value) {
  if (key === "prefill_ms" || key === "decode_ms") return seconds(value / 1000);
  if ((key === "ideal" && value < 0) || (key === "turn" && value === 0)) return NOT_KNOWN;
  return grouped(value);
}

function openRow(row, event, state) {
  if (row === null || event.ctrlKey || event.metaKey || event.shiftKey || getSelection().toString() !== "") return;
  event.preventDefault();
  const number = Number(row.dataset.row);
  go({ request: number === state.chosen ? null : requestName(state.columns, number) });
}

function chooseRow(state, row) {
  if (row === state.chosen) return;
  state.chosen = row;
  drawRows(state);
  const at = state.rows.indexOf(row);
  if (at >= 0) bringToSight(state, at);
  state.detail.hidden = row < 0;
  if (row >= 0) showRequest(state.detail, state.columns, row, () => go({ request: null }));
}

function bringToSight(state, at) {
  const { view } = state;
  const top = at * ROW_PIXELS;
  const room = view.clientHeight - 2 * ROW_PIXELS;
  if (top < view.scrollTop || top > view.scrollTop + room) view.scrollTop = Math.max(0, top - room / 2);
  drawRows(state);
}

/** Move the focus from row to row with the arrow keys; an open request follows. */
function moveInRows(state, event) {
  if (event.key === "Escape") go({ request: null });
  const held = heldRow(state);
  const from = held === null ? -1 : state.rows.indexOf(held);
  const to = { ArrowDown: from + 1, ArrowUp: from - 1, Home: 0, End: state.rows.length - 1 }[event.key];
  if (from < 0 || to === undefined || to < 0 || to >= state.rows.length) return;
  event.preventDefault();
  bringToSight(state, to);
  const row = state.rows[to];
  holdRow(state, row);
  if (state.chosen >= 0) go({ request: requestName(state.columns, row) }, true);
}

panels.requests = showTable;
