// Tree: the prefix tree as an icicle. The width of an edge is the tokens that it saved over all requests (or that
// passed through it). Its vertical extent is its position in the prompt, its colour the fate of its tokens.

const LEAST_PIXELS = 2;
const ROOT_PIXELS = 26;

/** Draw the section of the tree. `open(node)` is called when the reader chooses an edge; the returned function shows
 *  one. */
function showTree(section, run, open) {
  const edges = run.tree;
  if (edges === null || edges.parent.length === 0) {
    fill(section, element("p", { class: "absent" }, NO_TREE));
    return () => {};
  }
  const tree = treeOf(edges);
  const picture = element("div", { class: "icicle", role: "tree", "aria-label": "Prefix tree" });
  const axis = element("div", { class: "axis", "aria-hidden": "true" });
  const path = element("ol", { class: "path", "aria-label": "Edges from the root to the one shown" });
  const details = element("aside", { id: "edge", "aria-live": "polite", "aria-label": "Edge" });
  const state = {
    tree, picture, axis, path, details, open, top: 0, measure: "saved", boxes: [], nodes: new Map(), pointer: [-1, -1],
  };
  if (tree.weights.saved[0] === 0) state.measure = "passed";
  const reset = element("button", { type: "button", id: "tree-reset", click: () => open(0) }, "Whole tree");
  fill(section,
    element("div", { class: "controls" }, measureChoice(state), reset),
    icicleLegend(),
    path,
    element("div", { class: "withaside" }, element("div", { class: "plot" }, axis, picture), details),
    edges.note ? element("p", { class: "quiet" }, visible(edges.note)) : null,
    element("p", { class: "quiet keys" }, "Click an edge to zoom; arrow keys move, Enter zooms, Backspace goes up, "
      + "Escape shows the whole tree."));
  furnish(picture, {
    click: (event) => chooseBox(state, event.target.closest(".box")),
    pointermove: (event) => {
      // A box that moves under a resting pointer is not hovered.
      const [x, y] = state.pointer;
      state.pointer = [event.clientX, event.clientY];
      if (x !== event.clientX || y !== event.clientY) hoverBox(state, event.target.closest("[data-node]"));
    },
    pointerdown: (event) => { state.pointer = [event.clientX, event.clientY]; },
    pointerleave: () => showEdge(details, tree, state.top),
    focusin: (event) => hoverBox(state, event.target.closest("[data-node]")),
    keydown: (event) => moveInTree(state, event),
  }, []);
  new ResizeObserver(() => drawIcicle(state)).observe(picture);
  return (node) => {
    const held = picture.contains(document.activeElement);
    state.top = Number.isInteger(node) && node >= 0 && node < tree.size ? node : 0;
    drawIcicle(state);
    drawPath(state);
    reset.disabled = state.top === 0;
    showEdge(details, tree, state.top);
    if (held) focusBox(state, state.top);
  };
}
const NO_TREE = "The tree is made of the prompts: apcbatch report OUT --prompts INPUT shows it. Prompts of a rollout "
  + "have the run's own answers in them, which INPUT does not have.";

/** Make the choice between the two measures of width. */
function measureChoice(state) {
  const choice = (name, words) => element("label", {}, element("input", {
    type: "radio", name: "tree-measure", value: name, checked: state.measure === name,
    change: () => {
      state.measure = name;
      drawIcicle(state);
      drawPath(state);
    },
  }), words);
  return element("fieldset", { class: "choice" }, element("legend", {}, "Width"),
    choice("saved", "tokens saved"), choice("passed", "prompt tokens"));
}

function icicleLegend() {
  return element("ul", { class: "legend" },
    legendEntry("restored", "restored"),
    legendEntry("again", "computed again"),
    legendEntry("once", "computed once, as it must be"));
}

function drawIcicle(state) {
  const { tree, picture, top, measure } = state;
  const width = picture.clientWidth;
  const height = picture.clientHeight;
  if (width === 0) return;
  const boxes = boxesOf(tree, top, measure, LEAST_PIXELS / width);
  const first = tree.edges.begin[top];
  // Boxes below a root at position 0 leave room for it, since it has no tokens and so no height.
  const room = top === 0 ? ROOT_PIXELS : 0;
  const deepest = Math.max(first + 1, ...boxes.map((box) => box.end));
  const scale = (height - room) / (deepest - first);
  state.boxes = boxes;
  state.nodes = new Map(boxes.filter((box) => box.node >= 0).map((box) => [box.node, box]));
  picture.replaceChildren(...boxes.map((box) => {
    const node = box.node < 0 ? fewBox(box) : edgeBox(state, box);
    const isRoot = box.node === 0;
    const y = isRoot ? 0 : room + (box.begin - first) * scale;
    const tall = isRoot ? ROOT_PIXELS : (box.end - box.begin) * scale;
    const place = { left: `${box.x * 100}%`, width: `${box.width * 100}%`, top: `${y}px`, height: `${tall}px` };
    furnish(node, { style: place }, []);
    if (tall < 15 || box.width * width < 56) node.classList.add("mute");
    box.element = node;
    return node;
  }));
  drawAxis(state, first, deepest, scale, room);
}

function edgeBox(state, { node }) {
  const { tree, top } = state;
  const { edges } = tree;
  const fate = fateOf(edges, node);
  const known = fate.restored + fate.again;
  const kind = node === 0 ? "root" : known === 0 ? "once" : "mixed";
  const box = element("div", {
    class: `box ${kind}`, role: "treeitem", "data-node": node,
    tabindex: node === top ? "0" : "-1", "aria-level": tree.level[node] + 1, "aria-selected": String(node === top),
    "aria-label": edgeWords(tree, node),
  }, element("span", {}, node === 0 ? rootWords(tree, state.measure) : visible(edges.text[node])));
  if (known > 0) box.style.setProperty("--restored-share", `${(fate.restored / known) * 100}%`);
  return box;
}

/** Make the box that stands for edges too narrow to draw. */
function fewBox(box) {
  const title = `${counted(box.count, "narrow edge")}: zoom in to see`;
  return element("div", { class: "box few", "aria-hidden": "true", title });
}

function rootWords(tree, measure) {
  const value = counted(tree.weights[measure][0], "token");
  return measure === "saved" ? `all requests: ${value} saved` : `all requests: ${value} of prompts`;
}

function edgeWords(tree, node) {
  const { edges } = tree;
  if (node === 0) return `all requests, ${counted(tree.weights.saved[0], "token")} saved`;
  return `${visible(edges.text[node]) || "edge"}, tokens ${grouped(edges.begin[node])} to ${grouped(edges.end[node])}, `
    + `${counted(edges.requests[node], "request")}, ${counted(edges.restored[node], "token")} restored, `
    + `${grouped(edges.computed[node])} computed`;
}

/** Draw the axis of positions at the left. */
function drawAxis({ axis, picture }, first, deepest, scale, room) {
  const step = niceStep((deepest - first) / Math.max(2, picture.clientHeight / 70));
  const ticks = [];
  for (let at = Math.ceil(first / step) * step; at <= deepest; at += step) {
    const top = `${room + (at - first) * scale}px`;
    ticks.push(element("span", { class: "tick", style: { top } }, grouped(at)));
  }
  axis.replaceChildren(element("span", { class: "name" }, "position in tokens"), ...ticks);
}

/** Return the smallest of 1, 2, 5, 10, 20, ... that is not below the value. */
function niceStep(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function drawPath({ tree, top, path, open }) {
  path.replaceChildren(...pathTo(tree, top).map((node) => {
    const { text, begin } = tree.edges;
    const words = node === 0 ? "all requests" : visible(text[node]).trim() || `tokens from ${grouped(begin[node])}`;
    if (node === top) return element("li", { "aria-current": "true" }, element("span", {}, words));
    const choose = { type: "button", class: "link", "data-path": node, click: () => open(node) };
    return element("li", {}, element("button", choose, words));
  }));
}

/** Open the edge of a clicked box; for the edge that fills the picture, and for a box of narrow edges, its parent. */
function chooseBox(state, box) {
  if (box === null) return;
  if (box.dataset.node === undefined) {
    const few = state.boxes.find((one) => one.element === box);
    state.open(few.parent);
    return;
  }
  const node = Number(box.dataset.node);
  focusBox(state, node);
  state.open(node === state.top ? Math.max(0, state.tree.edges.parent[node]) : node);
}

function hoverBox(state, box) {
  if (box !== null) showEdge(state.details, state.tree, Number(box.dataset.node));
}

function focusBox(state, node) {
  const box = state.nodes.get(node);
  if (box === undefined) return;
  for (const other of state.picture.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  box.element.tabIndex = 0;
  box.element.focus({ preventScroll: true });
}

function moveInTree(state, event) {
  const held = event.target.closest("[data-node]");
  if (held === null || event.ctrlKey || event.altKey || event.metaKey) return;
  const node = Number(held.dataset.node);
  const { tree, open, top } = state;
  const moves = {
    ArrowDown: () => focusBox(state, childrenInSight(state, node)[0]),
    ArrowUp: () => focusBox(state, tree.edges.parent[node]),
    ArrowLeft: () => focusBox(state, neighbour(state, node, -1)),
    ArrowRight: () => focusBox(state, neighbour(state, node, 1)),
    Home: () => focusBox(state, top),
    Enter: () => chooseBox(state, held),
    " ": () => chooseBox(state, held),
    Backspace: () => open(Math.max(0, tree.edges.parent[top])),
    Escape: () => open(0),
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  moves[event.key]();
}

function childrenInSight({ tree, nodes }, node) {
  return fromTheLeft(nodes, tree.children[node].filter((child) => nodes.has(child)));
}

function fromTheLeft(nodes, some) {
  return some.sort((one, two) => nodes.get(one).x - nodes.get(two).x);
}

/** Return the node to the left or right at the same depth of the tree. */
function neighbour(state, node, step) {
  const { tree, nodes } = state;
  const row = fromTheLeft(nodes, [...nodes.keys()].filter((other) => tree.level[other] === tree.level[node]));
  return row[row.indexOf(node) + step];
}

panels.tree = (section, run) => showTree(section, run, (node) => go({ tree: node || null, request: null }));
