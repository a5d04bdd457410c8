"""A check's report: for a terminal and for programs (report.py), as a page (html_page.py), as JUnit XML (junit.py).

report_parts.py, page.py and figure.py are their building blocks. All are pure functions of the check.
"""
