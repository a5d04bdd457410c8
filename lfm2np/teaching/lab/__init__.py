"""`lfm2np lab`: a page on which a learner changes a run, and the engine computes it and draws it.

settings.py reads a run off a link, models.py makes token ids of it, compute.py runs it, lessons.py asks questions that
the engine answers (exercises.py: its predictions, which predictions.py judges), lab_page.py and form.py write it down,
child.py does all that in a process that worker.py can end, app.py serves.
"""
