"""Report: one or more runs as an HTML page. Importing this package does not load torch."""
