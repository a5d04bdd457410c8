"""Recorded runs as plain data, and what follows from them: nothing here knows how it will look."""
