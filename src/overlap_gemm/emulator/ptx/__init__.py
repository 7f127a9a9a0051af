"""PTX text to executable Python: parser, translator and instruction handlers."""
