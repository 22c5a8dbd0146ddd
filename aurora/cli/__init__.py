"""The command line: one file a verb; each loads, calls and saves."""
