"""Responses of both kinds, whole or streamed, and the OpenAPI document that describes them."""
