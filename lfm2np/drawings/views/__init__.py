"""The views: each a function from recorded runs to a section of the page.

draw.py may import them; they import page/ and runs/, and not each other.
"""
