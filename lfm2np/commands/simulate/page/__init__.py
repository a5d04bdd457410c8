"""Pages of `lfm2np simulate`: one run (simulation.py), many settings (sweep_page.py), their figures as SVG (curves.py).

Pure functions of a result as report.py gives it: the same result gives the same bytes. A page loads nothing.
"""
