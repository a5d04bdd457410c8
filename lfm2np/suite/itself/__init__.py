"""Any engine against itself: the same tokens must get the same answer alone and in a batch, cold and warm, and so on.

pairs.py compares two answers to the same tokens; rounding_spread.py measures what rounding alone does to them and
judges the rest; questions.py draws what is asked; relations.py says under which conditions, as traces of fuzz/;
asked.py plays and judges all of them; by_itself.py compares a trace that is handed over; invariance_report.py writes
the reports.
"""
