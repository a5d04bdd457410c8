"""What the page is made of: escaped markup, tables of numbers, marks that all views share, the frame around them."""
