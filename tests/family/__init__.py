"""Small models of every family, and what is in them, written down by hand. See `families`."""
