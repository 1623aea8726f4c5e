// Report: reads the document, draws the panels of the selected run, and follows the address.

async function showReport() {
  const report = await readDocument();
  const shown = { run: -1 };
  const kept = {};
  document.getElementById("made").textContent = `apcbatch ${plain(report.made.version)}, ${instant(report.made.at)}`;
  const selector = runSelector(report.runs);
  function drawRun(number) {
    const run = report.runs[number];
    shown.run = number;
    selector.value = String(number);
    document.getElementById("name").replaceChildren("Report of ", foreign(run.name));
    for (const [name, show] of Object.entries(panels)) kept[name] = show(document.getElementById(name), run, report);
    drawSections();
  }
  function follow() {
    const place = placeOf(location.hash);
    const run = Number(place.run ?? 0);
    const isNew = shown.run !== (report.runs[run] ? run : 0);
    if (isNew) drawRun(report.runs[run] ? run : 0);
    const columns = report.runs[shown.run].requests;
    kept.tree(place.tree === null ? 0 : Number(place.tree));
    kept.requests.filter(place.filter ?? "");
    kept.requests.choose(place.request);
    bringToView(isNew, place);
  }
  addEventListener("hashchange", follow);
  follow();
  followPrint(() => kept.requests);
  document.documentElement.dataset.ready = "true";
}

/** Scroll to the request, edge or filter that a link names. */
function bringToView(isNew, place) {
  const detail = document.getElementById("request-detail");
  if (place.request !== null && !detail.hidden) detail.scrollIntoView({ block: "nearest" });
  else if (isNew && place.tree !== null) document.getElementById("tree").scrollIntoView();
  else if (isNew && place.filter !== null) document.getElementById("requests").scrollIntoView();
}

/** Make the selection of the run, hidden if there is only one. */
function runSelector(runs) {
  const selector = document.getElementById("run");
  const words = (run, at) => `${at + 1}: ${visible(run.name)}`;
  selector.replaceChildren(...runs.map((run, at) => element("option", { value: at }, words(run, at))));
  selector.addEventListener("change", () => {
    go({ run: selector.value === "0" ? null : selector.value, tree: null, request: null });
  });
  selector.closest("label").hidden = runs.length < 2;
  return selector;
}

/** Make links to the visible sections. They do not change the address, which holds the place in the run. */
function drawSections() {
  const links = [...document.querySelectorAll("main > section:not([hidden])")].map((section) => (
    element("a", { href: `#${section.id}` }, section.dataset.short ?? section.querySelector("h2").textContent)));
  document.getElementById("sections").replaceChildren(...links);
}

function goToSection(event) {
  const link = event.target.closest('a[href^="#"]');
  if (link === null || link.hash.includes("=")) return;
  event.preventDefault();
  const heading = document.querySelector(`${link.hash} h2`);
  heading.tabIndex = -1;
  heading.focus({ preventScroll: true });
  heading.closest("section").scrollIntoView();
}

/** For print, open everything folded and show the table's first rows. */
function followPrint(table) {
  const opened = [];
  const print = (isPrinting) => {
    if (isPrinting) opened.push(...document.querySelectorAll("details:not([open])"));
    for (const one of opened) one.open = isPrinting;
    if (!isPrinting) opened.length = 0;
    table().print(isPrinting);
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("print").addEventListener("change", (event) => requestAnimationFrame(() => print(event.matches)));
}

document.addEventListener("click", goToSection);
showReport().catch((fault) => {
  const trouble = document.getElementById("trouble");
  trouble.hidden = false;
  trouble.textContent = `This report cannot be shown: ${fault.message}. It needs a browser of the last two years `
    + "(DecompressionStream); if the file was cut on its way, copy it again.";
});
