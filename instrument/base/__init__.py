"""What every room may use: errors, the log, files and URLs, names, numbers and text."""
