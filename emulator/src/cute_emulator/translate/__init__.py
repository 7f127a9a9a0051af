"""A module's instructions as Python functions of a group of lanes, ready to be run."""
