"""Settings of all emulator tests."""

import hypothesis

hypothesis.settings.register_profile("emulator", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("emulator")
