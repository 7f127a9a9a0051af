"""Exchange of output tiles with peers: workspace layout, calls, sending, receiving. Imports no torch."""
