"""PTX as text and as instructions: the parser and its records."""
