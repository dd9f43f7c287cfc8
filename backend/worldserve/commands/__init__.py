"""What stands behind the words of the command lines; imported when called."""
