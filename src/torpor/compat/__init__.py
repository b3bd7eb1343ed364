"""APIs of other systems on top of torpor; nothing in torpor imports this."""
