"""Responses of both kinds, whole or streamed, and the OpenAPI document that describes them.

Part of serve/. Built of what the engine says and of what the client asked for, without any input or output.
"""
