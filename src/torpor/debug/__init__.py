"""Tools for people: what ran and why, what was wrong, and where. Nothing of the core imports them."""
