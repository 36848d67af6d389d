"""How weights reach an engine."""
