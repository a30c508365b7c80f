"""Tables, each made from the events of one capture."""
