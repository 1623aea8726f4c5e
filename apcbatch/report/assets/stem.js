// Stem: the details of one node of the prefix tree, in words. Must not know the picture.

function showStem(place, tree, node) {
  if (place.dataset.shown === String(node)) return;
  place.dataset.shown = String(node);
  const { stems } = tree;
  const fate = fateOf(stems, node);
  const tokens = (name, value = stems[name][node]) => quantity(name, value, (some) => counted(some, "token"));
  const quiet = (...words) => element("span", { class: "quiet" }, words);
  const facts = [
    node === 0 ? ["Position", "the empty prefix"]
      : ["Position", "tokens ", quantity("begin", stems.begin[node]), " to ", quantity("end", stems.end[node])],
    ["Requests", quantity("requests", stems.requests[node])],
    ["Saved here and below", tokens("saved", tree.weights.saved[node])],
    ["Restored here", tokens("restored"), stems.restored[node] === 0 ? null
      : quiet(": memory ", quantity("memory", stems.memory[node]), ", disk ", quantity("disk", stems.disk[node]))],
    ["Computed here", tokens("computed"),
      fate.again === 0 ? null : quiet(", of these ", grouped(fate.again), " again")],
    ["Snapshots kept", quantity("snapshots", stems.snapshots[node]), stems.snapshots[node] === 0 ? null
      : [", ", quantity("snapshot_bytes", stems.snapshot_bytes[node], bytes)]],
    ["Dropped for room", quantity("dropped", stems.dropped[node]), stems.dropped_s[node] === null ? null
      : [", the last one ", quantity("dropped_s", stems.dropped_s[node], seconds), " into the run"]],
    stems.hidden[node] === 0 ? null : ["Folded in",
      quantity("hidden", stems.hidden[node], (value) => counted(value, "request")), " of branches too small to show"],
  ];
  place.replaceChildren(
    element("h3", {}, node === 0 ? "All requests" : "Stem"),
    ...(stems.text[node] === "" ? [] : [foreign(stems.text[node], "blockquote", { "data-name": "text" })]),
    factList(facts, { "data-stem": node }));
}
