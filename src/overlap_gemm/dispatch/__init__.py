"""From a call to what carries it out: checked arguments, one key for calls that are alike, custom ops."""
