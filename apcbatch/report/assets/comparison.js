// Comparison: two runs of the same requests: equal and different answers, and their numbers side by side.

function showComparisons(section, report) {
  section.hidden = report.comparisons.length === 0;
  if (!section.hidden) fill(section, report.comparisons.map((one) => comparisonArticle(report.runs, one)));
}

function comparisonArticle(runs, comparison) {
  const [base, other] = [runs[comparison.base].name, runs[comparison.other].name].map(visible);
  return element("article", { "data-comparison": comparison.other },
    element("h3", {}, base, element("span", { class: "quiet" }, " with "), other),
    sameness(comparison),
    onlyIn(comparison, base, other),
    comparison.other_requests > 0 ? element("p", {}, `${counted(comparison.other_requests, "request")} of these had `
      + "another prompt or other settings, so another answer is no fault.") : null,
    comparison.different.length ? differences(runs, comparison) : null,
    element("div", { class: "sides" }, ...sides(comparison, base, other)));
}

/** Make the tables of both runs: measures, misses, options. */
function sides(comparison, base, other) {
  const block = (name, table) => element("div", {}, element("h4", {}, name), table);
  const both = `of ${base} and ${other}`;
  const measures = comparison.rows.map((row) => (
    [row.name, inUnit(row.base, row.unit), inUnit(row.other, row.unit), change(row.base, row.other)]));
  const misses = comparison.misses.map((miss) => (
    [visible(miss.reason), counted(miss.base, "request"), counted(miss.other, "request")]));
  const options = comparison.changed_options.map((option) => (
    [visible(option.name), plain(option.base), plain(option.other)]));
  return [
    measures.length ? block("Measures",
      plainTable(`Measures ${both}`, ["Measure", base, other, "Change"], measures, [1, 2, 3])) : null,
    misses.length
      ? block("Misses by reason", plainTable(`Misses ${both}`, ["Reason", base, other], misses, [1, 2])) : null,
    block("Options that changed", options.length
      ? plainTable(`Options ${both}`, ["Option", base, other], options) : element("p", {}, "None.")),
  ].filter((one) => one !== null);
}

/** Make the verdict: good if all answers are equal, bad if answers of one model differ. Requests that failed in one of
 *  the runs, and answers of two models, are no fault of a run. */
function sameness({ both, same_answers: same, different_count: unequal, failed_count: failed, other_model: isOther }) {
  if (both === 0) return element("p", { class: "ending fair" }, "The runs have no request in common.");
  const different = unequal - failed;
  const mood = unequal === 0 ? "good" : different > 0 && !isOther ? "bad" : "fair";
  const answer = unequal === 0 ? "yes, bit for bit, " : different > 0 ? "no, " : "yes, where both answered, ";
  const errors = failed === 0 ? [] : [", of which ", quantity("failed_count", failed), " failed in a run"];
  return element("p", { class: `ending ${mood}`, "data-same": different === 0 ? "yes" : "no" },
    element("span", { class: "sign", "aria-hidden": "true" }, { good: "✓", fair: "!", bad: "✕" }[mood]),
    element("strong", {}, `${isOther && unequal > 0 ? "Two models. " : ""}Same answers: ${answer}`),
    quantity("same_answers", same), " of ", quantity("both", both),
    ...(unequal === 0 ? ["."] : [" are equal, ", quantity("different_count", unequal),
      ` differ${unequal === 1 ? "s" : ""}`, ...errors, "."]));
}

function onlyIn(comparison, base, other) {
  const words = [[comparison.only_base, base], [comparison.only_other, other]].filter(([number]) => number > 0)
    .map(([number, name]) => `${counted(number, "request")} only in ${name}`);
  return words.length ? element("p", {}, words.join("; "), ".") : null;
}

function differences(runs, { base, other, different, different_count: count }) {
  const columns = runs.map(({ requests }) => ({ requests, size: requests.id.length }));
  const link = (run, row) => element("a", {
    href: addressOf({ run: run || null, request: requestName(columns[run], row) }),
  }, `answer in run ${run + 1}`);
  const rows = different.map((one) => [
    foreign(one.id),
    one.at < 0 ? "one of them is an error"
      : `from token ${grouped(one.at)} on${one.choice > 0 ? ` of answer ${one.choice + 1}` : ""}`,
    element("span", {}, link(base, one.base_row), ", ", link(other, one.other_row)),
  ]);
  const words = count > different.length
    ? `The first ${grouped(different.length)} of ${grouped(count)} answers that differ`
    : `The ${counted(count, "answer")} that differ${count === 1 ? "s" : ""}`;
  return element("details", { open: count <= 20 }, element("summary", {}, words),
    element("div", { class: "differences" }, plainTable("Answers that differ", ["Request", "Differs", "Look"], rows)));
}

/** Format the change from base to other: "+3.2 %", or a factor if it is 2 or more, or 0.5 or less. */
function change(base, other) {
  if (typeof base !== "number" || typeof other !== "number") return "";
  if (base === other) return "equal";
  if (base === 0) return "";
  const ratio = other / base;
  if (ratio >= 2 || (ratio > 0 && ratio <= 0.5)) {
    return `× ${ratio.toLocaleString("en-US", { maximumSignificantDigits: 3 })}`;
  }
  return `${ratio > 1 ? "+" : "−"}${percent(Math.abs(ratio - 1))}`;
}

panels.comparison = (section, run, report) => showComparisons(section, report);
