"""The choices of a compiled kernel, and which of them are legal. Imports neither the DSL nor torch."""
