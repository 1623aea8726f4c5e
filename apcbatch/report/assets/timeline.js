// Timeline: activity of each process over time: shares of prefill, decode and store, running sequences, bytes held.
// One drawing per segment; all its lanes share one time axis and one cursor.

const COLUMNS = 400;
const LANES = [
  ["running", "Sequences running", grouped],
  ["pool_bytes", "Snapshots in pool", bytes],
  ["store_bytes", "Written to store", bytes],
  ["failed", "Failed requests", grouped],
];
const WORK = ["prefill", "decode", "store"];

function showTimelines(section, run) {
  if (run.timelines.length === 0) {
    if (run.tree === null) fill(section, element("p", { class: "absent" }, NO_TRACE));
    else section.hidden = true;
    return;
  }
  fill(section, element("ul", { class: "legend" },
    element("li", { class: "quiet" }, "Time, from below:"), WORK.map((name) => legendEntry(name, name)),
    legendEntry("idle", "idle, or none of these"), legendEntry("failure", "failed requests")),
  run.timelines.map((timeline, at) => workerFigure(timeline, at, run.timelines.length)));
}

function workerFigure(timeline, at, of) {
  const { passes } = timeline;
  const caption = element("figcaption", {},
    element("strong", {}, of > 1 ? `${at + 1} of ${of}: ` : "", visible(timeline.worker)),
    ` began ${instant(timeline.begin)}, took ${seconds(timeline.seconds)}`);
  if (passes.begin_s.length === 0) return element("figure", {}, caption, element("p", {}, "No pass ran."));
  const bins = binned(passes, timeline.seconds);
  const plots = element("div", { class: "lanes" },
    lane("Time", sharesOf(bins), workDrawing(bins), "work"),
    LANES.map(([name, words, form]) => {
      const most = Math.max(...bins.map((bin) => bin[name]));
      if (name === "failed" && most === 0) return null;
      const said = name === "failed" ? `${form(most)} in all` : `at most ${form(most)}`;
      return lane(words, said, lineDrawing(bins.map((bin) => bin[name]), most), name);
    }));
  const cursorPlace = element("div", { class: "scrub" });
  const describe = (column) => binWords(bins[column]);
  const line = withCursor(cursorPlace, bins.length, `Timeline of ${visible(timeline.worker)}`, describe);
  return element("figure", { class: "timeline", "data-timeline": at }, caption, line,
    element("div", { class: "scrubbed" }, plots, cursorPlace), timeAxis(bins.length ? bins.at(-1).end : 0));
}

/** Format the shares of the whole time: "prefill 34 %, decode 40 %, store 2 %". */
function sharesOf(bins) {
  const whole = bins.at(-1).end;
  const share = (work) => Math.min(1, bins.reduce((sum, bin) => sum + bin[work], 0) / whole);
  return WORK.map((work) => `${work} ${percent(share(work))}`).join(", ");
}

function lane(name, most, drawing, kind) {
  return element("div", { class: `lane ${kind}` },
    element("div", { class: "laneName" }, element("span", {}, name), element("span", { class: "quiet" }, most)),
    drawing);
}

/** Divide the passes into columns of equal time: seconds of each kind of work, the largest number of running sequences,
 *  the bytes at the column's end. */
function binned(passes, whole) {
  const rows = passes.begin_s.length;
  const last = passes.begin_s[rows - 1] + passes.seconds[rows - 1];
  const width = Math.max(whole ?? 0, last, 1e-9) / COLUMNS;
  const bins = Array.from({ length: COLUMNS }, (_, at) => ({
    begin: at * width, end: (at + 1) * width, prefill: 0, decode: 0, store: 0, running: 0, waiting: 0,
    prefill_tokens: 0, decode_tokens: 0, failures: 0, pool_bytes: null, store_bytes: null,
  }));
  for (let row = 0; row < rows; row += 1) {
    const begin = passes.begin_s[row];
    const end = begin + passes.seconds[row];
    const first = Math.min(COLUMNS - 1, Math.floor(begin / width));
    const final = Math.min(COLUMNS - 1, Math.max(first, Math.ceil(end / width) - 1));
    for (let at = first; at <= final; at += 1) {
      const bin = bins[at];
      const overlap = Math.min(end, bin.end) - Math.max(begin, bin.begin);
      const share = end > begin ? Math.max(0, overlap) / (end - begin) : 1 / (final - first + 1);
      for (const work of WORK) bin[work] += passes[`${work}_s`][row] * share;
      bin.prefill_tokens += passes.prefill_tokens[row] * share;
      bin.decode_tokens += passes.decode_tokens[row] * share;
      bin.running = Math.max(bin.running, passes.running[row]);
      bin.waiting = Math.max(bin.waiting, passes.waiting[row]);
    }
    bins[final].failures += passes.failures[row];
    bins[final].pool_bytes = passes.pool_bytes[row];
    bins[final].store_bytes = passes.store_bytes[row];
  }
  let held = { pool_bytes: 0, store_bytes: 0, failed: 0 };
  for (const bin of bins) {
    bin.failed = held.failed + bin.failures;
    bin.pool_bytes ??= held.pool_bytes;
    bin.store_bytes ??= held.store_bytes;
    held = bin;
  }
  return bins;
}

/** Draw the shares of time, stacked; the unfilled rest was idle. A mark stands for failed requests in a column. */
function workDrawing(bins) {
  const paths = [];
  const base = new Float64Array(bins.length);
  for (const work of WORK) {
    const tops = bins.map((bin, at) => Math.min(1, base[at] + bin[work] / (bin.end - bin.begin)));
    paths.push(drawn("path", { class: work, d: bandPath(base, tops) }));
    tops.forEach((top, at) => { base[at] = top; });
  }
  const marks = bins.flatMap((bin, at) => {
    if (bin.failures === 0) return [];
    const mark = element("span", { class: "failureMark", title: counted(bin.failures, "failed request") }, "✕");
    mark.style.left = `${((at + 0.5) / bins.length) * 100}%`;
    return [mark];
  });
  return element("div", { class: "drawing" }, canvasOf(bins.length, paths), marks);
}

function lineDrawing(values, most) {
  const tops = values.map((value) => (most > 0 ? value / most : 0) * 0.94);
  return element("div", { class: "drawing" }, canvasOf(values.length, [
    drawn("path", { class: "area", d: bandPath(new Float64Array(values.length), tops) }),
    drawn("path", { class: "line", d: stepPath(tops) }),
  ]));
}

function canvasOf(columns, paths) {
  return drawn("svg", { viewBox: `0 0 ${columns} 100`, preserveAspectRatio: "none", "aria-hidden": "true" }, paths);
}

/** Return the stepped outline between two rows of heights, 0 to 1; empty columns are left out. */
function bandPath(base, tops) {
  let path = "";
  for (let at = 0; at < tops.length; at += 1) {
    if (tops[at] - base[at] <= 0) continue;
    path += `M${at} ${down(base[at])}V${down(tops[at])}H${at + 1}V${down(base[at])}Z`;
  }
  return path;
}

function stepPath(tops) {
  return tops.map((top, at) => `${at === 0 ? "M0 " : "V"}${down(top)}H${at + 1}`).join("");
}

function down(height) {
  return (100 - height * 100).toFixed(2);
}

function binWords(bin) {
  const span = bin.end - bin.begin;
  const digits = Math.max(0, Math.ceil(-Math.log10(span)));
  const shares = WORK.map((work) => `${work} ${percent(Math.min(1, bin[work] / span))}`);
  const idle = Math.max(0, 1 - WORK.reduce((sum, work) => sum + bin[work], 0) / span);
  const words = [
    `${trimmed(bin.begin, digits)} to ${trimmed(bin.end, digits)} s: ${shares.join(", ")}, idle ${percent(idle)}`,
    `${grouped(bin.running)} running, ${grouped(bin.waiting)} waiting`,
    `pool ${bytes(bin.pool_bytes)}, written to the store ${bytes(bin.store_bytes)}`,
  ];
  if (bin.failed > 0) words.push(`${counted(bin.failures, "request")} failed, ${grouped(bin.failed)} until then`);
  return words.join(" · ");
}

function timeAxis(whole) {
  const step = niceTime(whole / 6);
  const axis = element("div", { class: "timeAxis", "aria-hidden": "true" });
  for (let at = 0; at <= whole * 0.93; at += step) {
    const tick = element("span", {}, at === 0 ? "0 s" : seconds(at));
    tick.style.left = `${(at / whole) * 100}%`;
    axis.append(tick);
  }
  return axis;
}

/** Return a step for a time axis, in seconds: 1, 2 or 5 times a power of ten below a minute, then minutes, hours and
 *  days. */
function niceTime(value) {
  const clock = [60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400].find((step) => step >= value);
  if (value > 30 && clock !== undefined) return clock;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

panels.timeline = showTimelines;
