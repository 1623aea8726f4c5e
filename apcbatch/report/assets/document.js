// Document: the data of the page, read out of the page itself.

/** Read the document: JSON in gzip in base64, from the element "data". */
async function readDocument() {
  const packed = document.getElementById("data").textContent;
  const stream = new Blob([unpacked(packed)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function unpacked(packed) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(packed);
  const letters = atob(packed);
  const found = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at += 1) found[at] = letters.charCodeAt(at);
  return found;
}
