// Verdict: how the run ended, what to do next, and its main numbers.

function showVerdict(section, run) {
  const verdict = run.verdict;
  const [mood, words] = ending(verdict);
  fill(section,
    element("p", { class: `ending ${mood}` },
      element("span", { class: "sign", "aria-hidden": "true" }, { good: "✓", fair: "!", bad: "✕" }[mood]), words),
    verdict.continue === null ? null : commandLine(verdict.continue),
    errorCodes(verdict),
    answerCounts(verdict),
    ignoredColumns(verdict),
    ...[run.episodes ?? [], run.notes ?? []].flat().map((note) => foreign(note, "p", { class: "quiet note" })),
    element("dl", { class: "tiles" }, ...tiles(verdict, run.tokens)),
    verdict.percentiles === null ? null : percentileTable(verdict.percentiles),
    verdict.warnings.length ? warnings(verdict.warnings) : null);
}

/** Return [mood, sentence] of the run's end, with the exit status explained in words. */
function ending(verdict) {
  const { requests, ok, errors, exit_code: code } = verdict;
  const of = (value, name) => quantity(name, value);
  const all = [of(requests, "requests"), requests === 1 ? " request, " : " requests, ", of(ok, "ok"), " answered, ",
    of(errors, "errors"), errors === 1 ? " error." : " errors."];
  const exit = code === null ? [] : [" Exit status ", quantity("exit_code", code), "."];
  const say = (mood, words) => [mood, [element("strong", {}, words), " ", ...all, ...exit]];
  if (verdict.unfinished) return say("bad", "The run did not end: it was killed, or it is still at work.");
  if (code === 130 || code === 143) return say("fair", "The run was interrupted; what ran was finished.");
  if (code === 1) return say("bad", "The run stopped early.");
  if (code === 2) return say("bad", "The run could not begin.");
  if (requests === 0) return say("fair", "No request is answered.");
  if (code === null) return say("fair", "It is not known how the run ended: its run file does not say.");
  if (errors > 0) return say(ok === 0 ? "bad" : "fair", ok === 0 ? "Every request failed." : "Some requests failed.");
  if (verdict.doubts.length > 0) {
    const words = { cut: "are cut", empty: "are empty", unread: "have a call that could not be read" };
    const many = verdict.doubts.map((name) => words[name] ?? visible(name));
    return say("fair", `Every request is answered, but many answers ${many.join(" or ")}.`);
  }
  return say("good", "Every request is answered.");
}

/** Make the command that continues the run, with a button that copies it. */
function commandLine(command) {
  const code = foreign(command, "code", { "data-name": "continue" });
  const button = element("button", {
    type: "button",
    click: () => {
      getSelection().selectAllChildren(code);
      navigator.clipboard?.writeText(command).then(() => { button.textContent = "Copied"; }, () => {});
    },
  }, "Copy");
  return element("div", { class: "command" }, element("p", {}, "To continue:"), code, button);
}

function errorCodes(verdict) {
  const codes = Object.entries(verdict.errors_by_code);
  if (codes.length === 0) return null;
  return element("ul", { class: "codes", "aria-label": "Errors by code" }, codes.map(([code, number]) => (
    element("li", {}, filterLink(`error:${quotedTerm(code)}`, visible(code)), " ",
      element("span", { class: "quiet" }, counted(number, "request"))))));
}

function ignoredColumns(verdict) {
  const columns = Object.entries(verdict.ignored_columns);
  if (columns.length === 0) return null;
  return element("p", { class: "quiet" }, "Columns that took no part: ", columns.flatMap(([name, number], index) => [
    index > 0 ? ", " : "", foreign(name), " (", quantity(`ignored_columns.${name}`, number), ")"]));
}

/** Make the lists of how answers ended and of their warnings; null for a list without a count. */
function answerCounts(verdict) {
  const item = (name, value, words) => element("li", {}, words, " ",
    element("span", { class: "quiet" }, quantity(name, value)));
  const list = (label, items) => (
    items.length === 0 ? null : element("ul", { class: "codes", "aria-label": label }, items));
  const ended = Object.entries(verdict.finish_reasons).map(([reason, count]) => item(`finish_reasons.${reason}`, count,
    filterLink(`finish:${quotedTerm(reason)}`, reason === "length" ? "cut" : visible(reason))));
  if (verdict.empty_answers) ended.push(item("empty_answers", verdict.empty_answers, "empty"));
  if (verdict.unread_calls) ended.push(item("unread_calls", verdict.unread_calls, "with an unread call"));
  const warned = Object.entries(verdict.answer_warnings).map(([kind, count]) => (
    item(`answer_warnings.${kind}`, count, visible(kind))));
  return [list("Answers by their end", ended), list("Warnings of answers by kind", warned)];
}

function tiles(verdict, tokens) {
  const { seconds: parts } = verdict;
  const line = (...words) => element("span", {}, ...words);
  const count = (name, noun = "token") => quantity(name, verdict[name], (value) => counted(value, noun));
  const spent = parts === null ? [] : ["load", "plan", "prefill", "decode", "store"]
    .filter((name) => parts[name] !== undefined && parts[name] !== null)
    .map((name) => line(`${name} `, quantity(`seconds.${name}`, parts[name], seconds)));
  const restored = verdict.hit_rate === null ? null : quantity("hit_rate", verdict.hit_rate, percent);
  return [
    tile("Prompt tokens restored", restored ?? element("span", {}, NOT_KNOWN),
      line(quantity("cached_tokens", verdict.cached_tokens), " of ", count("prompt_tokens")),
      verdict.ideal_hit_rate === null ? null
        : line("ideal ", quantity("ideal_hit_rate", verdict.ideal_hit_rate, percent),
          verdict.ideal_tokens === null ? null : [", ", count("ideal_tokens")])),
    tile("Prompt tokens computed", count("computed_tokens"),
      verdict.prefill_tokens_per_s === null ? null
        : line("prefill ", quantity("prefill_tokens_per_s", verdict.prefill_tokens_per_s, rate))),
    tile("Tokens generated", count("completion_tokens"),
      verdict.decode_tokens_per_s === null ? null
        : line("decode ", quantity("decode_tokens_per_s", verdict.decode_tokens_per_s, rate))),
    parts === null ? null : tile("Time", quantity("seconds.total", parts.total, seconds), ...spent),
    verdict.peak_rss_bytes === null ? null : tile("Peak memory",
      quantity("peak_rss_bytes", verdict.peak_rss_bytes, bytes),
      verdict.peak_device_bytes === null ? null
        : line("device ", quantity("peak_device_bytes", verdict.peak_device_bytes, bytes))),
    !verdict.store_skipped ? null : tile("Snapshots not stored", count("store_skipped"),
      line("later runs compute them again")),
  ].filter((one) => one !== null);
}

/** Make the table of times and tokens per answered request: half of them need at most p50, 99 of 100 at most p99. */
function percentileTable(rows) {
  const words = {
    seconds: "Time, prefill and decode", prefill_s: "Prefill", decode_s: "Decode",
    prompt: "Prompt tokens", computed: "Computed tokens", out: "Generated tokens",
  };
  const names = ["p50", "p95", "p99"];
  const cells = rows.map((row) => {
    const form = ["prompt", "computed", "out"].includes(row.name) ? grouped : seconds;
    const values = names.map((name) => quantity(`${row.name}.${name}`, row[name], form));
    return [words[row.name] ?? visible(row.name), ...values];
  });
  const heads = ["One answered request", ...names];
  return plainTable("What one answered request took", heads, cells, [1, 2, 3], "percentiles");
}

/** Make one main number; its unit is set smaller. */
function tile(name, value, ...details) {
  const words = value.textContent;
  const at = words.search(/ [^\d]+$/);
  if (at > 0) value.replaceChildren(words.slice(0, at), element("small", {}, words.slice(at)));
  return element("div", { class: "tile" }, element("dt", {}, name), element("dd", { class: "chief" }, value),
    element("dd", { class: "details" }, ...details));
}

function warnings(texts) {
  return element("div", { class: "warnings" }, element("h3", {}, counted(texts.length, "warning")),
    element("ul", {}, texts.map((text) => foreign(text, "li"))));
}

panels.verdict = showVerdict;
