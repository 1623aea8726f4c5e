"""One or more runs as an HTML page. Importing it does not load torch."""
