"""What several commands need: how arguments are read and shown wrong, prompts and requests, workers, terminals."""
