"""PTX as text and as instructions: the parser and what it yields."""
