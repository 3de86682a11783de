"""Floor 4: the objects users hold. Short methods that delegate; no branch on a back end."""
