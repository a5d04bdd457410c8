"""What the page is made of: escaped markup, tables of numbers, marks that all views share, the frame around them.

markup.py, numbers.py, grid.py, view.py and, around them all, page.py.
"""
