"""Verdicts on other engines: is this one right, and if not, where does it go wrong?

check.py asks workloads.py of an engine; judging/ judges each token of its answers by what its number format may do;
total.py and factors.py give the verdict, causes/ what the errors depend on. targets/ are the ways to
an engine, reports/ the forms of a report, vectors/ the golden vectors, locate/ the first wrong operator.
example_engine.py and vectors_plain.py are files to start from, or to copy.
"""
