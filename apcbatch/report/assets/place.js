// Place: where the reader is, kept in the address behind "#" so that a link or the back button leads there again.
// "#run=1&request=support-0&tree=17&filter=reason:cold". Must not know what is drawn.

const PLACES = ["run", "request", "tree", "filter"];

/** {run, request, tree, filter} of the page's address, each a text; what is not said is null. */
function placeOf(hash) {
  const place = { run: null, request: null, tree: null, filter: null };
  for (const part of hash.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    const name = part.slice(0, Math.max(at, 0));
    if (PLACES.includes(name)) place[name] = unescaped(part.slice(at + 1));
  }
  return place;
}

/** The address of a place: what follows "#". Only what would break it is escaped, so that a link can be read. */
function addressOf(place) {
  const said = PLACES.filter((name) => place[name] !== null && place[name] !== undefined && place[name] !== "");
  return "#" + said.map((name) => `${name}=${escaped(String(place[name]))}`).join("&");
}

/** The reader goes elsewhere: `change` is laid over where they are. A step back leads here again, unless `quietly`. */
function go(change, quietly = false) {
  clearTimeout(later.timer);
  const address = addressOf({ ...placeOf(location.hash), ...later.change, ...change });
  later.change = {};
  if (address === (location.hash || "#")) return;
  history[quietly ? "replaceState" : "pushState"](null, "", address);
  dispatchEvent(new Event("hashchange"));
}

/** As `go`, in a moment and without a step for the back button: for what changes with each key. */
function goSoon(change) {
  clearTimeout(later.timer);
  Object.assign(later.change, change);
  later.timer = setTimeout(() => go({}, true), 300);
}
const later = { change: {}, timer: 0 };

function escaped(text) {
  return encodeURIComponent(wellFormed(text)).replace(/%(2F|3A|2C|3E|3C)/g, decodeURIComponent);
}

/** The text without half characters, which no address can hold. */
function wellFormed(text) {
  return text.replace(/\p{Surrogate}/gu, "\ufffd");
}

function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
