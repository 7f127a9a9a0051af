"""How an op is carried out (sequential, decomposed) and which way it is carried out (select)."""
