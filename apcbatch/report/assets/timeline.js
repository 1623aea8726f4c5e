// Timeline: running and failed requests of each process over time. One drawing per process; its lanes share one time
// axis and one cursor.

const LANES = [["running", "Requests running", "at most "], ["failed", "Requests failed", "in all "]];

function showTimelines(section, run) {
  section.hidden = run.timelines.length === 0;
  if (section.hidden) return;
  fill(section, run.timelines.map((timeline, at) => processFigure(timeline, at, run.timelines.length)));
}

function processFigure(timeline, at, of) {
  const { running, failed } = timeline;
  const caption = element("figcaption", {},
    element("strong", {}, of > 1 ? `Process ${at + 1} of ${of}: ` : ""),
    `began ${instant(timeline.begin)}, took ${seconds(timeline.seconds)}`, phaseWords(timeline.phases));
  if (Math.max(...running, ...failed) === 0) {
    return element("figure", {}, caption, element("p", {}, "No request ended."));
  }
  const plots = element("div", { class: "lanes" }, LANES.map(([name, words, said]) => {
    const most = Math.max(...timeline[name]);
    return most === 0 ? null : lane(words, `${said}${grouped(most)}`, laneDrawing(timeline, name, most), name);
  }));
  const cursorPlace = element("div", { class: "scrub" });
  const words = of > 1 ? `Timeline of process ${at + 1}` : "Timeline";
  const line = withCursor(cursorPlace, running.length, words, (column) => columnWords(timeline, column));
  return element("figure", { class: "timeline", "data-timeline": at }, caption, line,
    element("div", { class: "scrubbed" }, plots, cursorPlace), timeAxis(Math.max(timeline.seconds, 1e-6)));
}

/** Make the line of seconds by phase: "load 1.2 s, prefill 4 s, idle 0.1 s"; null for a process that did not end. */
function phaseWords(phases) {
  if (phases === null) {
    return element("p", { class: "quiet" }, "It did not end: it was killed, or it is still at work.");
  }
  const spent = Object.entries(phases).filter(([, value]) => value > 0);
  return element("p", { class: "quiet" }, spent.flatMap(([name, value], at) => [
    at > 0 ? ", " : "", `${visible(name)} `, quantity(`phases.${name}`, value, seconds)]));
}

function lane(name, most, drawing, kind) {
  return element("div", { class: `lane ${kind}` },
    element("div", { class: "laneName" }, element("span", {}, name), element("span", { class: "quiet" }, most)),
    drawing);
}

/** Draw one row of values. In the lane of failed requests, a mark stands in each column with new ones. */
function laneDrawing(timeline, name, most) {
  const values = timeline[name];
  const tops = values.map((value) => (value / most) * 0.94);
  const marks = name !== "failed" ? [] : values.flatMap((value, at) => {
    const added = value - (at > 0 ? values[at - 1] : 0);
    const mark = { title: counted(added, "failed request"), style: { left: `${((at + 0.5) / values.length) * 100}%` } };
    return added === 0 ? [] : [element("span", { class: "failureMark", ...mark }, "✕")];
  });
  return element("div", { class: "drawing" }, canvasOf(values.length, [
    drawn("path", { class: "area", d: areaPath(tops) }),
    drawn("path", { class: "line", d: stepPath(tops) }),
  ]), marks);
}

function canvasOf(columns, paths) {
  return drawn("svg", { viewBox: `0 0 ${columns} 100`, preserveAspectRatio: "none", "aria-hidden": "true" }, paths);
}

/** Return the stepped area below a row of heights, 0 to 1; empty columns are left out. */
function areaPath(tops) {
  return tops.map((top, at) => (top > 0 ? `M${at} 100V${down(top)}H${at + 1}V100Z` : "")).join("");
}

function stepPath(tops) {
  return tops.map((top, at) => `${at === 0 ? "M0 " : "V"}${down(top)}H${at + 1}`).join("");
}

function down(height) {
  return (100 - height * 100).toFixed(2);
}

function columnWords({ running, failed, seconds: whole }, at) {
  const span = Math.max(whole, 1e-6) / running.length;
  const digits = Math.max(0, Math.ceil(-Math.log10(span)));
  const words = [`${trimmed(at * span, digits)} to ${trimmed((at + 1) * span, digits)} s`,
    `${grouped(running[at])} running`];
  if (failed[at] > 0) words.push(`${grouped(failed[at])} failed until then`);
  return words.join(" · ");
}

function timeAxis(whole) {
  const step = niceTime(whole / 6);
  const axis = element("div", { class: "timeAxis", "aria-hidden": "true" });
  for (let at = 0; at <= whole * 0.93; at += step) {
    axis.append(element("span", { style: { left: `${(at / whole) * 100}%` } }, at === 0 ? "0 s" : seconds(at)));
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
