"""What is tried, and what it is held against: tiny models, scenarios, their run, and the reference's word on it.

models.py, strategies.py, driver.py, draining.py, endings.py, ledger.py; lfm2np/plain.py is a second LFM2 in Python's
own floats; rounding.py holds engines that round against the noise of their format; lengths.py has the sizes that long
requests are drawn around; features.py leaves out of an example what an engine lacks, and names what it lacks and has
not said.
"""
