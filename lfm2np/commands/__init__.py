"""What people start: the command line (cli/), the server (serve/), simulations (simulate/)."""
