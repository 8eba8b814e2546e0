"""The command line: one file a command, listed in `app.COMMANDS`."""
