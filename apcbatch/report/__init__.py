"""One or more runs as a page for the browser. Must not know: torch, click, how tokens are computed."""
