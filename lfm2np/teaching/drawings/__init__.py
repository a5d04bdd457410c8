"""The teaching page: one HTML file that shows a recorded run, and a step of it in a terminal."""
