"""Tools for people: what ran and why, what was wrong, and where. The core imports none of them."""
