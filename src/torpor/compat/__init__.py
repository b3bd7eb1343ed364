"""Other systems' names on top of torpor; nothing of torpor imports this."""
