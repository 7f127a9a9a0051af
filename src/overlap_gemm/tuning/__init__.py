"""How long things take: the one timing protocol."""
