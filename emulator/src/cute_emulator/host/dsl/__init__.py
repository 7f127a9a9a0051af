"""Connection of compiled CuTe DSL functions to the emulator."""
