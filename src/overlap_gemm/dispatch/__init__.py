"""From a call to the function that runs it: checked arguments, keys of known calls, custom ops."""
