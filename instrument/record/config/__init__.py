"""What to record, and when: the schema of the options, the schedule."""
