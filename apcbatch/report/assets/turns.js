// Turns: prompt tokens by turn of the conversation, restored and computed.

function showTurns(section, run) {
  const { turn, requests, cached, computed } = run.turns;
  section.hidden = turn.length === 0;
  if (turn.length === 0) return;
  const sums = turn.map((_, at) => cached[at] + computed[at]);
  const most = Math.max(1, ...sums);
  const bars = element("div", { class: "bars" }, turn.map((name, at) => {
    const parts = [["computed", computed[at]], ["cached", cached[at]]].map(([kind, value]) => (
      element("div", { class: kind, style: { height: `${(value / most) * 100}%` } })));
    const label = turn.length <= 24 || name % 10 === 0 || at === 0 ? String(name) : "";
    const values = { "data-turn": name, "data-cached": cached[at], "data-computed": computed[at] };
    return element("div", { class: "turn", ...values }, element("div", { class: "stack" }, parts),
      element("span", { class: "label" }, label));
  }));
  const words = (at) => `turn ${turn[at]}${turn[at] === 100 && at === turn.length - 1 ? " and later" : ""}: `
    + `${counted(requests[at], "request")}, ${counted(cached[at], "token")} restored, ${grouped(computed[at])} computed`
    + (sums[at] > 0 ? ` (${percent(cached[at] / sums[at])} restored)` : "");
  const scrub = element("div", { class: "scrub" });
  const line = withCursor(scrub, turn.length, "Prompt tokens by turn", words);
  fill(section,
    element("ul", { class: "legend" }, legendEntry("cached", "restored"), legendEntry("computed", "computed"),
      element("li", { class: "quiet" }, `the highest bar is ${counted(most, "token")}`)),
    line,
    element("div", { class: "turns" }, bars, scrub),
    element("p", { class: "quiet axisName" }, "turn of the conversation"));
}

panels.turns = showTurns;
