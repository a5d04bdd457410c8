"""The views: each a function from recorded runs to a section of the page."""
