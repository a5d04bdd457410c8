"""What is drawn: tiny models, requests, sizes and schedules; and how they are fitted to what an engine lacks."""
