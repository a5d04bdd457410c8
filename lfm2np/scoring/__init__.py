"""How likely the model finds tokens that it is given: log-probability, rank and margin of each.

teacher_forcing.py: one sequence by reference.py, several in a ragged pass, many on any executor.
"""
