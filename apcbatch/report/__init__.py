"""The report: what a run did, as one page for the browser. It reads files; it runs nothing."""
