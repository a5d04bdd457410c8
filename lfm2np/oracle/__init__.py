"""Verdicts on other engines: is this one right, and if not, where does it go wrong?

check.py sends the requests of workloads.py to an engine; judging/ judges each token of the answers within the noise of
its number format; total.py gives the verdict, causes/ what the errors depend on. targets/ connect to
engines, reports/ format a report, vectors/ are the golden vectors, locate/ finds the first wrong operator, with dumps
of recorders/; compare/ says what quantisation costs. engines/exec_server.py and vectors_plain.py are files to copy.
"""
