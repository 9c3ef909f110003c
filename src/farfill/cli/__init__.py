"""The command line: composition roots, one file a command."""
