"""What clients are told: answers of both kinds, whole or in pieces, and the document that says so.

Part of serve/. Built of what the engine says and of what the client asked for, without any input or output.
"""
