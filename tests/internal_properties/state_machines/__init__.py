"""Rule-based state machines of Hypothesis.

The pool, the scheduler over a model without arithmetic (fake_model.py), a whole engine; engine_books.py keeps the books
of one run of it.
"""
