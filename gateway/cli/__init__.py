"""Commands of the command line, without printing: functions that return a `CommandResult`."""
