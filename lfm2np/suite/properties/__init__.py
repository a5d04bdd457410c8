"""What is checked of an engine, and how."""
