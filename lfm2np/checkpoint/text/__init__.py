"""What is about text: tokenizers, the patterns that split it, chat templates."""
