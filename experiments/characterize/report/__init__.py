"""The report: one HTML file that needs nothing else, the same in Markdown, each figure's data as CSV, all from rows."""
