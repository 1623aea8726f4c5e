// Stem: the details of one node of the prefix tree, in words. Must not know the picture.

function showStem(place, tree, node) {
  if (place.dataset.shown === String(node)) return;
  place.dataset.shown = String(node);
  const { stems } = tree;
  const fate = fateOf(stems, node);
  const facts = [
    ["Position", node === 0 ? "the empty prefix"
      : [`tokens `, quantity("begin", stems.begin[node]), " to ", quantity("end", stems.end[node])]],
    ["Requests", quantity("requests", stems.requests[node])],
    ["Saved here and below", quantity("saved", tree.weights.saved[node], (value) => counted(value, "token"))],
    ["Restored here", [quantity("restored", stems.restored[node], (value) => counted(value, "token")),
      stems.restored[node] === 0 ? null : element("span", { class: "quiet" },
        " memory ", quantity("memory", stems.memory[node]), ", disk ", quantity("disk", stems.disk[node]))]],
    ["Computed here", [quantity("computed", stems.computed[node], (value) => counted(value, "token")),
      fate.again === 0 ? null : element("span", { class: "quiet" }, " of these ", grouped(fate.again), " again")]],
    ["Snapshots kept", [quantity("snapshots", stems.snapshots[node]),
      stems.snapshots[node] === 0 ? null : [", ", quantity("snapshot_bytes", stems.snapshot_bytes[node], bytes)]].flat()],
    ["Dropped for room", [quantity("dropped", stems.dropped[node]),
      stems.dropped_s[node] === null ? null
        : [", the last one ", quantity("dropped_s", stems.dropped_s[node], seconds), " into the run"]].flat()],
    stems.hidden[node] === 0 ? null
      : ["Folded in", [quantity("hidden", stems.hidden[node], (value) => counted(value, "request")),
        " of branches too small to be shown"]],
  ];
  place.replaceChildren(
    element("h3", {}, node === 0 ? "All requests" : "Stem"),
    ...(stems.text[node] === "" ? [] : [foreign(stems.text[node], "blockquote", { "data-name": "text" })]),
    element("dl", { class: "facts", "data-stem": node },
      facts.filter((fact) => fact !== null).map(([name, value]) => element("div", {}, element("dt", {}, name),
        element("dd", {}, ...[value].flat())))));
}
