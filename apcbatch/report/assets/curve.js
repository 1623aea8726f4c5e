// Curve: hit rate, bytes and seconds of each block size, as tune-block-size or plan found them.

const CURVES = [
  ["hit_rate", "prompt tokens restored", percent],
  ["predicted_s", "seconds, predicted", seconds],
  ["measured_s", "seconds, measured", seconds],
  ["store_bytes", "bytes in the store", bytes],
];

function showCurve(section, curve) {
  section.hidden = curve === null || curve.candidates.length === 0;
  if (section.hidden) return;
  const { candidates, recommended } = curve;
  const best = recommended ? recommended.block_size : null;
  const shown = CURVES.filter(([name]) => candidates.some((one) => typeof one[name] === "number"));
  const names = shown.slice(1).map(([, words]) => capital(words));
  const heads = ["Block size", "Prompt tokens restored", "Computed", ...names];
  const rows = candidates.map((one) => [
    element("span", {}, counted(one.block_size, "token"), one.block_size === best ? " (recommended)" : ""),
    `${grouped(one.cached_tokens)} (${percent(one.hit_rate)})`,
    grouped(one.computed_tokens),
    ...shown.slice(1).map(([name, , form]) => (typeof one[name] === "number" ? form(one[name]) : NOT_KNOWN)),
  ]);
  const sizes = candidates.map((one) => one.block_size);
  const ofRow = (at) => ({ "data-block-size": sizes[at], class: sizes[at] === best ? "chosen" : null });
  const table = plainTable("Block sizes", heads, rows, heads.map((_, at) => at).slice(1), "", ofRow);
  fill(section,
    element("p", {}, best === null ? "No block size is recommended. "
      : element("strong", {}, `Recommended: blocks of ${counted(best, "token")}. `),
    `From ${plain(curve.source)}, policy ${plain(curve.policy)}, model ${plain(curve.model)}.`),
    element("div", { class: "curves" }, shown.map((measure) => smallCurve(candidates, measure, best))),
    table);
}

/** Draw one measure over block sizes, at equal distances. */
function smallCurve(candidates, [name, words, form], best) {
  const points = candidates.map((one, at) => ({ at, value: one[name], size: one.block_size }))
    .filter((point) => typeof point.value === "number");
  const most = Math.max(...points.map((point) => point.value));
  const said = (point) => `${point.size}: ${form(point.value)}`;
  const x = (point) => ((point.at + 0.5) / candidates.length) * 100;
  const y = (point) => (most > 0 ? 100 - (point.value / most) * 92 : 100);
  const path = points.map((point, at) => `${at === 0 ? "M" : "L"}${x(point)} ${y(point)}`).join("");
  const dots = points.map((point) => element("span", {
    class: `dot${point.size === best ? " best" : ""}`, title: `${counted(point.size, "token")}: ${form(point.value)}`,
    style: { left: `${x(point)}%`, top: `${y(point)}%` },
  }));
  const ends = [candidates[0], candidates.at(-1)].map((one) => element("span", {}, grouped(one.block_size)));
  return element("figure", { class: "curve" },
    element("figcaption", {}, capital(words), element("span", { class: "quiet" }, ` from 0 to ${form(most)}`)),
    element("div", { class: "drawing", role: "img", "aria-label": points.map(said).join(", ") },
      canvasOf(100, drawn("path", { class: "line", d: path })), dots),
    element("div", { class: "ends", "aria-hidden": "true" }, ends[0], element("span", {}, "block size"), ends[1]));
}

function capital(words) {
  return words[0].toUpperCase() + words.slice(1);
}

panels.curve = (section, run, report) => showCurve(section, report.curve);
