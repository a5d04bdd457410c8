"""One report for every command that judges: report.py says what it is; as_text, as_json, as_html, as_junit show it.

markup.py is the one builder of pages, for drawings and the laboratory as well.
"""
