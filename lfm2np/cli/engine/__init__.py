"""Commands that run the engine, and the options that they share."""
