"""Who owns what: topic registry and ownership epochs, behind one small port."""
