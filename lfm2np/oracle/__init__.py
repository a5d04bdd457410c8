"""Verdicts on other engines: is this one right, and if not, where does it go wrong?"""
