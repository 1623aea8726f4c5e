// Edge: the details of one node of the prefix tree, in words.

function showEdge(place, tree, node) {
  if (place.dataset.shown === String(node)) return;
  place.dataset.shown = String(node);
  const { edges } = tree;
  const fate = fateOf(edges, node);
  const tokens = (name, value = edges[name][node]) => quantity(name, value, (some) => counted(some, "token"));
  const quiet = (...words) => element("span", { class: "quiet" }, words);
  const facts = [
    node === 0 ? ["Position", "the empty prefix"]
      : ["Position", "tokens ", quantity("begin", edges.begin[node]), " to ", quantity("end", edges.end[node])],
    ["Requests", quantity("requests", edges.requests[node])],
    ["Saved here and below", tokens("saved", tree.weights.saved[node])],
    ["Restored here", tokens("restored"), edges.restored[node] === 0 ? null
      : quiet(": memory ", quantity("memory", edges.memory[node]), ", disk ", quantity("disk", edges.disk[node]))],
    ["Computed here", tokens("computed"),
      fate.again === 0 ? null : quiet(", of these ", grouped(fate.again), " again")],
    edges.hidden[node] === 0 ? null : ["Folded in",
      quantity("hidden", edges.hidden[node], (value) => counted(value, "request")), " of branches too small to show"],
  ];
  place.replaceChildren(
    element("h3", {}, node === 0 ? "All requests" : "Edge"),
    ...(edges.text[node] === "" ? [] : [foreign(edges.text[node], "blockquote", { "data-name": "text" })]),
    factList(facts, { "data-edge": node }));
}
