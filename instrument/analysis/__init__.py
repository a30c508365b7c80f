"""The tables of one capture, made from the events of its trace."""
