"""Record windows of training: the session, its loop over the steps, and torch's profiler."""
