"""Where compiled functions of the CuTe DSL meet the emulator."""
