"""`lfm2np lab`: a page on which a learner changes a run, and the engine computes it and draws it.

`page.compute(link)` is all of it: settings.py reads a run off a link, run.py computes it, lessons.py asks questions
that the engine answers (lessons.toml has their words). server.py computes pages for a browser of this machine;
static/ is a folder in which the visitor's browser does.
"""
