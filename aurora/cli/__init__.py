"""Command line: one file per subcommand, which loads inputs, calls the API, and saves results."""
