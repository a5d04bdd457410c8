"""The teaching page: one HTML file that shows a recorded run, made of plain text by Python, stepped by a little script.

draw.py puts it together from demo.py's runs; text.py draws a step in a terminal. runs/ is what is shown, page/ what a
page is made of, views/ one picture each, assets/ style and script.
"""
