"""The command line: ``evisrag COMMAND ...``, one module a command, each with SUMMARY and run(argv)."""
