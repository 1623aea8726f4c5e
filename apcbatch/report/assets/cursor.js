// Cursor: a selected column of a drawing, moved by the pointer or the arrow keys, with its values in words.

/** Make the drawing a slider over its columns. `describe(at)` returns the text of a column. Return the line that shows
 *  the text. */
function withCursor(drawing, columns, label, describe) {
  const mark = element("span", { class: "cursor", "aria-hidden": "true", hidden: true });
  const line = element("p", { class: "readout" }, HOW_TO_READ);
  let at = 0;
  function show(column) {
    at = Math.min(columns - 1, Math.max(0, column));
    const said = describe(at);
    mark.hidden = false;
    mark.style.left = `${((at + 0.5) / columns) * 100}%`;
    line.textContent = said;
    drawing.setAttribute("aria-valuenow", String(at));
    drawing.setAttribute("aria-valuetext", said);
  }
  function hide() {
    if (document.activeElement === drawing) return;
    mark.hidden = true;
    line.textContent = HOW_TO_READ;
  }
  furnish(drawing, {
    role: "slider", tabindex: "0", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": String(columns - 1),
    "aria-valuenow": "0", "aria-valuetext": columns ? describe(0) : "nothing",
    pointermove: (event) => {
      const box = drawing.getBoundingClientRect();
      show(Math.floor(((event.clientX - box.left) / box.width) * columns));
    },
    pointerleave: hide,
    focus: () => show(at),
    blur: hide,
    keydown: (event) => {
      const step = event.shiftKey ? 10 : 1;
      const moves = {
        ArrowLeft: at - step, ArrowRight: at + step, ArrowDown: at - step, ArrowUp: at + step,
        PageDown: at - 10, PageUp: at + 10, Home: 0, End: columns - 1,
      };
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(moves[event.key]);
    },
  }, [mark]);
  return line;
}
const HOW_TO_READ = "Point at the drawing, or focus it and use the arrow keys, to read values.";
