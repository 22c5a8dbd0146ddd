"""The command line: one file per subcommand, which loads, calls the API and saves."""
