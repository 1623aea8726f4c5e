// Place: the reader's position, kept in the address behind "#", so that links and the back button restore it:
// "#run=1&request=support-0&tree=17&filter=reason:cold".

const PLACES = ["run", "request", "tree", "filter"];

/** Parse the page's address into {run, request, tree, filter}, each a text; null for absent ones. */
function placeOf(hash) {
  const place = { run: null, request: null, tree: null, filter: null };
  for (const part of hash.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    const name = part.slice(0, Math.max(at, 0));
    if (PLACES.includes(name)) place[name] = unescaped(part.slice(at + 1));
  }
  return place;
}

/** Return the address of a place: the text from "#" on. Readable characters are not escaped, unless they would break
 *  the address. */
function addressOf(place) {
  const said = PLACES.filter((name) => place[name] !== null && place[name] !== undefined && place[name] !== "");
  return "#" + said.map((name) => `${name}=${escaped(String(place[name]))}`).join("&");
}

/** Change the place: `change` overrides the current one. The back button returns to the current place, unless
 *  `quietly`. */
function go(change, quietly = false) {
  clearTimeout(later.timer);
  const address = addressOf({ ...placeOf(location.hash), ...later.change, ...change });
  later.change = {};
  if (address === (location.hash || "#")) return;
  history[quietly ? "replaceState" : "pushState"](null, "", address);
  dispatchEvent(new Event("hashchange"));
}

/** Like `go`, after 300 ms and without a history entry: for input that changes with each key. */
function goSoon(change) {
  clearTimeout(later.timer);
  Object.assign(later.change, change);
  later.timer = setTimeout(() => go({}, true), 300);
}
const later = { change: {}, timer: 0 };

function escaped(text) {
  return encodeURIComponent(wellFormed(text)).replace(/%(2F|3A|2C|3E|3C)/g, decodeURIComponent);
}

/** Replace lone surrogates, which no address can hold. */
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
