"""The teaching page: one HTML file that shows a recorded run, made of plain text by Python and stepped by a little
script. See page.py for how it is put together, and views/ for what it shows."""
