// Tree numbers: children, sums of subtrees, and the boxes of a drawing. In the columns, parents come before
// children, and row 0 is the root.

/** Make the tree from the columns of the document. */
function treeOf(edges) {
  const size = edges.parent.length;
  const children = Array.from({ length: size }, () => []);
  const saved = Float64Array.from(edges.restored);
  const passed = Float64Array.from(edges.restored, (restored, node) => restored + edges.computed[node]);
  const level = new Uint16Array(size);
  for (let node = 1; node < size; node += 1) {
    children[edges.parent[node]].push(node);
    level[node] = level[edges.parent[node]] + 1;
  }
  for (let node = size - 1; node > 0; node -= 1) {
    saved[edges.parent[node]] += saved[node];
    passed[edges.parent[node]] += passed[node];
  }
  return { edges, size, children, level, weights: { saved, passed } };
}

/** Return the nodes from the root to this one. */
function pathTo(tree, node) {
  const path = [];
  for (let at = node; at >= 0; at = tree.edges.parent[at]) path.unshift(at);
  return path;
}

/** Return the fate of an edge's tokens: {restored, again, once}. `once` is their first, necessary computation; `again`
 *  is every later one. */
function fateOf(edges, node) {
  const length = edges.end[node] - edges.begin[node];
  const once = Math.min(edges.computed[node], edges.hidden[node] > 0 ? edges.computed[node] : length);
  return { restored: edges.restored[node], once, again: edges.computed[node] - once };
}

/** Return the boxes of the subtree of `top`: [{node, x, width, begin, end, count}], x and width as shares of the
 *  picture, begin and end in tokens. Children lie below their parent, the widest first. Those narrower than `least`
 *  share one box, with node -1 and their count. */
function boxesOf(tree, top, measure, least) {
  const weight = tree.weights[measure];
  const { begin, end } = tree.edges;
  const boxes = [];
  const left = [[top, 0, 1]];
  while (left.length > 0) {
    const [node, x, width] = left.pop();
    boxes.push({ node, x, width, begin: begin[node], end: end[node], count: 1 });
    if (weight[node] === 0) continue;
    const share = width / weight[node];
    let at = x;
    let few = null;
    for (const child of tree.children[node].slice().sort((one, two) => weight[two] - weight[one] || one - two)) {
      const taken = weight[child] * share;
      if (taken === 0) break;
      if (taken >= least) left.push([child, at, taken]);
      else {
        few ??= { node: -1, parent: node, x: at, width: 0, begin: end[node], end: 0, count: 0 };
        few.width += taken;
        few.count += 1;
        few.end = Math.max(few.end, end[child]);
      }
      at += taken;
    }
    if (few !== null && few.width >= least / 4) boxes.push(few);
  }
  return boxes;
}
